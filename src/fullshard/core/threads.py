"""Start threads that are at rest before the interpreter ends.

Up to Python 3.13 an ending interpreter kills each thread that comes back to it. C++ code, which is what torch's calls
and Gloo's own threads come out of, does not let itself be killed so: the process aborts with "terminate called without
an active exception" (https://github.com/pytorch/pytorch/issues/190489).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Thread

Stop = Callable[[], object]

_SECONDS = 1.0
"""For each way to stop a thread; one that computes between two looks is through by then."""
_GLOO_SECONDS = 10.0

_STOPS: weakref.WeakKeyDictionary[Thread, tuple[Stop, ...]] = weakref.WeakKeyDictionary()


def start_thread(name: str, body: Callable[..., object], arguments: tuple[object, ...], *stops: Stop) -> Thread:
    """Start a daemon thread, and stop it before the interpreter ends.

    Args:
        name: the thread's name.
        body: what it runs; it must not keep anything alive that has the thread end.
        arguments: of `body`.
        stops: ways to have it end. The next one is tried if the thread has not ended a second after the last.
    """
    rest_at_exit()
    thread = Thread(target=body, args=arguments, name=name, daemon=True)
    _STOPS[thread] = stops
    thread.start()
    return thread


@functools.cache
def rest_at_exit() -> None:
    """Stop these threads, and wait for Gloo's, when the interpreter ends.

    Exit handlers run in reverse order: those that a script registers later still have the threads.
    """
    atexit.register(_rest)


def _rest() -> None:
    for turn in range(max(map(len, _STOPS.values()), default=0)):
        waiting = [(thread, stops[turn]) for thread, stops in _STOPS.items() if thread.is_alive() and stops[turn:]]
        for _, stop in waiting:
            stop()
        until = time.monotonic() + _SECONDS
        for thread, _ in waiting:
            thread.join(max(0.0, until - time.monotonic()))
    wait_for_gloo()


def wait_for_gloo() -> None:
    """Wait until Gloo's threads have let go of the tensors of the last operation.

    They do so after the operation is over, and need the interpreter for it. A thread that neither ran nor was kept from
    running while this one slept waits for its next operation, and there will be none.
    """
    deadline = time.monotonic() + _GLOO_SECONDS
    before, now = None, _gloo_threads()
    while now and (now != before or not all("S (sleeping)" in state for state in now)) and time.monotonic() < deadline:
        time.sleep(0.01)  # twice as long as a thread waits before it asks for the interpreter
        before, now = now, _gloo_threads()


def _gloo_threads() -> list[str]:
    """Return the state of each thread that runs operations, and how often it was put to sleep; Linux only."""
    found = []
    for path in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # or it has just ended
            name, *lines = path.read_text(encoding="utf-8").splitlines()
            if name.endswith("pt_gloo_runloop"):
                found.append(" ".join(line for line in lines if line.startswith("State") or "ctxt_switches" in line))
    return found
