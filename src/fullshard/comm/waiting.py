"""Waits of this process for other ranks, and the errors raised when those do not come.

An error of torch's then names a socket or a communicator. `Waiting` turns it into one with rank, place and step. While
a wait lasts, `PROGRESS` says so, and a `Watcher`, if one is put there, may find out who is missing and end the wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fullshard.core.errors import CommunicationError, FullshardError

_HINT = "see whether another rank failed first, or does not come here"
_STEP_HINT = "see whether another rank failed first, had fewer batches, or took another path through the model"


class Watcher:
    """Follows the waits of this process. The methods do nothing unless a subclass overrides them."""

    def joining(self) -> AbstractContextManager[None]:
        """Return a context in which this process waits for all ranks to start."""
        return nullcontext()

    def watch(self, groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
        """Watch process groups in which this process may wait for this device."""

    def failed(self, groups: Iterable[dist.ProcessGroup | None], what: str, error: BaseException | None) -> None:
        """Run when an error on this rank ends what the ranks of these groups do together."""

    def before_whole(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Run before the ranks of a group gather a whole tensor on a device; raise to refuse it."""

    def explain(self, error: BaseException) -> None:
        """Learn the error of failures that were told without one."""

    def reason(self, error: RuntimeError) -> object:
        """Return why a wait has ended in an error of torch's, or that error."""
        return error


@dataclass(slots=True)
class ProgressRecord:
    """The wait of this process, or the last one.

    Attributes:
        moves: how often a wait has begun or ended.
        what: names the wait; empty: there was none yet.
        step: of this process, counted from 1.
        is_patient: whether it may take long, such as a comparison of ranks or a save.
        groups: process groups that it waits in.
        waited: seconds for which this process has waited so far.
        given_up: the reason why the wait ends without the others; empty: it does not.
        limit: the seconds that a wait may take, if the script has set them.
        tell: called when a wait has begun or ended.
    """

    moves: int = 0
    what: str = ""
    step: int = 0
    is_waiting: bool = False
    is_patient: bool = False
    groups: Sequence[dist.ProcessGroup] = ()
    waited: float = 0.0
    given_up: str = ""
    limit: float | None = None
    tell: Callable[[], None] | None = None
    watcher: Watcher = field(default_factory=Watcher)
    _entered: float = 0.0

    def enter(self, what: str, step: int | None = None, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        """Begin a wait for other ranks, in this step; None: it belongs to no step, and may take long."""
        if not self.is_waiting:
            self._entered = time.monotonic()
        self.what, self.groups, self.is_waiting, self.is_patient = what, groups, True, step is None
        self.given_up = ""  # the last wait's
        if step is not None:
            self.step = step
        self.moves += 1
        if self.tell is not None:
            self.tell()

    def leave(self) -> None:
        """End the wait."""
        if self.is_waiting:
            self.waited += time.monotonic() - self._entered
        self.groups, self.is_waiting = (), False
        self.moves += 1
        if self.tell is not None:
            self.tell()


PROGRESS = ProgressRecord()
"""The waits of this process."""


class Waiting:
    """A wait for other ranks, as a context. If it fails, the watcher learns of it.

    An error of torch's becomes a `CommunicationError`; running out of memory passes unchanged to code that catches it.

    Attributes:
        step: the step of this process, counted from 1; None: the wait belongs to no step. It may take long then, and be
            one of another thread than the main one, which leaves no note.
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
            why = PROGRESS.watcher.reason(error)  # before this rank tells its own failure
            PROGRESS.watcher.failed(self._groups, self._what, error)
            rank = dist.get_rank() if dist.is_initialized() else 0
            step = "" if self.step is None else f" (step {self.step} of this process)"
            raise CommunicationError(
                f"rank {rank}, {self._what}: {why}{step}", hint=_HINT if self.step is None else _STEP_HINT
            ) from error
        if error is not None and self.step is None:  # in a step it ends a forward or backward, which says so
            PROGRESS.watcher.failed(self._groups, self._what, error)


def waiting_for_all(what: str) -> Waiting:
    """Return a wait in the default group that belongs to no step."""
    return Waiting(what, [dist.group.WORLD])


def waiting_in_step(what: str, groups: Iterable[dist.ProcessGroup]) -> Waiting:
    """Return a wait in these groups that is a part of the current step."""
    return Waiting(what, groups, PROGRESS.step or None)
