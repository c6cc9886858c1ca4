"""Waits of a rank for others, and the errors raised when they do not come.

An error of torch's then names a socket or a communicator. This module turns it into an error with rank, unit, phase and
step. While the wait lasts `core.place` knows of it, for the report on stalled ranks (`comm.stalls`).
"""

from __future__ import annotations

import torch

from fullshard.comm.mesh import Mesh
from fullshard.comm.stalls import STALLS
from fullshard.core.errors import CommunicationError, FullshardError
from fullshard.core.place import PLACE


class Waiting:
    """Turn an error of torch's, raised inside because another rank has ended, into one with rank, unit, phase and step.

    Running out of memory is no such error: it passes unchanged to code that catches it.

    Args:
        mesh: the ranks to wait for.
        where: the unit and the phase.

    Attributes:
        step: the step of this process, counted from 1.
    """

    __slots__ = ("_mesh", "_where", "step")

    def __init__(self, mesh: Mesh, where: str) -> None:
        self._mesh, self._where, self.step = mesh, where, 1

    def __enter__(self) -> None:
        PLACE.enter(self._where, self.step)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        PLACE.leave()
        if isinstance(error, RuntimeError) and not isinstance(error, FullshardError | torch.OutOfMemoryError):
            what = STALLS.reason(error)
            self._mesh.note_failure(self._where, error)  # and so may all the others
            raise CommunicationError(
                f"rank {self._mesh.rank}, {self._where}: {what} (step {self.step} of this process)",
                hint="see whether another rank failed first, had fewer batches, or took another path through the model",
            ) from error
