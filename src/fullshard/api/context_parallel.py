"""Context parallelism: every rank of a group computes on its own part of each sequence.

torch's `context_parallel` cuts the sequences. On GPUs, it also computes attention, in a ring. torch has no such kernel
for CPUs and other devices. There, attention gathers keys and values, which gives the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from fullshard.api import torch_private
from fullshard.core.errors import ConfigError, DataError

_attend = F.scaled_dot_product_attention
_POSITIONS: list[torch.Tensor] = []
"""Within `divided`, the positions in the sequence of this rank's tokens."""
_RINGS = ("cuda", "xpu")
_ON_FULL_ATTENTION = "use a model with full attention in every layer"


def _check(is_right: bool, what: str, hint: str, kind: type[ConfigError | DataError] = DataError) -> None:
    if not is_right:
        raise kind(f"context parallelism: {what}", hint=hint)


def prepare(model: nn.Module, rotation: str) -> None:
    """Make attention ignore masks, as Accelerate does. Refuse models and inputs whose result would then be wrong.

    `rotation` is how ranks exchange keys and values: `allgather` or `alltoall`.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    what = f"layers of {type(inner).__name__} carry a recurrent state, which would start again on every rank"
    _check(not getattr(inner, "_is_stateful", False), what, _ON_FULL_ATTENTION, ConfigError)
    both = {type(m).__name__ for name, m in inner.named_modules() if name.endswith("self_attn") and not _is_causal(m)}
    what = f"attention of {', '.join(sorted(both))} is not causal, but context parallelism would make it so"
    _check(not both, what, "use a model with causal attention in every layer", ConfigError)
    try:
        _attach_context_parallel_hooks(inner)
    except ValueError as error:
        raise ConfigError(str(error), hint=_ON_FULL_ATTENTION) from None
    used = getattr(getattr(inner, "config", None), "_attn_implementation", "sdpa")
    what = f"{type(inner).__name__} computes attention with {used!r}, which would not see the tokens of other ranks"
    _check(used == "sdpa", what, 'load the model with attn_implementation="sdpa"', ConfigError)
    inner.register_forward_pre_hook(_check_inputs, with_kwargs=True)
    inner.register_forward_hook(_check_backward)
    torch_private.set_rotate_method(rotation)


def _is_causal(layer: nn.Module) -> bool:
    return bool(getattr(layer, "is_causal", True))


@contextlib.contextmanager
def divided(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], dims: Sequence[int], unrestored: set[torch.Tensor]
) -> Iterator[None]:
    """Cut each buffer in place to this rank's part of the sequence, and compute attention over all parts.

    `dims` are the sequence dims of the buffers. Buffers that are not in `unrestored` get their values back.
    """
    what = f"expected buffers and a sequence dim for each, got {len(buffers)} buffers and {len(dims)} dims"
    _check(len(buffers) == len(dims) > 0, what, "pass the tensors of the batch, such as input_ids", ConfigError)
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    what = f"sequences of {' and '.join(map(str, sorted(lengths)))} tokens cannot be divided over {mesh.size()} ranks"
    hint = f"pad all sequences to a multiple of {2 * mesh.size()} (pad_to_multiple_of)"
    _check(len(lengths) == 1 and max(lengths) % mesh.size() == 0, what, hint)
    positions = torch.arange(lengths.pop(), device=buffers[0].device)
    every, kept = [*buffers, positions], {*unrestored, positions}
    cuts = context_parallel(mesh, buffers=every, buffer_seq_dims=[*dims, 0], no_restore_buffers=kept)
    with cuts, contextlib.ExitStack() as stack:
        _POSITIONS.append(positions)
        stack.callback(_POSITIONS.pop)
        if positions.device.type not in _RINGS:
            stack.callback(setattr, F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
            parts = [torch.empty_like(positions) for _ in range(mesh.size())]
            dist.all_gather(parts, positions, group=mesh.get_group())
            sees = positions[:, None] >= torch.cat(parts)
            F.scaled_dot_product_attention = functools.partial(_attention, mesh.get_group(), sees)
        yield


def _check_backward(model: nn.Module, _: Any, output: Any) -> None:
    """Refuse a backward after the block of its forward, because recomputed attention would miss other ranks' tokens."""

    def check(gradient: torch.Tensor) -> None:
        what = f"the forward of {type(model).__name__} ran inside maybe_context_parallel, but its backward runs outside"
        _check(bool(_POSITIONS), what, "run backward inside the block, too", ConfigError)

    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    for value in values if _POSITIONS else ():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(check)


class _Gathered(torch.autograd.Function):
    """Concatenates the parts of all ranks along dim 2. Backward adds up the gradients of a part from all ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, part = group, part.contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group), dim=2)[dist.get_rank(ctx.group)], None


def _attention(
    group: Any, sees: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> torch.Tensor:  # fmt: skip
    hint = "leave attention_mask out of the model's inputs"
    _check(attn_mask is None, "attention is full or causal, but a layer passes a mask", hint, ConfigError)
    key, value = (_Gathered.apply(part, group) for part in (key, value))
    return _attend(query, key, value, sees if is_causal else None, dropout_p, **options)


def _check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse inputs whose result would be wrong, because attention ignores masks. Add missing positions."""
    if not _POSITIONS:
        return None
    positions, order = _POSITIONS[-1], _POSITIONS[-1].argsort()
    labels, mask, given = (kwargs.get(name) for name in ("labels", "attention_mask", "position_ids"))
    has_labels = isinstance(labels, torch.Tensor) and labels.shape[-1:] == positions.shape
    what = f"{type(model).__name__} would shift labels within this rank's part of the sequence"
    hint = "also pass shift_labels, the labels of the next tokens, as a buffer and to the model"
    _check(not has_labels or "shift_labels" in kwargs, what, hint)
    real = mask[:, order].bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    if real is not None:
        what = "a sequence is padded on the left, and attention would see the padding"
        _check(not (real[:, 1:] > real[:, :-1]).any(), what, 'pad on the right (padding_side="right")')
    if isinstance(given, torch.Tensor) and given.dim() == 2:
        restarts = given[:, order].diff() <= 0
        is_right = not (restarts if real is None else restarts & real[:, 1:]).any()
        what = "position_ids start again within a row, and attention would cross documents"
        _check(is_right, what, "do not pack several documents into a row (packing=False, padding_free=False)")
    elif given is None and "position_ids" in inspect.signature(model.forward).parameters:
        return args, {**kwargs, "position_ids": positions[None]}
    return None
