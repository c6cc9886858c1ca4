"""Start a job's processes on this host and see them end.

The processes are torchelastic workers with a rendezvous on the loopback address, so each finds the same variables that
torchrun would set.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.core.errors import ConfigError
from fullshard.launch.worker import LAUNCHER_PID, USER_ERROR

SHUTDOWN_SECONDS = 3
"""How long a process may take to end after a signal before it is killed."""

_CHATTY_LOGGERS = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")
"""They report every ended process in their own words; `failure_report` says it once."""


def launch_local(module: str, arguments: Sequence[str], *, nproc: int) -> int:
    """Run `python -m module arguments...` in `nproc` processes until all end or one fails.

    When one fails, or this process gets SIGINT, SIGTERM, SIGHUP or SIGQUIT, the others are ended within a few seconds.
    The traceback of the rank that failed first is printed last, to standard error.

    Args:
        module: what to run; it should call `fullshard.launch.worker.run_worker`.
        arguments: its command-line arguments.
        nproc: number of processes, the world size.

    Returns:
        The exit code of the job: 0, the code of the rank that failed first, or 128 + the number of the signal that
        ended that rank or this process.

    Raises:
        ConfigError: `nproc` is less than 1.
    """
    if nproc < 1:
        raise ConfigError(f"the number of processes must be at least 1, got {nproc}")
    with tempfile.TemporaryDirectory(prefix="fullshard-launch-") as log_dir, _environ(worker_variables(nproc)):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        )
        for name in _CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            _show_cursor()
            rank, failure = root_cause(error.failures)
            sys.stderr.write(failure_report(rank, failure, world_size=nproc))
            return exit_code(failure.exitcode)
        except SignalException as error:
            _show_cursor()
            sys.stderr.write(f"{signal.Signals(error.sigval).name}: all {nproc} processes were ended\n")
            return 128 + int(error.sigval)
    return 0


def _show_cursor() -> None:
    """Undo what a progress bar did to the terminal, if the process that drew it could not."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


def worker_variables(nproc: int, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables the workers need that are not set yet.

    Threads are shared out, because `nproc` processes with a thread per core each slow one another down; and Gloo is
    kept on the loopback interface, because the name of a laptop often resolves to an address nothing listens on.
    """
    environ = os.environ if environ is None else environ
    wanted = {
        "OMP_NUM_THREADS": str(max(1, usable_cpu_count() // nproc)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # Where LaunchConfig has no field for it yet, torch reads this variable or keeps its 30 seconds.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        LAUNCHER_PID: str(os.getpid()),
    }
    return {name: value for name, value in wanted.items() if name == LAUNCHER_PID or name not in environ}


def usable_cpu_count() -> int:
    """Processors this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def root_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank that failed first, and how.

    A process that ended without a report (a signal, or an exit from within a library) is seen later than the connection
    errors that its end causes in the others: so it goes first. (SIGTERM is what the launcher itself sends to the rest.)
    Among reports the time of the file decides, because the time written inside is in whole seconds.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, float]:
        _, failure = item
        report = Path(failure.error_file)
        if report.is_file():
            return True, report.stat().st_mtime
        return -failure.exitcode == signal.SIGTERM, failure.timestamp

    return min(failures.items(), key=order)


def failure_report(rank: int, failure: ProcessFailure, *, world_size: int) -> str:
    """What is printed about the rank that failed first: its whole traceback where it left one.

    Of a mistake in the settings or the data, which every rank finds alike, only the message is of use.
    """
    message, traceback = _left_report(failure)
    if failure.exitcode == USER_ERROR and message is not None:
        return f"{message}\n"
    if failure.exitcode < 0:
        how = f"was ended by {signal.Signals(-failure.exitcode).name}"
    else:
        how = f"failed with exit code {failure.exitcode}"
    text = f"\nrank {rank} of {world_size} (process {failure.pid}) {how}\n"
    if -failure.exitcode == signal.SIGKILL:
        text += "hint: if nobody killed it, the system was out of memory; use more processes or a smaller batch\n"
    return text if traceback is None else f"{text}{traceback.rstrip()}\n"


def _left_report(failure: ProcessFailure) -> tuple[str | None, str | None]:
    """The message and the traceback that a process left behind, None where it ended without."""
    try:
        report: dict[str, Any] = json.loads(Path(failure.error_file).read_text(encoding="utf-8"))
        return str(report["message"]["message"]), str(report["message"]["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def exit_code(code: int) -> int:
    """A child's exit code as a shell would report it: 128 + N for a process that signal N ended."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _environ(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes started inside; torchelastic offers no other way to hand them on."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
