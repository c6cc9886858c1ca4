"""Collectives on nested structures of tensors, for metrics and control flow. Identities in a single process.

These serve a few values per step or epoch, so they check what the engine's own collectives need not: that every rank
brings the same shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from fullshard.comm.waiting import waiting_for_all
from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.launch.device import object_device

T = TypeVar("T")
Reduction = Literal["sum", "mean", "max", "none"]


def world_size() -> int:
    """Return the number of ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def map_leaves(function: Callable[[torch.Tensor], Any], data: Any, *, strict: bool = False) -> Any:
    """Return `data` with `function` applied to every tensor in nested lists, (named) tuples and mappings.

    Args:
        function: applied to each tensor.
        data: the structure; its container types are kept.
        strict: refuse leaves that are not tensors instead of passing them through.

    Raises:
        TypeError: a leaf that is not a tensor, with `strict`.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, list | tuple | Mapping):
        return _map_items(lambda item: map_leaves(function, item, strict=strict), data)
    if strict:
        raise TypeError(f"expected tensors in lists, tuples and mappings, got a {type(data).__name__}")
    return data


def send_to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return `data` with every tensor, and everything else that has a `.to` method, on `device`."""
    if isinstance(data, torch.Tensor) or hasattr(data, "to"):  # a PackedSequence is a tuple that knows what may move
        try:
            return data.to(device, non_blocking=non_blocking)
        except TypeError:  # BatchEncoding.to and the like take the device alone
            return data.to(device)
    if isinstance(data, list | tuple | Mapping):
        return _map_items(lambda item: send_to_device(item, device, non_blocking), data)
    return data


def _map_items(function: Callable[[Any], Any], data: Any) -> Any:
    """Return a list, (named) tuple or mapping of the same type, with `function` applied to each item."""
    if not isinstance(data, Mapping):
        items = [function(item) for item in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    values = {key: function(value) for key, value in data.items()}
    if type(data) is dict:
        return values
    if isinstance(data, defaultdict):
        return type(data)(data.default_factory, values)
    return cast("Any", type(data))(values)


def broadcast_object(value: T) -> T:
    """Return rank 0's `value` on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    with waiting_for_all("an object of rank 0's"):
        dist.broadcast_object_list(box, src=0, device=object_device())
    return box[0]


def scatter_objects(values: list[T] | None) -> T:
    """Return this rank's item of rank 0's `values`, one for each rank. The other ranks give None."""
    if world_size() == 1:
        assert values is not None  # noqa: S101 -- this is rank 0
        return values[0]
    box: list[Any] = [None]
    with waiting_for_all("an object of rank 0's"):
        dist.scatter_object_list(box, values, src=0)
    return cast("T", box[0])


def all_gather_object(value: T) -> list[T]:
    """Return every rank's `value`, in rank order."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    with waiting_for_all("gathering objects"):
        dist.all_gather_object(values, value)
    return values


def gather(data: Any, *, check: Callable[[list[Any]], None] | None = None, note: Any = None) -> Any:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order; scalars become 1-D.

    Args:
        data: tensors in any nesting.
        check: called on several ranks with the notes of all of them, before their tensors.
        note: this rank's further message.

    Raises:
        CommunicationError: a tensor's shape or dtype differs between ranks.
        TypeError: `data` holds something that is not a tensor, on several ranks.
    """
    if world_size() == 1:
        return map_leaves(lambda t: t.reshape(1) if t.ndim == 0 else t, data)
    notes = _check_agreement(data, note)
    if check is not None:
        check(notes)
    return map_leaves(_gather_tensor, data, strict=True)


def reduce(data: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
    """Combine the tensors over all ranks, elementwise, times `scale`.

    Raises:
        ConfigError: an unknown reduction.
        CommunicationError: a tensor's shape or dtype differs between ranks.
    """
    if reduction not in ("sum", "mean", "max", "none"):
        raise ConfigError(f"unknown reduction {reduction!r}", hint="use sum, mean, max or none")
    if world_size() > 1:
        _check_agreement(data)
    return map_leaves(lambda tensor: _reduce_tensor(tensor, reduction, scale), data, strict=True)


def pad_across_processes(data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad the tensors along `dim` to the longest on any rank, so that they can be gathered.

    Args:
        data: tensors in any nesting. A tensor that has no dimension `dim` is returned as it is.
        dim: dimension to pad.
        pad_index: value to pad with.
        pad_first: pad at the start instead of the end.
    """
    if world_size() == 1:
        return data
    lengths: list[int] = []
    map_leaves(lambda tensor: lengths.append(_length(tensor, dim)), data)
    longest = iter([max(column) for column in zip(*all_gather_object(lengths), strict=True)])

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        missing = next(longest) - _length(tensor, dim)
        if missing == 0:
            return tensor
        # `F.pad` takes (before, after) pairs from the last dimension backwards.
        pairs = [0, 0] * (tensor.ndim - 1 - dim % tensor.ndim) + ([missing, 0] if pad_first else [0, missing])
        return F.pad(tensor, pairs, value=pad_index)

    return map_leaves(pad, data)


def _length(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else 0


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a value: of a DTensor that every rank has whole, the whole."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise CommunicationError(
            f"a collective of a {type(tensor).__name__} {tuple(tensor.shape)} placed as {tensor.placements}: what a "
            "rank has of it means nothing alone",
            hint="leave the collective out: .full_tensor() gives the whole on every rank",
        )
    return tensor.to_local()


def _gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = _own(tensor)
    # As bytes, because backends differ in the dtypes they gather.
    rows = (tensor.reshape(1) if tensor.ndim == 0 else tensor).detach().contiguous()
    raw = rows.reshape(-1).view(torch.uint8)
    gathered = raw.new_empty(world_size() * raw.numel())
    with waiting_for_all("gathering tensors"):
        dist.all_gather(list(gathered.chunk(world_size())) if raw.numel() else [raw] * world_size(), raw)
    return gathered.view(rows.dtype).reshape(world_size() * rows.shape[0], *rows.shape[1:])


def _reduce_tensor(tensor: torch.Tensor, reduction: Reduction, scale: float) -> torch.Tensor:
    tensor = _own(tensor)
    if reduction == "none" or world_size() == 1:
        return tensor * scale if scale != 1.0 and reduction != "none" else tensor.clone()
    # Half precision is summed in float32: some backends cannot, and none should.
    is_half = tensor.is_floating_point() and tensor.element_size() < 4
    total = tensor.detach().float() if is_half else tensor.detach().clone()
    with waiting_for_all("reducing tensors"):
        dist.all_reduce(total, op=dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
    if reduction == "mean":
        total = total / world_size()
    result = total * scale if scale != 1.0 else total
    return result.to(tensor.dtype) if is_half else result


def _check_agreement(data: Any, note: Any = None) -> list[Any]:
    """Raise if ranks bring different tensors. Returns the notes of all ranks."""
    shapes: list[tuple[tuple[int, ...], str]] = []
    map_leaves(lambda tensor: shapes.append((tuple(tensor.shape), str(tensor.dtype))), data, strict=True)
    said = all_gather_object((shapes, note))
    everyone = [shapes for shapes, _ in said]
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise CommunicationError(
                f"ranks bring different tensors to a collective: rank 0 has {everyone[0]}, rank {rank} has {other}",
                hint="pad them to the same shape first (pad_across_processes)",
            )
    return [note for _, note in said]
