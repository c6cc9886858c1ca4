"""Settings for reducing the gradients of a unit: the divisor, the axes, and hooks on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        stream: the stream on which `hook` is called; None: where the gradient is waited for.
        watch: see `comm.base.Reduction`.
    """

    divisor: float
    requires_all_reduce: bool = True
    hook: Callable[[torch.Tensor], object] | None = None
    stream: Any = None
    watch: Watch | None = None

    @classmethod
    def of(cls, mesh: Mesh) -> ReductionSettings:
        """Return settings that average over the ranks."""
        return cls(float(mesh.world_size))

    def call_hook(self, reduced: torch.Tensor) -> None:
        """Call the hook, if there is one, in order with the work before and after it."""
        if self.hook is None:
            return
        has_arrived = reduced.device.type == "cpu" and not isinstance(self.stream, torch.cpu.Stream)
        if self.stream is None or has_arrived:  # nothing is under way on the host
            self.hook(reduced)
        else:
            device = torch.get_device_module(reduced.device)
            current = device.current_stream()
            self.stream.wait_stream(current)
            with device.stream(self.stream):
                self.hook(reduced)
            current.wait_stream(self.stream)
        if self.watch is not None:
            self.watch(reduced, {})  # the hook may have changed it
