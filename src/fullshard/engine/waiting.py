"""Where a rank waits for others, and what it says when they do not come.

What torch raises then names a socket or a communicator. It becomes an error with rank, unit, phase and step. While the
wait lasts `core.place` knows of it, for whoever asks why nothing goes on (`comm.stalls`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from fullshard.comm.mesh import Mesh
from fullshard.comm.stalls import STALLS
from fullshard.comm.track import OutOfStep
from fullshard.core.errors import CommunicationError, FullshardError
from fullshard.core.place import PLACE


class WaitingModel(Protocol):
    """What a wait asks of the model.

    Attributes:
        steps: optimizer steps so far.
    """

    steps: int


class WaitingUnit(Protocol):
    """What it asks of the unit."""

    name: str
    mesh: Mesh

    @property
    def schedule(self) -> WaitingModel:
        """The model it is part of."""


class Waiting:
    """Makes what torch raises within, because another rank has ended, an error with rank, unit and phase.

    Running out of memory is no such error: who catches that is to catch it here, too.
    """

    __slots__ = ("_phase", "_unit")

    def __init__(self, unit: WaitingUnit, phase: str) -> None:
        self._unit, self._phase = unit, phase

    def __enter__(self) -> None:
        PLACE.enter(f"unit {self._unit.name!r}, {self._phase}", self._unit.schedule.steps + 1)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        PLACE.leave()
        if isinstance(error, RuntimeError) and not isinstance(error, FullshardError | torch.OutOfMemoryError):
            what = error if isinstance(error, OutOfStep) else STALLS.reason(error)
            if isinstance(error, OutOfStep):
                self._unit.mesh.end_waits()  # the other rank may wait for this one elsewhere
            self._unit.mesh.note_failure(f"unit {self._unit.name!r}, {self._phase}", error)  # and so may all others
            raise CommunicationError(
                f"rank {self._unit.mesh.rank}, unit {self._unit.name!r}, {self._phase}: {what} "
                f"(step {self._unit.schedule.steps + 1} of this process)",
                hint="see whether another rank failed first, or took another path through the model",
            ) from error
