"""Attention as a device computes it: under a causal mask, in one kernel that keeps no scores, if there is one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullshard.comm import torch_private
from fullshard.core.imports import import_extra
from fullshard.plan.attention import what_runs
from fullshard.plan.hardware import Device
from fullshard.plan.job import Job
from fullshard.plan.shapes import Block

NAME = "virtual"


def register(job: Job, device: Device) -> str:
    """Make it known to Transformers, for a job on a device; returns its name there."""
    import_extra("transformers", extra="hf", purpose="simulating a Transformers model")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, functools.partial(_attend, job, device))
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    return NAME


def _no_mask(*_: Any, **__: Any) -> None:
    """The kernel knows."""


def _attend(
    job: Job,
    device: Device,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Shapes (batch, heads, tokens, width); keys and values may have fewer heads, and are read by several.

    The kernel has one width: narrower values are padded to that of the keys, as Transformers does.
    """
    window, width = getattr(module, "sliding_window", None) or 0, value.shape[-1]
    block = Block(0, query.shape[1], key.shape[1], key.shape[-1], 0, value_dim=width, window=window)
    if what_runs(block, job, device) == "math":
        with sdpa_kernel(SDPBackend.MATH):  # torch's own operations, of any device
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).contiguous(), None
    if width < key.shape[-1]:
        value = nn.functional.pad(value, (0, key.shape[-1] - width))
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (
            tensor[:, :, None].expand(-1, -1, groups, -1, -1).reshape(*query.shape[:2], *tensor.shape[2:])
            for tensor in (key, value)
        )
    return torch_private.attend(query, key, value)[..., :width].transpose(1, 2).contiguous(), None
