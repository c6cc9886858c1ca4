"""The `fullshard` command line, with one module per subcommand.

No module in this package imports torch before a subcommand runs.
"""

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

interrupted: list[int] = []


def start() -> None:
    """Run the command line of this process and exit. Ctrl-C ends it quietly, also while its modules are imported."""
    answer_interrupts()
    from fullshard.cli.main import main

    main()


def answer_interrupts() -> None:
    """Answer Ctrl-C with one line instead of a traceback, unless this process has another handler, as ranks have."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Answer Ctrl-C: raise `KeyboardInterrupt`, or end at once during an import, which may swallow it."""
    while frame is not None and "importlib" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is not None:
        end_interrupted()
    interrupted.append(number)
    raise KeyboardInterrupt


def end_interrupted() -> NoReturn:
    """Say that Ctrl-C ended the command, and skip the interpreter's shutdown, which takes a second with torch."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed, or interrupted during a write
        sys.stdout.flush()
    clean = "\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar may be on the line, without a cursor
    os.write(2, f"{clean}fullshard: interrupted\n".encode())
    os._exit(128 + signal.SIGINT)
