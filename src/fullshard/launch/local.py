"""Start a job's processes on this host, as torchelastic workers with torchrun's variables, and wait for their end."""

import contextlib
import gc
import io
import logging
import os
import re
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from fullshard.config.schema import LaunchConfig
from fullshard.config.switches import ELASTIC, TOKEN
from fullshard.core.errors import ConfigError, cause_of, plural, tell
from fullshard.core.journal import HEARTBEAT_SECONDS, JOURNAL, Happening, read_journal, told_by_processes
from fullshard.core.paths import local_path
from fullshard.core.process import read_status
from fullshard.launch import bootstrap, torch_private
from fullshard.launch.bootstrap import LAUNCHER_PID, PREEMPTION_DIR
from fullshard.launch.copies import copies_directory
from fullshard.launch.failures import (
    exit_code,
    failure_report,
    how_it_ended,
    left_report,
    order_of,
    root_cause,
    what_others_said,
)
from fullshard.launch.logs import RankLogs
from fullshard.launch.membership import Membership
from fullshard.launch.network import DEFAULT_PORT, interface_of, listen, resolve
from fullshard.launch.preemption import AGAIN_SECONDS, PREEMPTED, listening_in
from fullshard.launch.processes import (
    adopt_orphans,
    below,
    check_count,
    descendants,
    end_descendants,
    reap_orphans,
    worker_variables,
)
from fullshard.launch.rendezvous import LOOPBACK, MultiHostRendezvous, OneHostRendezvous
from fullshard.launch.rendezvous_server import (
    JOIN_SECONDS,
    LAST_CALL_SECONDS,
    RendezvousClient,
    RendezvousServer,
    RootCause,
)
from fullshard.launch.scene import Scene, is_of_a_hang, is_of_a_loss
from fullshard.launch.scratch import scratch_directory

SHUTDOWN_SECONDS = 3
"""Seconds that a process may take to end after a signal before it is killed."""
_HANG_SECONDS = 5.0
"""A signal that ends a job without a save names the ranks for which others have waited for so long."""

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_MESSAGES = ("SIGUSR1", "SIGUSR2")
"""Signals that are meant for the processes and never end the launcher."""
_CHATTY_LOGGERS = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")
"""Loggers that would also report every process that ends. `failure_report` reports the failure once."""


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """Describes the part of a job that runs on one host: the command, the number of processes, and the settings."""

    command: tuple[str, ...]  # of every worker
    nproc: int
    launch: LaunchConfig
    variables: Mapping[str, str] = field(default_factory=dict)  # in addition to the inherited ones
    same: Mapping[str, str] = field(default_factory=dict)  # values that must be equal on all hosts, by name
    join_timeout: float = JOIN_SECONDS
    last_call: float = LAST_CALL_SECONDS
    tee: str | None = None
    redirects: str | None = None

    @property
    def run_id(self) -> str:
        """The job's name."""
        return self.launch.rdzv_id or ("fullshard" if self.launch.num_machines > 1 else uuid.uuid4().hex[:12])


def launch_local(
    module: str, arguments: Sequence[str], *, nproc: int, max_restarts: int = 0, grace_period: float = 25.0
) -> int:
    """Run a module that calls `run_worker` in `nproc` processes on this host. Return the exit code of `run_job`."""
    if nproc < 1:
        raise ConfigError(f"the number of processes must be at least 1, got {nproc}")
    check_count(nproc)
    launch = LaunchConfig(max_restarts=max_restarts, grace_period=grace_period)
    command = (sys.executable, bootstrap.__file__, "module", module, *arguments)
    return run_job(LaunchJob(command, nproc, launch, worker_variables(nproc, os.environ)))


