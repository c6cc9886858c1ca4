"""Context parallelism: every rank of a group computes on its own part of each sequence.

torch's `context_parallel` cuts the sequences. On accelerators, it also computes attention, in a ring. torch has no such
kernel for CPUs. There, attention gathers keys and values, which gives the same numbers.
"""

from __future__ import annotations

import contextlib
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


def prepare(model: nn.Module, rotation: str) -> None:
    """Make a model's attention ignore masks, as Accelerate does, and check the model's inputs in `divided`.

    `rotation` is how ranks exchange keys and values: `allgather` or `alltoall`.

    Raises:
        ConfigError: the model has layers whose result would be wrong.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    name, attention = type(inner).__name__, getattr(getattr(inner, "config", None), "_attn_implementation", "sdpa")
    if getattr(inner, "_is_stateful", False):
        raise ConfigError(
            f"context parallelism: layers of {name} carry a recurrent state, which would start again on every rank",
            hint="use a model with full attention in every layer",
        )
    try:
        _attach_context_parallel_hooks(inner)
    except ValueError as error:
        raise ConfigError(str(error), hint="use a model with full attention in every layer") from None
    if attention != "sdpa":
        raise ConfigError(
            f"context parallelism: {name} computes attention with {attention!r}, which would not see the other ranks' "
            "tokens",
            hint='load the model with attn_implementation="sdpa"',
        )
    inner.register_forward_pre_hook(_check_inputs, with_kwargs=True)
    torch_private.set_rotate_method(rotation)


@contextlib.contextmanager
def divided(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor] | None,
    buffer_seq_dims: Sequence[int] | None,
    no_restore_buffers: set[torch.Tensor] | None,
) -> Iterator[None]:
    """Cut each buffer in place to this rank's part of the sequence, and compute attention over all parts.

    After the block, the buffers that are not in `no_restore_buffers` have their values again.
    """
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    if not buffers or len(buffers) != len(dims):
        raise ConfigError(
            f"maybe_context_parallel: expected buffers and a sequence dim for each, got {len(buffers)} buffers and "
            f"{len(dims)} dims",
            hint="pass the tensors of the batch: input_ids, position_ids, shift_labels",
        )
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1 or max(lengths) % mesh.size():
        raise DataError(
            f"sequences of {' and '.join(map(str, sorted(lengths)))} tokens cannot be divided over {mesh.size()} ranks",
            hint=f"pad all sequences to a multiple of {2 * mesh.size()} (pad_to_multiple_of)",
        )
    positions = torch.arange(lengths.pop(), device=buffers[0].device)
    kept = {*(no_restore_buffers or ()), positions}
    cuts = context_parallel(mesh, buffers=[*buffers, positions], buffer_seq_dims=[*dims, 0], no_restore_buffers=kept)
    with cuts, contextlib.ExitStack() as stack:
        _POSITIONS.append(positions)
        stack.callback(_POSITIONS.pop)
        if positions.device.type == "cpu":
            stack.callback(setattr, F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
            F.scaled_dot_product_attention = _attention_over(mesh, positions)
        yield


class _Gathered(torch.autograd.Function):
    """Concatenates the parts of all ranks along dim 2. Backward adds up the gradients of a part from all ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group), dim=2)[dist.get_rank(ctx.group)], None


def _attention_over(mesh: DeviceMesh, positions: torch.Tensor) -> Any:
    group = mesh.get_group()
    parts = [torch.empty_like(positions) for _ in range(mesh.size())]
    dist.all_gather(parts, positions, group=group)
    is_earlier = positions[:, None] >= torch.cat(parts)

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise ConfigError(
                "context parallelism only computes full and causal attention, but a layer passes a mask",
                hint="leave attention_mask out of the model's inputs",
            )
        key, value = (_Gathered.apply(part, group) for part in (key, value))
        return _attend(query, key, value, is_earlier if is_causal else None, dropout_p, **options)

    return attention


def _check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse inputs whose result would be wrong, because attention ignores masks. Add missing positions."""
    if not _POSITIONS:
        return None
    positions, labels = _POSITIONS[-1], kwargs.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape[-1:] == positions.shape and "shift_labels" not in kwargs:
        raise DataError(
            f"context parallelism: {type(model).__name__} would shift labels within this rank's part of the sequence",
            hint="also pass shift_labels, the labels of the next tokens, as a buffer and to the model",
        )
    order, real = positions.argsort(), None
    mask, given = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        real = mask[:, order].bool()
        if bool((real[:, 1:] > real[:, :-1]).any()):
            raise DataError(
                "context parallelism: a sequence is padded on the left, and attention would see the padding",
                hint='pad on the right (padding_side="right")',
            )
    if isinstance(given, torch.Tensor) and given.dim() == 2:
        restarts = given[:, order].diff() <= 0
        if bool((restarts if real is None else restarts & real[:, 1:]).any()):
            raise DataError(
                "context parallelism: position_ids start again within a row, and attention would cross documents",
                hint="do not pack several documents into a row (packing=False, padding_free=False)",
            )
    elif given is None and "position_ids" in inspect.signature(model.forward).parameters:
        return args, {**kwargs, "position_ids": positions[None]}
    return None
