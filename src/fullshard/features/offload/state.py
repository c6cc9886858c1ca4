"""Optimizer state on the host between steps, while main weights stay on the device.

The memory of state moves, and the tensors stay the same objects, because the optimizer and a checkpoint keep references
to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from fullshard.comm import torch_private
from fullshard.core.events import EventKind
from fullshard.engine.bucket import Bucket
from fullshard.engine.parameter import sharded_parameters
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.features.offload.host import Host, StorageView, bytes_of


def move_state(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], host: Host, way: EventKind) -> None:
    """Copy the state of buckets whose state visits the device there before a step, or back after it."""
    visiting = {bucket for bucket in buckets if bucket.plan.state_visits_device}
    if not visiting:
        return
    memory: dict[int, tuple[Bucket, list[torch.Tensor]]] = {}
    for parameter in sharded_parameters(optimizer):
        values = optimizer.state.get(parameter, {}).values() if parameter.bucket in visiting else ()
        for tensor in itertools.chain.from_iterable(map(_plain_tensors, values)):
            place = torch_private.storage_id(tensor.untyped_storage())
            memory.setdefault(place, (parameter.bucket, []))[1].append(tensor)
    moved: dict[Bucket, int] = {}
    for bucket, tensors in memory.values():
        nbytes = tensors[0].untyped_storage().nbytes()
        if host.is_there(tensors[0]) is (way is EventKind.TO_DEVICE) or host.is_here:
            _rebind(tensors, host, way)
            moved[bucket] = moved.get(bucket, 0) + nbytes
    if moved and way is EventKind.TO_HOST:  # any code may read it there; nothing changes state on its way to the device
        host.finish()
    for bucket in sorted(moved, key=lambda bucket: bucket.tag):
        if moved[bucket]:
            bucket.owner.emit(way, moved[bucket], what="optimizer state", bucket=bucket.number)


def _plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a state's value; one of a wrapper class is made of several. Step counts stay."""
    if isinstance(value, ShardedTensor):
        yield value.local
    elif isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, torch.Tensor) and value.dim():
        yield value


def _rebind(tensors: list[torch.Tensor], host: Host, way: EventKind) -> None:
    """Copy the memory that `tensors` are views of, and make them views of the copy."""
    copy = host.copy_of(bytes_of(tensors[0].untyped_storage()), to_host=way is EventKind.TO_HOST).untyped_storage()
    for tensor in tensors:
        view = StorageView.of(tensor).of_storage(copy)
        if torch_private.may_hold(tensor, view):
            tensor.data = view
        else:  # between the host and a plugged-in device
            torch.utils.swap_tensors(tensor, view)