def run_job(job: LaunchJob) -> int:
    """Run this host's part of a job until all ranks on all hosts end, or one of them fails.

    If a rank fails, or this process gets SIGINT, SIGTERM, SIGHUP or SIGQUIT, the launcher ends the other processes, and
    all processes that they started, within a few seconds. The last thing it prints to standard error is the traceback
    of the rank that failed first, on whichever host that was.

    The launcher passes SIGINT and SIGTERM on to ranks that listen for signals (`launch.preemption`). These ranks have
    the grace period to save and exit; a second signal ends them. SIGUSR1 and SIGUSR2 are always passed on.

    Returns:
        The exit code of the job: 0 on success; the exit code of the rank that failed first, or 1 if that rank was on
        another host; 128 + the number of the signal that ended that rank; or `PREEMPTED` if the ranks stopped because
        of a signal.

    Raises:
        SystemExit: with the code 128 + N, if signal N to this process has ended the job.
    """
    gc.freeze()  # importing torch creates a million objects, which would also be searched for garbage at exit
    gc.enable()
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for stream in (sys.stdout, sys.stderr):  # otherwise lines of ranks arrive late if the output is not a terminal
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    adopt_orphans()
    agents: list[Agent] = []

    def hear(number: signal.Signals) -> None:
        if agents:
            agents[0].hear(number)
        elif number.name not in _MESSAGES:
            raise SignalException(f"signal {number}", sigval=number)

    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # torchelastic's own handlers would replace these
    with scratch_directory("fullshard-launch-") as scratch, copies_directory() as outlasting, _signals_to(hear):
        try:
            kept = None if job.launch.log_dir is None else local_path(job.launch.log_dir)
            if kept is not None and kept.exists() and not kept.is_dir():
                raise ConfigError(f"log_dir: {kept} is a file", hint="name a directory; it is created if necessary")
            logs = RankLogs(kept or scratch, job.nproc, job.tee, job.redirects, is_kept=kept is not None)
            agent = Agent(replace(job, variables={**job.variables, **outlasting}), logs, scratch / "preemption")
            agents.append(agent)
            return agent.outcome(agent.run())
        except SignalException as error:
            _show_cursor()
            say(f"{signal.Signals(error.sigval).name}: {plural(job.nproc, 'process')} on this host ended")
            sys.exit(128 + int(error.sigval))


