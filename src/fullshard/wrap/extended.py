"""Parameters that say themselves how they are gathered: tensor subclasses with `fsdp_pre_all_gather`.

torch's protocol, which torchao's float8 weights follow: `fsdp_pre_all_gather(mesh, ...)` gives what a rank sends of its
rows, `fsdp_post_all_gather(outputs, metadata, dtype, out=)` makes of what all have sent the tensor that forward sees.
Such a parameter wraps a plain tensor of its own shape and dtype. That is what is sharded, optimized and saved; only
what is sent differs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fullshard.comm import torch_private

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_OPTIONS_COUNT = 5
"""Of `fsdp_pre_all_gather`; older ones take the mesh alone."""


def is_extended(parameter: torch.Tensor) -> bool:
    """Whether it says itself how it is gathered."""
    return hasattr(parameter, PRE) or hasattr(parameter, POST)


def wrapped_by(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that an extended parameter wraps; any other is its own."""
    inner = _inner(parameter) if is_extended(parameter) else None
    return parameter if inner is None else inner


def takes_options(parameter: torch.Tensor) -> bool:
    """Whether `fsdp_pre_all_gather` takes more than the mesh."""
    return _count(parameter) == _OPTIONS_COUNT


def cannot_be_sharded(parameter: torch.Tensor) -> str | None:
    """Why an extended parameter cannot be; None if it can."""
    missing = [name for name in (PRE, POST) if not hasattr(parameter, name)]
    if missing:
        return f"has no `{missing[0]}`"
    count = _count(parameter)
    if count not in (1, _OPTIONS_COUNT):
        return f"has a `{PRE}` of {count} arguments: expected mesh[, outer_size, outer_stride, module, mp_policy]"
    if _inner(parameter) is None:
        return "does not wrap one plain tensor of its own shape and dtype, which could be sharded and optimized"
    return None if parameter.dim() else "is a scalar, which has no rows"


def _count(parameter: torch.Tensor) -> int:
    pre: Any = getattr(parameter, PRE)
    return len(inspect.signature(pre).parameters)


def _inner(parameter: torch.Tensor) -> torch.Tensor | None:
    flatten: Any = getattr(parameter, "__tensor_flatten__", None)
    names = [] if flatten is None else flatten()[0]
    if len(names) != 1:
        return None
    inner = getattr(parameter, names[0])
    is_plain = not torch_private.has_own_dispatch(type(inner)) and inner.is_contiguous()
    is_alike = (inner.shape, inner.dtype) == (parameter.shape, parameter.dtype) and inner.dtype.is_floating_point
    return inner if is_plain and is_alike else None
