"""The rank that failed first, and the printed report about it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fullshard.core.files import read_object
from fullshard.launch.worker import USER_ERROR


def root_cause(failures: Mapping[int, ProcessFailure], ended: Collection[int]) -> tuple[int, ProcessFailure]:
    """Return the first rank to fail, and how; skip processes that the launcher `ended`, if there are others."""
    own = {rank: failure for rank, failure in failures.items() if failure.pid not in ended}
    return min((own or failures).items(), key=lambda item: order_of(item[1]))


def what_others_said(rank: int, failures: Mapping[int, ProcessFailure]) -> str:
    """Say where other ranks were when they noticed the end of `rank`, which left no report."""
    others = {other: left_report(failure)[0] for other, failure in failures.items() if other != rank}
    lines = [message.partition("\n")[0] for message in others.values() if message]
    return "".join(f"the others noticed it here: {line}\n" for line in lines[:2])


def order_of(failure: ProcessFailure) -> tuple[int, float]:
    """Return a sort key that puts failures in the order in which they happened.

    The launcher notices a process that ended without a report (by a signal, or by an exit from within a library) later
    than the connection errors that its end causes in the others, so that process goes first. (SIGTERM comes from the
    launcher itself, which ends the rest with it.) Among reports the time of the file decides, because the time written
    inside is in whole seconds.
    """
    report = Path(failure.error_file)
    if report.is_file():
        return 1, report.stat().st_mtime
    return (2 if -failure.exitcode == signal.SIGTERM else 0), float(failure.timestamp)


def failure_report(rank: int, failure: ProcessFailure, *, world_size: int, last: str = "") -> str:
    """Return the report on the first rank to fail: its whole traceback if it left one, else what it did last.

    For a mistake in the settings or the data, which every rank finds, only the message is useful.
    """
    message, traceback = left_report(failure)
    if failure.exitcode == USER_ERROR and message is not None:
        return f"{message}\n"
    how = f"{'was ended by' if failure.exitcode < 0 else 'failed with'} {how_it_ended(failure)}"
    if traceback is not None and failure.exitcode < 0:
        how = "failed"  # the signal came while it ended because of that error
    text = f"\nrank {rank} of {world_size} (process {failure.pid} on {socket.gethostname()}) {how}\n"
    if -failure.exitcode == signal.SIGKILL and traceback is None:
        text += "hint: if nobody killed it, the system was out of memory; use more processes or a smaller batch\n"
    if traceback is None:
        return f"{text}it did last: {last}\n" if last else text
    return f"{text}{traceback.rstrip()}\n"


def how_it_ended(failure: ProcessFailure) -> str:
    """Return the signal's name, or the exit code."""
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    try:
        return signal.Signals(-failure.exitcode).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-failure.exitcode}"


def left_report(failure: ProcessFailure) -> tuple[str | None, str | None]:
    """Return the message and the traceback that a process left behind, None if it left none."""
    try:
        report = read_object(Path(failure.error_file))
        return str(report["message"]["message"]), str(report["message"]["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def exit_code(code: int) -> int:
    """Return a child's exit code as a shell would report it: 128 + N for a process that signal N ended."""
    return code if code >= 0 else 128 - code
