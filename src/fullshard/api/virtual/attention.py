"""Attention as a simulated device computes it.

With a causal mask, it is a single kernel that does not store the scores, if the device has such a kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullshard.api import torch_private
from fullshard.core.imports import import_extra
from fullshard.plan.attention import what_runs
from fullshard.plan.hardware import Device
from fullshard.plan.job import Job
from fullshard.plan.shapes import Block

NAME = "virtual"


def register(job: Job, device: Device) -> str:
    """Register the attention of a job on a device with Transformers. Return its name in Transformers."""
    import_extra("transformers", extra="hf", purpose="simulating a Transformers model")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, functools.partial(_attend, job, device))
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    return NAME


def _no_mask(*_: Any, **__: Any) -> None:
    """Return None as the mask, because the kernel itself applies the causal mask."""


def _attend(
    job: Job,
    device: Device,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention on (batch, heads, tokens, width), with values padded to the width of the keys."""
    width = value.shape[-1]
    block = Block(
        *(0, query.shape[1], key.shape[1], key.shape[-1], 0),
        value_dim=width,
        window=sliding_window or 0,
        attention_dropout=dropout > 0,
    )
    way = what_runs(block, job, device)
    if way == "math":
        with sdpa_kernel(SDPBackend.MATH):  # torch's own operations, of any device
            mixed = nn.functional.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=True
            )
        return mixed.transpose(1, 2).contiguous(), None
    if width < key.shape[-1]:
        value = nn.functional.pad(value, (0, key.shape[-1] - width))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (
            tensor[:, :, None].expand(-1, -1, groups, -1, -1).reshape(*query.shape[:2], *tensor.shape[2:])
            for tensor in (key, value)
        )
    read = None
    if way == "masked":  # made of the window for each layer, of the dtype of compute
        read = query.new_zeros(query.shape[0], 1, query.shape[2], key.shape[2]).expand(-1, query.shape[1], -1, -1)
    return torch_private.attend(query, key, value, read)[..., :width].transpose(1, 2).contiguous(), None
