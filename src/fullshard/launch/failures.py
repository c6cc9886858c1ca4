"""Find the rank that failed first, and format the report about it."""

import signal
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fullshard.core.errors import cause_of
from fullshard.core.files import read_object
from fullshard.launch.worker import USER_ERROR


def root_cause(failures: Mapping[int, ProcessFailure], ended: Collection[int]) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and its failure. Consider `ended` processes only if no others failed."""
    own = {rank: failure for rank, failure in failures.items() if failure.pid not in ended}
    return min((own or failures).items(), key=lambda item: order_of(item[1]))


def what_others_said(rank: int, failures: Mapping[int, ProcessFailure]) -> str:
    """Quote up to two messages of other ranks that noticed the end of `rank`, if `rank` itself left no report."""
    others = {other: left_report(failure)[0] for other, failure in failures.items() if other != rank}
    lines = [message.partition("\n")[0] for message in others.values() if message]
    gone = f"(process {failures[rank].pid}"  # not the processes that ended because of it
    lines = [line for line in lines if gone in line or "(process " not in line]
    return "".join(f"the others noticed it here: {line}\n" for line in lines[:2])


def order_of(failure: ProcessFailure) -> tuple[int, float]:
    """Return a sort key that orders failures by the time at which they happened.

    A process that ends without a report, through a signal or an exit inside a library, sorts first: the launcher
    notices its end only after the connection errors that it causes in other ranks. A process that SIGTERM ended sorts
    last, because the launcher sends SIGTERM to the remaining processes. Reports are ordered by the modification time of
    their files, because the time written in them is in whole seconds.
    """
    report = Path(failure.error_file)
    if report.is_file():
        return 1, report.stat().st_mtime
    return (2 if -failure.exitcode == signal.SIGTERM else 0), float(failure.timestamp)


def failure_report(rank: int, failure: ProcessFailure, *, world_size: int, last: str = "") -> str:
    """Return the report on the first rank that failed: a user error's message, a traceback, or the last action."""
    message, traceback = left_report(failure)
    if failure.exitcode == USER_ERROR and message is not None:
        return f"{message}\n"
    how = f"{'was ended by' if failure.exitcode < 0 else 'failed with'} {how_it_ended(failure)}"
    if traceback is not None and failure.exitcode < 0:
        how = "failed"  # the signal arrived while the process was ending because of that error
    if (cause := cause_of(message or "", rank)) not in (None, rank):
        how += f" because of rank {cause}"
    text = f"\nrank {rank} of {world_size} (process {failure.pid} on {socket.gethostname()}) {how}\n"
    if -failure.exitcode == signal.SIGKILL and traceback is None:
        text += "hint: unless someone killed it, the system ran out of memory; use more processes or a smaller batch\n"
    if traceback is None:
        return f"{text}its last action: {last}\n" if last else text
    return f"{text}{traceback.rstrip()}\n"


def how_it_ended(failure: ProcessFailure) -> str:
    """Return the name of the signal that ended a process, or the exit code of a process that exited by itself."""
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    try:
        return signal.Signals(-failure.exitcode).name
    except ValueError:  # most real-time signals have no name
        return f"signal {-failure.exitcode}"


def left_report(failure: ProcessFailure) -> tuple[str | None, str | None]:
    """Return the message and the traceback from the report that a process left, or None for each that is missing."""
    try:
        report = read_object(Path(failure.error_file))
        return str(report["message"]["message"]), str(report["message"]["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def exit_code(code: int) -> int:
    """Convert a child's exit code to a shell's: 128 + N for a process that signal N ended."""
    return code if code >= 0 else 128 - code
