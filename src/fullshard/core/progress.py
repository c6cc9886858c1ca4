"""A progress bar on the terminal for long work, with an estimate of the time that is left."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_running: list[tuple[Any, float]] = []  # the bar, and the time at which the work began


@contextlib.contextmanager
def progress(label: str, total: float) -> Iterator[None]:
    """After a second, show which part of the amount `total` the calls of `advance` inside the block have reported.

    Only rank 0 shows it, in its main thread, without `--json`, and if standard error is a terminal.
    """
    is_seen = sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and "--json" not in sys.argv
    is_first = os.environ.get("RANK", "0") == "0" and threading.current_thread() is threading.main_thread()
    if not is_seen or not is_first or _running:
        yield
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.BarColumn(), rich.TaskProgressColumn(), rich.TimeRemainingColumn(), "left")
    bar = rich.Progress(label, *columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    bar.add_task(label, total=total)
    _running.append((bar, time.monotonic()))
    try:
        yield
    finally:
        _running.clear()
        bar.stop()


def advance(amount: float) -> None:
    """Report that more of the work is done, in the unit of its total."""
    for bar, begin in _running:
        bar.advance(bar.task_ids[0], amount)
        if time.monotonic() - begin >= 1:
            bar.start()
