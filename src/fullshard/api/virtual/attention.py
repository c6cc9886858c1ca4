"""Attention as a device computes it: one kernel that keeps no scores, under a causal mask that is not in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.comm import torch_private
from fullshard.core.imports import import_extra

NAME = "virtual"


def register() -> str:
    """Make it known to Transformers; returns its name there."""
    import_extra("transformers", extra="hf", purpose="simulating a Transformers model")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    return NAME


def _no_mask(*_: Any, **__: Any) -> None:
    """The kernel knows."""


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Shapes (batch, heads, tokens, width); keys and values may have fewer heads, and are read by several.

    The kernel has one width: narrower values are padded to that of the keys, as Transformers does.
    """
    width = value.shape[-1]
    if width < key.shape[-1]:
        value = nn.functional.pad(value, (0, key.shape[-1] - width))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (
            tensor[:, :, None].expand(-1, -1, groups, -1, -1).reshape(*query.shape[:2], *tensor.shape[2:])
            for tensor in (key, value)
        )
    return torch_private.attend(query, key, value)[..., :width].transpose(1, 2).contiguous(), None
