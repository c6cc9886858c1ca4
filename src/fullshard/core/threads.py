"""Starts threads that stop before the interpreter shuts down.

Up to Python 3.13, an interpreter that shuts down kills each thread that returns to it. Torch's calls and Gloo's own
threads return from C++ code, which cannot be killed this way, so the process aborts with "terminate called without an
active exception" (https://github.com/pytorch/pytorch/issues/190489).
"""

import atexit
import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Thread

_SECONDS = 1.0
"""The seconds that threads have to stop, enough to finish a computation between two checks."""
_GLOO_SECONDS = 10.0

_STOPS: weakref.WeakKeyDictionary[Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def start_thread(name: str, body: Callable[[], object], stop: Callable[[], object]) -> None:
    """Start a daemon thread, which `stop` ends at exit. `body` must not refer to what stops it when deleted."""
    stop_at_exit()
    thread = Thread(target=body, name=name, daemon=True)
    _STOPS[thread] = stop
    thread.start()


@functools.cache
def stop_at_exit() -> None:
    """Register an exit handler that stops these threads and waits for Gloo's. It runs after handlers of scripts."""
    atexit.register(_stop_all)


def _stop_all() -> None:
    waiting = [thread for thread in _STOPS if thread.is_alive()]
    for thread in waiting:
        _STOPS[thread]()
    until = time.monotonic() + _SECONDS
    for thread in waiting:
        thread.join(max(0.0, until - time.monotonic()))
    wait_for_gloo()


def wait_for_gloo() -> None:
    """Wait until Gloo's threads have released the tensors of the last operation.

    The threads need the interpreter to release the tensors after an operation ends. A thread that did not run during a
    sleep and was not waiting to run has released them, and is now waiting for its next operation.
    """
    deadline = time.monotonic() + _GLOO_SECONDS
    before, now = None, _gloo_threads()
    while now and (now != before or not all("S (sleeping)" in state for state in now)) and time.monotonic() < deadline:
        time.sleep(0.01)  # twice the time that a thread waits before it requests the interpreter
        before, now = now, _gloo_threads()


def _gloo_threads() -> list[str]:
    """Return the state and the number of context switches of each Gloo thread that runs operations (only on Linux)."""
    found = []
    for path in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread may have just ended
            name, *lines = path.read_text(encoding="utf-8").splitlines()
            if name.endswith("pt_gloo_runloop"):
                found.append(" ".join(line for line in lines if line.startswith("State") or "ctxt_switches" in line))
    return found