def say(line: str) -> None:
    """Print a message from the launcher to standard error."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed, or called by a signal handler during a write
        tell(f"fullshard: {line}")


def _tell(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stderr.write(text)


class Agent(LocalElasticAgent):
    """torchelastic's agent, extended to end all processes promptly and to track the other hosts."""

    def __init__(self, job: LaunchJob, logs: RankLogs, preemption: Path) -> None:
        self._job, self._logs, self._preemption = job, logs, preemption
        self._asked: list[tuple[signal.Signals, float]] = []  # requests to end the job, each with its deadline
        self._scene = Scene(preemption)
        self._processes: dict[int, Any] = {}
        self._groups: set[int] = set()
        self._elsewhere = set(descendants())
        self._failures: Mapping[int, ProcessFailure] = {}
        self._heard_late: list[signal.Signals] = []
        self._is_regrouping, self._next_beat = False, 0.0
        self._client: RendezvousClient | None = None
        self._membership: Membership | None = None
        self._handler = self._make_handler()
        spec = WorkerSpec(
            role=job.launch.role,
            local_world_size=job.nproc,
            # torchelastic substitutes ${local_rank} in arguments, so a dollar sign must be doubled.
            entrypoint=job.command[0],
            args=tuple(argument.replace("$", "$$") for argument in job.command[1:]),
            rdzv_handler=self._handler,
            max_restarts=job.launch.max_restarts,
            monitor_interval=job.launch.monitor_interval,
        )
        super().__init__(spec, logs, log_line_prefix_template="[rank ${rank}] ")

    def _make_handler(self) -> OneHostRendezvous:
        job, launch = self._job, self._job.launch
        if launch.num_machines == 1:
            return OneHostRendezvous(job.run_id, launch.main_process_port or 0)
        least = launch.min_machines if launch.is_elastic else None
        address = resolve(launch.main_process_ip or "", job.join_timeout)
        port = launch.main_process_port or DEFAULT_PORT
        listening = None if launch.machine_rank else listen(address, port, must=launch.machine_rank == 0)
        server = None
        if listening is not None:
            server = RendezvousServer(listening, launch.num_machines, TOKEN.read(), least, job.last_call)
            server.start()
        same = {
            "rdzv_id": job.run_id,
            "num_machines": str(launch.num_machines) if least is None else f"{least}:{launch.num_machines}",
            "processes per host": str(job.nproc),
            **job.same,
        }
        hello = {"host": socket.gethostname(), "machine_rank": launch.machine_rank, "same": same}
        self._client = RendezvousClient((address, port), hello, job.join_timeout, say, TOKEN.read())
        if least is not None:
            self._membership = Membership(self._client, self._preemption, launch.grace_period, say)
        return MultiHostRendezvous(job.run_id, self._client, server)

    def run(self, role: str = "default") -> RunResult:
        """Run the workers until the job ends, and return their results."""
        try:
            result: RunResult = super().run(role)
            if self._client is not None:
                self._client.failed = result.state is not WorkerState.SUCCEEDED
            return result
        finally:
            self._handler.shutdown()

    def outcome(self, result: RunResult) -> int:
        """Report the failure, if there is one, and return the job's exit code."""
        cause = self._cause
        if not result.failures and (cause is None or self._is_left_last):
            if not any(self._preemption.glob("stopping-*")):
                events = [*read_journal(path)] if (path := told_by_processes(self._preemption)) else []
                if cause is None and events and events[-1]["kind"] != Happening.END:
                    self._note(Happening.END)  # the script did not call `end_training`
                return 0
            path, whose = told_by_processes(self._preemption), "" if self._asked else " to a rank"
            if path and "saved and stopped" not in str([*read_journal(path)][-1:]):  # the recipes and Trainer record it
                self._note(Happening.PREEMPTION, f"saved and stopped because of a signal{whose}")
            say(
                f"the {plural(self._job.nproc, 'process')} on this host stopped because of a signal; restart the job "
                "to continue"
            )
            return PREEMPTED
        _show_cursor()
        if cause is not None and not cause.here:
            say(f"{plural(self._job.nproc, 'process')} on this host ended because of another host:")
            _tell(self._told(cause))
            return 1
        rank, failure = root_cause(result.failures, self._scene.ended)
        _tell(self._report(rank, failure, result.failures))
        self._note_failure(rank, failure)
        return exit_code(failure.exitcode)

    def _note(self, kind: Happening, message: str = "", **details: Any) -> None:
        """Record an event in the file that the processes have chosen. Do nothing if they have chosen none."""
        JOURNAL.path = told_by_processes(self._preemption) or JOURNAL.path
        JOURNAL.note(kind, message, **details)

    def _note_failure(self, rank: int, failure: ProcessFailure) -> str:
        """Record the failure of a rank on this host. Return its message, or how the process ended."""
        message = left_report(failure)[0] or ""
        details = {"pid": failure.pid, "how": how_it_ended(failure), "cause_rank": cause_of(message, rank)}
        step = read_status(self._preemption / f"status-{failure.pid}")[2]
        self._note(Happening.FAILURE, message, rank=rank, step=step, **details)
        return f"rank {rank}: {message or how_it_ended(failure)}"

    def _report(self, rank: int, failure: ProcessFailure, failures: Mapping[int, ProcessFailure]) -> str:
        last = read_status(self._preemption / f"status-{failure.pid}")[0]
        text = failure_report(rank, failure, world_size=self._world_size, last=last)
        if left_report(failure)[1] is None:
            return text + what_others_said(rank, failures)
        text += self._missing() if is_of_a_hang(text) else ""
        return text + (self._scene.done_early(self._ranks, self._world_size) if is_of_a_loss(text) else "")

    def _told(self, cause: RootCause) -> str:
        """Return the report of another host's failure, and for a hang the stacks of this host's missing ranks.

        Record a lost host. Other failures have been recorded by their host, in a file that this one may not have.
        """
        if cause.lost or cause.gone:
            self._note(Happening.FAILURE, cause.text.strip(), host=cause.host, pid=None)
        return cause.text + (self._missing() if is_of_a_hang(cause.text) else "")

    def _missing(self) -> str:
        return self._scene.missing(self._ranks, self._world_size)

    @property
    def _ranks(self) -> dict[int, int]:
        """The global rank of each process on this host, keyed by process id."""
        return {worker.id: worker.global_rank for worker in self.get_worker_group().workers}

    @property
    def _is_left_last(self) -> bool:
        """Return whether this host was asked to end and is not the first host to leave this elastic job."""
        return bool(self._membership and self._asked and self._cause and self._cause.lost)

    @property
    def _cause(self) -> RootCause | None:
        """The first failure on any host, or None if there is none or the job has only one host."""
        return self._client.root_cause if self._client is not None else None

    @property
    def _world_size(self) -> int:
        """The number of processes in the current attempt, over all hosts."""
        return self._job.nproc * (self.get_worker_group().group_world_size or self._job.launch.num_machines)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        address = self._client.address if self._client is not None else LOOPBACK
        interface = interface_of(address)
        shutil.rmtree(self._preemption, ignore_errors=True)  # left by an earlier attempt
        self._preemption.mkdir(parents=True)
        own = {LAUNCHER_PID: str(os.getpid()), PREEMPTION_DIR: str(self._preemption)}
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            own["GLOO_SOCKET_IFNAME"] = interface  # for the host's name, Gloo often finds an unreachable address
        if self._membership is not None:
            self._membership.begin()
            least, most = self._job.launch.min_machines or 0, self._job.launch.num_machines
            own[ELASTIC.name] = f"{least * self._job.nproc}:{most * self._job.nproc}"
        self._logs.variables = {**self._job.variables, **own}
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._groups |= set(pids.values())
        context = torch_private.worker_context(self)
        torch_private.close_streams(context)
        close = context.close
        # When a worker fails, torchelastic would give the others 30 seconds.
        asked, client = self._asked, self._client  # not `self`, because `self` holds the context
        scene = self._scene = Scene(self._preemption)
        processes = self._processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}

        def look_and_close(death_sig: Any = None, timeout: int = 0) -> None:
            if asked:
                scene.ended |= {process.pid for process in processes.values() if process.poll() is None}
            else:
                scene.look(processes, is_over=client is not None and client.root_cause is not None)
            close(death_sig, 0 if asked else SHUTDOWN_SECONDS)

        context.close = look_and_close
        return pids

    def hear(self, number: signal.Signals) -> None:
        """Pass a signal on to the workers that listen for it. Raise `SignalException` if the job must end instead."""
        now, grace = time.monotonic(), self._job.launch.grace_period
        listening = below(listening_in(self._preemption))
        is_again = bool(self._asked) and now - (self._asked[0][1] - grace) >= AGAIN_SECONDS
        is_unheard = not self._asked and not listening and number.name not in _MESSAGES
        if number.name in ("SIGHUP", "SIGQUIT") or is_again or is_unheard:
            raise SignalException(f"signal {number}", sigval=number)
        if self._asked:  # the same request
            return
        # The signal would end ranks that do not listen yet. They learn about it from ranks that do.
        workers = torch_private.worker_context(self)
        for pid in listening or (workers.pids().values() if workers is not None else ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if listening:
            self._asked.append((number, now + grace))
            self._note(Happening.PREEMPTION, f"{number.name}: asked to save and end", grace_period=grace)
            say(
                f"{number.name}: the {plural(self._job.nproc, 'process')} on this host will save and end within "
                f"{grace:g} s; a second signal ends them immediately"
            )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for number, end in self._asked:
            if time.monotonic() < end:
                break
            say(f"the grace period of {self._job.launch.grace_period:g} s ended before a new checkpoint was saved")
            raise SignalException(f"signal {number}", sigval=number)
        if time.monotonic() >= self._next_beat and (path := told_by_processes(self._preemption)) is not None:
            self._next_beat = time.monotonic() + HEARTBEAT_SECONDS
            with contextlib.suppress(OSError):
                os.utime(path)  # shows `fullshard watch` on any host that the job lives
        result: RunResult = super()._monitor_workers(worker_group)
        workers = torch_private.worker_context(self).pids()
        reap_orphans(spared={*workers.values(), *self._elsewhere})
        self._failures = result.failures
        if self._asked and result.is_failed():
            torch_private.allow_no_restart(self)  # the sender wants the job to end
        client = self._client
        if client is None:
            return result
        if result.is_failed():
            rank, failure = root_cause(result.failures, self._scene.ended)
            client.report(order_of(failure), self._report(rank, failure, result.failures))
        if self._membership is not None and self._membership.has_changed(result, is_asked=bool(self._asked)):
            torch_private.grant_restart(self)
            self._is_regrouping, self._failures = True, {}
            return RunResult(state=WorkerState.UNHEALTHY)
        if client.root_cause is not None and result.state is WorkerState.HEALTHY and not self._is_left_last:
            return RunResult(state=WorkerState.UNHEALTHY)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        number = self._job.launch.max_restarts - torch_private.remaining_restarts(self)
        self._stop_workers(worker_group)
        had_listened = bool(listening_in(self._preemption))
        for late in self._heard_late:
            if had_listened or late.name not in _MESSAGES:
                raise SignalException(f"signal {late}", sigval=late)
        cause, why = self._cause, ""
        if cause is not None and not cause.here:
            _tell(self._told(cause))
            why = cause.text.strip()
        elif self._failures:
            rank, failure = root_cause(self._failures, self._scene.ended)
            _tell(self._report(rank, failure, self._failures))
            why = self._note_failure(rank, failure)
        if self._is_regrouping:
            self._is_regrouping = False
            self._note(Happening.RESTART, "the set of hosts has changed")
        else:
            self._note(Happening.RESTART, why.partition("\n")[0], number=number, of=self._job.launch.max_restarts)
            say(f"restarting all processes ({number} of {self._job.launch.max_restarts} restarts)")
        # Drop the last references: the next store on a fixed port can only listen once this one is closed.
        worker_group.store = None
        torch_private.forget_store(self)
        super()._restart_workers(worker_group)

    def _tell_what_hung(self, number: signal.Signals) -> None:
        """Before a signal ends the processes, say which rank prevented the save or kept others waiting, and where."""
        is_late = bool(self._asked) and time.monotonic() >= self._asked[0][1]
        self._scene.look(self._processes, is_over=True)
        least = 0.0 if is_late else AGAIN_SECONDS if self._asked else _HANG_SECONDS
        text = self._scene.hung(self._ranks, self._world_size, least)
        why = "the grace period ended" if is_late else f"a second signal ({number.name}) arrived"
        why = f"{why} before the checkpoint was saved" if self._asked else f"{number.name} ended the run without a save"
        cause = {"cause_rank": int(found[1])} if (found := re.match(r"\nrank (\d+)", text)) else {}
        self._note(Happening.PREEMPTION, f"{why}{text}", **cause)
        _tell(text)

    def _exit_barrier(self) -> None:
        leaves = self._membership is not None and bool(self._asked)  # the other hosts continue without this one
        if self._client is not None and not leaves:
            self._client.finish()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        self._heard_late = []
        with _signals_to(self._heard_late.append):  # a second Ctrl-C must not leave processes behind
            workers = torch_private.worker_context(self)
            if isinstance(end := sys.exception(), SignalException):
                self._tell_what_hung(signal.Signals(end.sigval))
            if workers is not None:
                workers.close(death_sig, 0 if self._asked else SHUTDOWN_SECONDS)
            super()._shutdown(death_sig)  # ends its other processes; before 2.13 it gives workers half a minute
            end_descendants(self._groups, spared=self._elsewhere)


def _show_cursor() -> None:
    """Show the terminal's cursor again, which an aborted progress bar may have hidden."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


@contextlib.contextmanager
def _signals_to(hear: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Route signals to a function inside the context. Ignored signals stay ignored."""
    before = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in _SIGNALS}
    heard = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, lambda number, _: hear(signal.Signals(number)))
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)
