"""Show each unit to torch, Transformers and PEFT as one of torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fullshard.core.schedule import REDUCTIONS_IN_FLIGHT
from fullshard.engine.extension import Extension
from fullshard.features.torch_compat import torch_private
from fullshard.features.torch_compat.library_methods import replace_methods
from fullshard.features.torch_compat.state import TorchState


class TorchCompat(Extension):
    """Show one model's units.

    Attributes:
        post_optim_event: what the next forward waits for before it gathers, once.
        in_flight: how many reductions may be under way beside the one being collected.
    """

    settings: ClassVar[Mapping[str, Any]] = {"post_optim_event": None, "in_flight": REDUCTIONS_IN_FLIGHT}
    post_optim_event: Any
    in_flight: int

    def assembled(self) -> None:
        """Give each unit a state of torch's, and wrap the methods that expect whole parameters."""
        self.set_reductions_in_flight(self.in_flight)
        for unit in self.model.units:  # inner units first: each method is wrapped by the innermost unit around it
            for module in unit.modules:
                torch_private.mark_fully_sharded(module)
                torch_private.leave_state(module, TorchState(unit))
                for inner in module.modules():
                    replace_methods(inner, unit)

    def set_reductions_in_flight(self, count: int) -> None:
        """Set `in_flight`, for the whole model."""
        self.in_flight = self.model.backward.reducer.order.in_flight = count

    def forward_begins(self) -> None:
        """Wait for the event: gathers read main weights, which another stream may still be writing."""
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None
