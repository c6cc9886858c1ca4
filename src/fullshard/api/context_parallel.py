"""Context parallelism: every rank of a group computes on its own part of each sequence.

torch's `context_parallel` cuts the sequences. On GPUs, it also computes attention, in a ring. torch has no such kernel
for CPUs and other devices. There, attention gathers keys and values, which gives the same numbers.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import recursively_apply
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from fullshard.api import torch_private
from fullshard.comm.waiting import PROGRESS, waiting_in_step
from fullshard.core.errors import ConfigError, DataError

_attend = F.scaled_dot_product_attention
_outside_graphs: Any = functools.cache(torch.compiler.disable)  # not a decorator, which would import Dynamo
_RINGS = ("cuda", "xpu")
_ON_FULL_ATTENTION = "use a model with full attention in every layer"
_PREPARED = "_fullshard_context_parallel"


@dataclass
class _Divided:
    """A running block of `divided`."""

    group: dist.ProcessGroup
    positions: torch.Tensor
    """Positions in the sequence of this rank's tokens."""
    of_all: torch.Tensor
    """The same of the concatenated tokens of all ranks."""
    is_for_model: bool
    """Whether models get whole sequences, of at most this length, which they divide for their layers."""
    rows: int = 0
    length: int = 0
    """In this case, the number of sequences in the running forward, and their length."""

    @functools.cached_property
    def sees(self) -> torch.Tensor:
        """Return which of all tokens come before each of this rank's tokens, or are the same."""
        return self.positions[:, None] >= self.of_all


_BLOCKS: list[_Divided] = []


def _check(is_right: bool, what: str, hint: str, kind: type[ConfigError | DataError] = DataError) -> None:
    if not is_right:
        raise kind(f"context parallelism: {what}", hint=hint)


def prepare(model: nn.Module, rotation: str, mesh: DeviceMesh | None = None) -> None:
    """Make attention ignore masks inside `divided`. Refuse models and inputs that would give a wrong result.

    Args:
        model: the model. If it was prepared before, nothing is added to it.
        rotation: how ranks exchange keys and values: `allgather` or `alltoall`.
        mesh: the ranks that share each sequence, in which waits are watched.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    name, config = type(inner).__name__, getattr(inner, "config", None)
    text: Any = getattr(config, "get_text_config", lambda: config)()
    what = f"layers of {name} carry a recurrent state, which would start again on every rank"
    _check(not getattr(inner, "_is_stateful", False), what, _ON_FULL_ATTENTION, ConfigError)
    layers = [layer for place, layer in inner.named_modules() if place.endswith("self_attn")]
    both = {type(layer).__name__ for layer in layers if not getattr(layer, "is_causal", True)}
    what = f"attention of {', '.join(sorted(both))} is not causal, but context parallelism would make it so"
    _check(not both, what, "use a model with causal attention in every layer", ConfigError)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * bool(getattr(text, "sliding_window", None))
    what = f"{name} has {', '.join(sorted(set(kinds)))}, but attention without the layers' masks would be full"
    _check(not set(kinds) - {"full_attention"}, what, _ON_FULL_ATTENTION, ConfigError)
    used = getattr(config, "_attn_implementation", "sdpa")
    what = f"{name} computes attention with {used!r}, which would not see the tokens of other ranks"
    _check(used == "sdpa", what, 'load the model with attn_implementation="sdpa"', ConfigError)
    learns = any(getattr(peft, "is_prompt_learning", False) for peft in getattr(model, "peft_config", {}).values())
    what = f"{name} learns a prompt, which every rank would add to its own part of the sequences"
    _check(not learns, what, "use LoRA, or remove cp_size", ConfigError)
    torch_private.set_rotate_method(rotation)
    if mesh is not None:
        PROGRESS.watcher.watch([mesh.get_group()], torch.device(mesh.device_type))
    if vars(inner).setdefault(_PREPARED, False):
        return
    setattr(inner, _PREPARED, True)
    for layer in layers:
        layer.register_forward_pre_hook(_drop_mask, with_kwargs=True, prepend=True)
    inner.register_forward_pre_hook(_check_labels, with_kwargs=True)
    inner.register_forward_hook(_check_output)
    body = getattr(inner, "base_model", inner)  # the heads of whole sequences get whole sequences
    body.register_forward_pre_hook(_enter, with_kwargs=True)
    body.register_forward_hook(_leave)


def _drop_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute causal attention without a mask, because the mask would only cover this rank's own tokens."""
    if _BLOCKS and "attention_mask" in kwargs:
        kwargs = {**kwargs, "attention_mask": None, "is_causal": True}
    return args, kwargs


