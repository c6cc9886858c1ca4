"""Sources of the values of parameters on the meta device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from fullshard.wrap.partition import Slot, Values

WEIGHTS = "_fullshard_weights"
"""Attribute of a module in the model: the `WeightSource` its parameters on the meta device come from."""


class WeightSource(Values, Protocol):
    """A source of values for parameters on the meta device, so that a rank reads only its own part."""

    def start(self, model: nn.Module) -> None:
        """Find the parameters of `model`, about to be divided, in the source; refuse those that do not fit."""

    def make_whole(self, module: nn.Module, device: torch.device) -> None:
        """Make real the tensors that must be whole: persistent buffers, weights that are converted on the way."""

    def holds(self, slot: Slot) -> bool:
        """Return whether `read` can give this parameter."""

    def initialize(self, module: nn.Module) -> bool:
        """Initialise a module that the source knows but does not hold; False if it leaves that to others."""


def weight_source(model: nn.Module) -> WeightSource | None:
    """Return the source of the weights of `model` or of a module in it, if there is one."""
    return next((m.__dict__[WEIGHTS] for m in model.modules() if WEIGHTS in m.__dict__), None)
