"""Weights that bitsandbytes has quantised, and their scales: gathered as the bytes they are."""

from __future__ import annotations

import torch
from torch import nn

from fullshard.engine.kinds import ParameterKind
from fullshard.features.quantized_weights.scales import aliases, expose_scales, is_exact, outline, place_tables


class QuantizedWeight(ParameterKind):
    """A quantised weight or a scale."""

    is_exact = True

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is a quantised weight, or a scale of one."""
        return is_exact(tensor)

    def prepare(self, model: nn.Module, *, is_read_later: bool) -> None:
        """Turn the scales of quantised weights into parameters."""
        if is_read_later:  # weights that are still in files have no scales yet
            outline(model)
        expose_scales(model)

    def place(self, module: nn.Module, device: torch.device) -> None:
        """Bring the code books of a module's weight to the device."""
        place_tables(module, device)

    def set_plain(self, parameter: torch.Tensor, plain: torch.Tensor) -> None:
        """Have a weight, and the tensors that kernels read instead, use other memory."""
        for tensor in (parameter, *aliases(parameter)):
            super().set_plain(tensor, plain)