@contextlib.contextmanager
def divided(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], dims: Sequence[int], unrestored: set[torch.Tensor]
) -> Iterator[None]:
    """Cut each buffer in place to this rank's part of the sequence, and compute attention over all parts.

    `dims` are the sequence dims of the buffers. Buffers that are not in `unrestored` get their values back. If all
    buffers have one dim, such as positions, models get whole sequences, divide them for their layers, and gather the
    last hidden states.
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
        group, is_for_model = mesh.get_group(), all(buffer.dim() == 1 for buffer in buffers)
        _BLOCKS.append(_Divided(group, positions, _gathered(positions, group, 0), is_for_model))
        stack.callback(_BLOCKS.pop)
        if positions.device.type not in _RINGS:
            stack.callback(setattr, F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
            F.scaled_dot_product_attention = _outside_graphs(_attention)
        yield


def _check_output(model: nn.Module, _: Any, output: Any) -> None:
    """Refuse outputs that are not per token, and a backward after the block, where other ranks' tokens are missing."""
    if not _BLOCKS:
        return
    block, name = _BLOCKS[-1], type(model).__name__
    shape = getattr(getattr(output, "logits", None), "shape", None)
    what = f"{name} returned logits of shape {shape and tuple(shape)}, which do not belong to tokens"
    is_right = block.is_for_model or shape is None or shape[1:2] == block.positions.shape
    _check(is_right, what, "use a causal language model", ConfigError)

    def check(gradient: torch.Tensor) -> None:
        what = f"the forward of {name} ran inside maybe_context_parallel, but its backward runs outside"
        _check(bool(_BLOCKS), what, "run backward inside the block, too", ConfigError)

    def watch(value: torch.Tensor) -> torch.Tensor:
        if value.requires_grad:
            value.register_hook(check)
        return value

    recursively_apply(watch, output)


def _leave(_: nn.Module, __: Any, output: Any) -> Any:
    """Gather whole sequences if the layers have divided them."""
    if not _BLOCKS or not _BLOCKS[-1].is_for_model:
        return None
    block, part = _BLOCKS[-1], len(_BLOCKS[-1].positions)

    def join(own: torch.Tensor) -> torch.Tensor:
        if own.dim() == 2 and own.shape[0] == block.rows * part:  # a router's output has one dim for all tokens
            return join(own.unflatten(0, (block.rows, part))).flatten(0, 1)
        if own.shape[:2] != (block.rows, part):
            return own
        whole: torch.Tensor = _Gathered.apply(own, block.group, 1)
        return whole[:, block.of_all.argsort()[: block.length]]

    return recursively_apply(join, output)


def _gathered(part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Concatenate the parts of all ranks along a dim."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    with waiting_in_step("gathering the parts of sequences", [group]):
        dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim)


class _Gathered(torch.autograd.Function):
    """Concatenates the parts of all ranks along a dim. Backward adds up the gradients of a part from all ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _gathered(part, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        with waiting_in_step("adding up the gradients of parts of sequences", [ctx.group]):
            dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> torch.Tensor:
    hint = "leave attention_mask out of the model's inputs"
    _check(attn_mask is None, "attention is full or causal, but a layer passes a mask", hint, ConfigError)
    key, value = (_Gathered.apply(part, _BLOCKS[-1].group, 2) for part in (key, value))
    return _attend(query, key, value, _BLOCKS[-1].sees if is_causal else None, dropout_p, **more)


def _bound(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}


def _check_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse labels that the model would shift within this rank's part."""
    if not _BLOCKS or _BLOCKS[-1].is_for_model:
        return
    inputs = _bound(model, args, kwargs)
    labels = inputs.get("labels")
    has_labels = isinstance(labels, torch.Tensor) and labels.shape[-1:] == _BLOCKS[-1].positions.shape
    what = f"{type(model).__name__} would shift labels within this rank's part of the sequence"
    hint = "also pass shift_labels, the labels of the next tokens, as a buffer and to the model"
    _check(not has_labels or inputs.get("shift_labels") is not None, what, hint)


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse inputs that need masks, which attention ignores. Divide whole sequences. Add positions."""
    if not _BLOCKS:
        return None
    block, inputs = _BLOCKS[-1], _bound(model, args, kwargs)
    positions, order = block.positions, slice(None) if block.is_for_model else block.positions.argsort()
    tokens = next(
        (inputs[key] for key in ("input_ids", "inputs_embeds") if inputs.get(key) is not None), positions[None]
    )
    length, most = tokens.shape[1], len(block.of_all if block.is_for_model else positions)
    what = f"{type(model).__name__} got {length} tokens per sequence, but the block has {most} on this rank"
    hint = (
        "pass the buffers of maybe_context_parallel to the model, or begin the block with the positions of all tokens"
    )
    _check(length == most or (block.is_for_model and length < most), what, hint)
    mask, given = inputs.get("attention_mask"), inputs.get("position_ids")
    real = mask[:, order].bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    if real is not None:
        what = "a sequence is padded on the left, and attention would see the padding"
        _check(not (real[:, 1:] > real[:, :-1]).any(), what, 'pad on the right (padding_side="right")')
    if isinstance(given, torch.Tensor) and given.dim() == 2:
        restarts = given[:, order].diff() <= 0
        is_right = not (restarts if real is None else restarts & real[:, 1:]).any()
        what = "position_ids start again within a row, and attention would cross documents"
        _check(is_right, what, "do not pack several documents into a row (packing=False, padding_free=False)")
    if block.is_for_model:
        inputs = _cut(block, {**inputs, "use_cache": False}, len(tokens), length)
    if given is None and "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = positions[None]
    return (), inputs


def _cut(block: _Divided, inputs: dict[str, Any], rows: int, length: int) -> dict[str, Any]:
    """Return this rank's part of whole sequences, which are padded on the right. Attention does not see the padding."""
    block.rows, block.length = rows, length
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            what = f"{name} of shape {tuple(value.shape)} cannot be divided like sequences of {length} tokens"
            _check(value.shape[1] == length and value.dim() < 4, what, "leave it out of the model's inputs")
            missing = value.new_zeros((len(value), len(block.of_all) - length, *value.shape[2:]))
            inputs[name] = torch.cat([value, missing], dim=1)[:, block.positions]
    return inputs
