"""Settings for reducing the gradients of a unit: the divisor, the axes, and hooks on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fullshard.comm.base import Watch
from fullshard.comm.mesh import Mesh


@dataclass(slots=True)
class ReductionSettings:
    """The reduction settings of one unit.

    Attributes:
        divisor: divides the sum of gradients over all ranks.
        requires_all_reduce: False leaves the replicate axis out and keeps the result aside until it is True again.
        hook: called with each reduced gradient of this rank's interval, before it is published.
        watch: see `comm.base.Reduction`.
    """

    divisor: float
    requires_all_reduce: bool = True
    hook: Callable[[torch.Tensor], object] | None = None
    watch: Watch | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> ReductionSettings:
        """Return settings that average over the ranks."""
        return cls(float(mesh.world_size))

    def call_hook(self, reduced: torch.Tensor) -> None:
        """Call the hook, if there is one."""
        if self.hook is not None:
            self.hook(reduced)
            if self.watch is not None:
                self.watch(reduced, {})  # the hook may have changed it
