"""Preemption: a signal to any rank makes all ranks save at the same step and exit.

The process that receives the first signal only records it. The other ranks learn about it at the end of the next
backward pass of a sharded model.
"""

import atexit
import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from fullshard.core.stopping import STOPPING
from fullshard.launch.bootstrap import LAUNCHER_PID, PREEMPTION_DIR, tell_launcher

PREEMPTED = 75
"""Exit code of a job that saved and ended on request. Start it again to continue."""

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
AGAIN_SECONDS = 1.0
"""A signal that arrives sooner belongs to the same request, which both a scheduler and a launcher passed on."""

_heard: list[float] = []
_is_armed: list[bool] = []


def should_stop() -> bool:
    """Return whether all ranks must now save and exit. All ranks get the same answer after the same backward pass.

    The first call installs handlers for SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGUSR2. Until then, these
    signals keep their usual effect. Call `should_stop` after every step, on every rank. If a DataLoader has worker
    processes, also call it once before the loop. The workers then inherit the handlers; otherwise a SIGUSR1 that is
    sent to all processes would end them. A second signal ends the process immediately.
    """
    listen()
    if STOPPING.is_agreed:
        tell_launcher("stopping")
    return STOPPING.is_agreed


def listen() -> None:
    """Listen for signals from now on. A second call does nothing."""
    if _is_armed:
        return
    _is_armed.append(True)
    STOPPING.is_listened_to = True
    if threading.current_thread() is not threading.main_thread():
        warnings.warn("fullshard: signals can only be handled in the main thread", stacklevel=3)
        return
    for name in SIGNALS:
        signal.signal(signal.Signals[name], _hear)
    atexit.unregister(_hear_no_more)
    atexit.register(_hear_no_more)
    tell_launcher("listening")


def _hear(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _heard:
        _heard.append(now)
        STOPPING.is_wanted = True
        if LAUNCHER_PID not in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
            for name in SIGNALS:  # interrupts the process immediately, wherever it waits
                signal.signal(signal.Signals[name], signal.SIG_DFL)
    elif now - _heard[0] > AGAIN_SECONDS:
        os._exit(128 + number)


def _hear_no_more() -> None:
    """Ignore late signals of the same request at exit, when the interpreter removes handlers written in Python."""
    if STOPPING.is_agreed:
        for name in SIGNALS:
            signal.signal(signal.Signals[name], signal.SIG_IGN)


def listening_in(directory: Path) -> set[int]:
    """Return the processes that have reported in `directory` that they listen for signals."""
    return {int(path.name.rpartition("-")[2]) for path in directory.glob("listening-*")}


def exit_code() -> int:
    """Return the exit code for this process. It is 0 under a launcher, because the launcher reports the preemption."""
    return PREEMPTED if STOPPING.is_agreed and PREEMPTION_DIR not in os.environ else 0


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Listen for signals only inside the context. Use this in code that runs inside another program."""
    before = {name: signal.getsignal(signal.Signals[name]) for name in SIGNALS}
    STOPPING.is_wanted = STOPPING.is_agreed = False
    listen()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for name, handler in before.items():
                signal.signal(signal.Signals[name], signal.SIG_DFL if handler is None else handler)
        _is_armed.clear()
        _heard.clear()
