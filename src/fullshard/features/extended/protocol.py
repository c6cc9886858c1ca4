"""Parameters that define their own all-gather: tensor subclasses with `fsdp_pre_all_gather`.

This is torch's protocol, which torchao's float8 weights implement. Such a parameter is called *extended*. Most extended
parameters wrap one plain tensor of the same shape and dtype. This tensor is sharded, optimized and saved as usual; only
the data sent in the all-gather is different. The others are called *composed*: they wrap several tensors, or one of
another shape or dtype. Each rank then holds an instance of the parameter's class with fewer rows.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from fullshard.comm import torch_private
from fullshard.engine.kinds import inner_tensors

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_OPTIONS_COUNT = 5
"""Number of arguments that `fsdp_pre_all_gather` takes. Older implementations take only the mesh."""


def is_extended(parameter: torch.Tensor) -> bool:
    """Return whether a parameter defines its own all-gather."""
    return hasattr(parameter, PRE) or hasattr(parameter, POST)


def wrapped_by(parameter: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that an extended parameter wraps. Return any other parameter unchanged."""
    inner = _inner(parameter) if is_extended(parameter) else None
    return parameter if inner is None else inner


def is_composed(parameter: torch.Tensor) -> bool:
    """Return whether an extended parameter wraps anything other than one plain tensor of its own shape and dtype."""
    return is_extended(parameter) and _inner(parameter) is None


@dataclass(frozen=True, slots=True)
class Composition:
    """Describes how to assemble a composed parameter from its inner tensors."""

    kind: type[Any]
    context: Any  # the class's non-tensor data for creating an instance
    shapes: dict[str, torch.Size]  # shapes of the unsharded inner tensors, by name

    @classmethod
    def of(cls, parameter: Any) -> Self:
        """Describe an unsharded parameter, which may be on the meta device."""
        shapes = {name: inner.shape for name, inner in inner_tensors(parameter).items()}
        return cls(type(parameter.detach()), parameter.__tensor_flatten__()[1], shapes)

    def make(self, inner: Mapping[str, torch.Tensor], shape: torch.Size) -> torch.Tensor:
        """Assemble the unsharded parameter of shape `shape` from its unsharded inner tensors."""
        strides = torch.empty(shape, device="meta").stride()
        made: torch.Tensor = self.kind.__tensor_unflatten__(dict(inner), self.context, shape, strides)
        return made


def takes_options(parameter: torch.Tensor) -> bool:
    """Return whether `fsdp_pre_all_gather` takes other arguments in addition to the mesh."""
    return _count(parameter) == _OPTIONS_COUNT


def cannot_be_sharded(parameter: torch.Tensor) -> str | None:
    """Return the reason why an extended parameter cannot be sharded, or None if it can."""
    missing = [name for name in (PRE, POST) if not hasattr(parameter, name)]
    if missing:
        return f"has no `{missing[0]}`"
    count = _count(parameter)
    if count not in (1, _OPTIONS_COUNT):
        return f"has a `{PRE}` with {count} arguments, expected mesh[, outer_size, outer_stride, module, mp_policy]"
    if not parameter.dim():
        return "is a scalar and has no rows"
    if not hasattr(parameter, "__tensor_flatten__"):
        return "has no `__tensor_flatten__` that names the tensors it wraps"
    wrapped = [(name, inner) for name, inner in inner_tensors(parameter).items() if _is_wrapper(inner)]
    if wrapped:
        return f"has a {type(wrapped[0][1]).__name__} in `{wrapped[0][0]}`, which itself wraps other tensors"
    return None


def _count(parameter: torch.Tensor) -> int:
    pre: Any = getattr(parameter, PRE)
    return len(inspect.signature(pre).parameters)


def _inner(parameter: torch.Tensor) -> torch.Tensor | None:
    flatten: Any = getattr(parameter, "__tensor_flatten__", None)
    names = [] if flatten is None else flatten()[0]
    if len(names) != 1:
        return None
    inner = getattr(parameter, names[0])
    is_plain = not _is_wrapper(inner) and inner.is_contiguous()
    is_alike = (inner.shape, inner.dtype) == (parameter.shape, parameter.dtype) and inner.dtype.is_floating_point
    return inner if is_plain and is_alike else None


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return torch_private.has_own_dispatch(type(tensor))
