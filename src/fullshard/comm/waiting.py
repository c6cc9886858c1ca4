"""Contexts for waiting for other ranks, and the errors raised when those ranks do not arrive.

torch's own errors name a socket or a communicator. `Waiting` converts them to errors that name the rank, the operation
and the step. `PROGRESS` records each wait while it lasts. A `Watcher` installed in `PROGRESS` can find out which rank
is missing and end the wait.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fullshard.core.errors import CommunicationError, FullshardError

_HINT = "check whether another rank failed first, or runs other code (such as below `if rank == 0:`)"
_STEP_HINT = "check whether another rank failed first, had fewer batches, or took another path through the model"
_ERROR_HINT = "see that error on its rank: if a script catches an error on one rank only, the other ranks keep waiting"


class Watcher:
    """Base class for objects that observe this process's waits for other ranks. By default, its methods do nothing."""

    def joining(self) -> AbstractContextManager[None]:
        """Return a context that is active while this process waits for all ranks to start."""
        return nullcontext()

    def watch(self, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
        """Start watching process groups in which this process may wait for operations on a device."""

    def failed(self, groups: Iterable[dist.ProcessGroup | None], what: str, error: BaseException | None) -> None:
        """Handle an error on this rank that has ended a joint operation of the ranks in these groups."""

    def before_full_tensor(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Run before the ranks of a group gather a full tensor on a device. Raise an error to prevent the gather."""

    def explain(self, error: BaseException) -> None:
        """Record the error that caused failures which `failed` reported without an error."""

    def reason(self, error: RuntimeError) -> object:
        """Return the reason why a wait ended in an error from torch, or the error itself if no reason is known."""
        return error


@dataclass(slots=True)
class ProgressRecord:
    """The current wait of this process, or its most recent one."""

    moves: int = 0  # the number of times that a wait has begun or ended
    what: str = ""  # a description of the wait; empty before the first wait
    step: int = 0  # the step of this process, counted from 1
    is_waiting: bool = False
    is_patient: bool = False  # whether the wait may take long, as when ranks are compared or a checkpoint is saved
    groups: Sequence[dist.ProcessGroup] = ()  # the process groups in which this process waits
    waited: float = 0.0  # the total time in seconds that this process has spent waiting
    given_up: str = ""  # the reason why this process will stop waiting for the other ranks; empty if it will not
    limit: float | None = None  # the longest wait in seconds, or None if the script has not set a limit
    tell: Callable[[], None] | None = None  # called after a wait has begun or ended
    watcher: Watcher = field(default_factory=Watcher)
    _entered: float = 0.0

    def enter(self, what: str, step: int | None = None, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        """Record the start of a wait. Without `step`, the wait is not part of a training step and may take long."""
        if not self.is_waiting:
            self._entered = time.monotonic()
        self.what, self.groups, self.is_waiting, self.is_patient = what, groups, True, step is None
        self.given_up = ""  # from the last wait
        if step is not None:
            self.step = step
        self.moves += 1
        if self.tell is not None:
            self.tell()

    def leave(self) -> None:
        """Record the end of the wait."""
        if self.is_waiting:
            self.waited += time.monotonic() - self._entered
        self.groups, self.is_waiting = (), False
        self.moves += 1
        if self.tell is not None:
            self.tell()


PROGRESS = ProgressRecord()
"""The waits of this process."""


class Waiting:
    """A context in which this rank waits for other ranks. It notifies the watcher if the wait fails.

    An error from torch becomes a `CommunicationError`. Out-of-memory errors pass unchanged to code that catches them.

    Attributes:
        step: the step of this process, counted from 1. None if the wait is not part of a step. Such a wait may take
            long, and is recorded only in the main thread.
    """

    __slots__ = ("_groups", "_what", "step")

    def __init__(self, what: str, groups: Iterable[dist.ProcessGroup | None], step: int | None = None) -> None:
        self._what, self._groups = what, tuple(group for group in groups if group is not None)
        self.step = step

    def __enter__(self) -> None:
        if self.step is not None or threading.current_thread() is threading.main_thread():
            PROGRESS.enter(self._what, self.step, self._groups)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.step is not None or threading.current_thread() is threading.main_thread():
            PROGRESS.leave()
        if isinstance(error, RuntimeError) and not isinstance(error, FullshardError | torch.OutOfMemoryError):
            why = PROGRESS.watcher.reason(error)  # before this rank reports its failure
            PROGRESS.watcher.failed(self._groups, self._what, error)
            rank = dist.get_rank() if dist.is_initialized() else 0
            step = "" if self.step is None else f" (step {self.step} of this process)"
            hint = _HINT if self.step is None else _STEP_HINT
            raise CommunicationError(
                f"rank {rank}, {self._what}: {why}{step}", hint=_ERROR_HINT if " had an error in " in str(why) else hint
            ) from (error if why is error else None)  # what closed sockets say would only mislead
        if error is not None and self.step is None:  # within a step, the failed forward or backward reports it
            PROGRESS.watcher.failed(self._groups, self._what, error)


def waiting_for_all(what: str) -> Waiting:
    """Return a context for waiting for all ranks outside a step."""
    return Waiting(what, [dist.group.WORLD])


def waiting_in_step(what: str, groups: Iterable[dist.ProcessGroup]) -> Waiting:
    """Return a context for waiting in these groups as part of the current step."""
    return Waiting(what, groups, PROGRESS.step or None)
