"""Compute the bytes that one rank sends in a step from the step's events, and the links that carry these bytes.

Every rank sends as much as it receives, so a single number describes the traffic along each axis of the mesh:

    all-gather       a rank sends its interval to the S - 1 others                 full / S x (S - 1)
    reduce-scatter   a rank sends each of the S - 1 others that rank's interval    full / S x (S - 1)
    all-reduce       reduce-scatter and all-gather of the shard                    2 x shard / R x (R - 1)

S and R are the numbers of ranks along the shard and the replicate axis. Along the shard axis, an interval counts with
the size in which it is sent, which may be smaller than in the compute dtype. No algorithm can send fewer bytes, and
ring algorithms send exactly these (ZeRO, arXiv 1910.02054, section 7; Patarasuk and Yuan 2009 for all-reduce).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.core.events import Event, EventKind
from fullshard.core.sizes import all_reduce_nbytes
from fullshard.plan.layout import ModelLayout, UnitLayout


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that one rank sends in one optimizer step."""

    gather_nbytes: int  # bytes sent along the shard axis to unshard parameters
    reduce_nbytes: int  # bytes of gradients sent along the shard axis
    replicate_nbytes: int  # bytes of gradients sent along the replicate axis
    gathers: int
    reductions: int
    to_device_nbytes: int = 0  # bytes copied from host memory to device memory; no rank sends them
    to_host_nbytes: int = 0  # bytes copied the other way
    tiles_nbytes: int = 0  # bytes of activations and their gradients sent inside a tensor-parallel group
    cp_nbytes: int = 0  # the same inside a context-parallel group
    sp_nbytes: int = 0  # the same inside a sequence-parallel group
    ep_nbytes: int = 0  # the same inside an expert-parallel group

    def times(self, repeats: int) -> Traffic:
        """Return the traffic of `repeats` steps like this one."""
        return Traffic(*(repeats * getattr(self, field.name) for field in dataclasses.fields(self)))


def traffic_of(events: Iterable[Event], model: ModelLayout) -> Traffic:
    """Add up the bytes that one rank sends and copies in a predicted or a recorded step."""
    units = {unit.name: unit for unit in model.units}
    gather = reduce = replicate = gathers = reductions = to_device = to_host = 0
    for event in events:
        if event.kind is EventKind.UNSHARD_ISSUED:
            gather += sum(nbytes * (ranks - 1) for ranks, nbytes in units[event.unit].gathers)
            gathers += sum(bucket.layout.world_size > 1 for bucket in units[event.unit].buckets)
        elif event.kind is EventKind.REDUCE_ISSUED:
            ranks, nbytes = reduce_message(event, units[event.unit], model.shard_size)
            reduce += nbytes * (ranks - 1)
            replicate += all_reduce_nbytes(event.nbytes // ranks, model.replicate_size)
            reductions += 1
        elif event.kind is EventKind.TO_DEVICE:
            to_device += event.nbytes
        elif event.kind is EventKind.TO_HOST:
            to_host += event.nbytes
    return Traffic(gather, reduce, replicate, gathers, reductions, to_device, to_host)


def reduce_message(event: Event, unit: UnitLayout, shard_size: int) -> tuple[int, int]:
    """Return the number of ranks that reduce the bucket of `event`, and the bytes sent to each other rank."""
    buckets = (bucket for bucket in unit.buckets if bucket.trainable and bucket.reduce_nbytes == event.nbytes)
    bucket = next(buckets, None)
    if bucket is None:
        return shard_size, event.nbytes // shard_size
    return bucket.layout.world_size, bucket.reduce_message_nbytes


def carried(nbytes: float, ranks: int, *, stride: int, ranks_per_host: int) -> tuple[float, float]:
    """Return the bytes on each device's links inside its host and between hosts, in an all-gather or reduce-scatter.

    `nbytes` is the size of the unsharded buffer. Each of h hosts must receive the part of the buffer that it does not
    hold, which is (h - 1)/h of it. It receives this part once, divided among the links of all its devices, because NCCL
    runs one ring per link. The rank numbers are `stride` apart, which determines whether some of the ranks share a
    host.
    """
    neighbors = max(1, min(ranks, ranks_per_host // stride))
    across = nbytes * (1 - 1 / (ranks / neighbors)) / neighbors
    return nbytes * (neighbors - 1) / neighbors, across


def exchanged(nbytes: float, ranks: int, *, stride: int, ranks_per_host: int) -> tuple[float, float]:
    """Return a device's bytes inside its host and between hosts if it gets `nbytes`, other data from each rank."""
    neighbors = max(1, min(ranks, ranks_per_host // stride))
    others = max(1, ranks - 1)
    return nbytes * (neighbors - 1) / others, nbytes * (ranks - neighbors) / others


def passed_on(nbytes: float, ranks: int, *, stride: int, ranks_per_host: int) -> tuple[float, float]:
    """Return the bytes that the busiest device passes on in a ring, inside its host and to the next host, in a step."""
    return (nbytes, 0.0) if ranks * stride <= ranks_per_host else (0.0, nbytes)
