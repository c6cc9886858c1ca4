"""Collectives on nested structures of tensors, for metrics and control flow.

They handle only a few values per step or epoch. Therefore, unlike the engine's collectives, they check that all ranks
pass the same shapes. In a single process, they do not communicate.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch.distributed.tensor import DTensor

from fullshard.comm.waiting import waiting_for_all
from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.launch.device import object_device

T = TypeVar("T")
Reduction = Literal["sum", "mean", "max", "none"]


def world_size() -> int:
    """Return the number of ranks in the default process group, or 1 if there is no group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank in the default process group, or 0 if there is no group."""
    return dist.get_rank() if dist.is_initialized() else 0


def broadcast_object(value: T) -> T:
    """Return rank 0's `value` on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    with waiting_for_all("sharing an object of rank 0"):
        dist.broadcast_object_list(box, src=0, device=object_device())
    return box[0]


def scatter_objects(values: list[T] | None) -> T:
    """Return this rank's item of a list that only rank 0 passes, with one item per rank. The other ranks pass None."""
    if world_size() == 1:
        assert values is not None  # noqa: S101 -- this is rank 0
        return values[0]
    box: list[Any] = [None]
    with waiting_for_all("sharing an object of rank 0"):
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
    """Concatenate all ranks' tensors along dim 0, in rank order. First call `check` with the list of all `note`s."""
    if world_size() == 1:
        return recursively_apply(lambda t: t.reshape(1) if t.ndim == 0 else t, data)
    notes = _check_agreement(data, note)
    if check is not None:
        check(notes)
    return recursively_apply(_gather_tensor, data, error_on_other_type=True)


def reduce(data: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
    """Combine the tensors elementwise over all ranks, and multiply the result by `scale`."""
    if reduction not in ("sum", "mean", "max", "none"):
        raise ConfigError(f"unknown reduction {reduction!r}", hint="use sum, mean, max or none")
    if world_size() > 1:
        _check_agreement(data)
    return recursively_apply(lambda t: _reduce_tensor(t, reduction, scale), data, error_on_other_type=True)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor unchanged, or the local tensor of a DTensor, which must be replicated."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise CommunicationError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} with placements {tensor.placements} cannot be "
            "passed to a collective: each rank holds only a part of it",
            hint="use .full_tensor() instead, which returns the full tensor on every rank",
        )
    return tensor.to_local()


def _gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = _own(tensor)
    # Gather bytes, because backends support different dtypes.
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
    # Sum half precision in float32: some backends do not support it, and it would lose precision.
    is_half = tensor.is_floating_point() and tensor.element_size() < 4
    total = tensor.detach().float() if is_half else tensor.detach().clone()
    with waiting_for_all("reducing tensors"):
        dist.all_reduce(total, op=dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
    if reduction == "mean":
        total = total / world_size()
    result = total * scale if scale != 1.0 else total
    return result.to(tensor.dtype) if is_half else result


def _check_agreement(data: Any, note: Any = None) -> list[Any]:
    """Raise an error if the shapes or dtypes of the tensors differ between ranks. Return the notes of all ranks."""
    shapes: list[tuple[tuple[int, ...], str]] = []

    def collective(tensor: torch.Tensor) -> None:  # Accelerate's error about other types quotes this name
        shapes.append((tuple(tensor.shape), str(tensor.dtype)))

    recursively_apply(collective, data, error_on_other_type=True)
    said = all_gather_object((shapes, note))
    everyone = [shapes for shapes, _ in said]
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise CommunicationError(
                f"the ranks passed different tensors to a collective: rank 0 has {everyone[0]}, rank {rank} has "
                f"{other}",
                hint="pad them to the same shape first (pad_across_processes)",
            )
    return [note for _, note in said]
