"""Bytes on the wire in one step, from its events: what one rank sends, and which link carries it.

Every rank sends as much as it receives, so one number per axis is enough:

    all-gather       a rank sends its interval to the S - 1 others            full / S x (S - 1)
    reduce-scatter   a rank sends each of the S - 1 others their interval     full / S x (S - 1)
    all-reduce       reduce-scatter and all-gather of the shard               2 x shard / R x (R - 1)

Along the shard axis intervals count as they are sent, which may be in fewer bytes.

S and R are the ranks of the shard and the replicate axis. These are the least bytes possible (ZeRO, arXiv 1910.02054,
section 7; Patarasuk and Yuan 2009 for all-reduce), and what ring algorithms send.
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
    """Bytes one rank sends in one optimizer step.

    Attributes:
        gather_nbytes: unsharding, on the shard axis.
        reduce_nbytes: gradients, on the shard axis.
        replicate_nbytes: gradients, on the replicate axis.
        tiles_nbytes: activations and their gradients, inside a tensor-parallel group.
        to_device_nbytes, to_host_nbytes: bytes copied between the host's memory and the device's, and not sent.
    """

    gather_nbytes: int
    reduce_nbytes: int
    replicate_nbytes: int
    gathers: int
    reductions: int
    to_device_nbytes: int = 0
    to_host_nbytes: int = 0
    tiles_nbytes: int = 0

    def times(self, repeats: int) -> Traffic:
        """Return the traffic of `repeats` such steps."""
        return Traffic(*(repeats * getattr(self, field.name) for field in dataclasses.fields(self)))


def traffic_of(events: Iterable[Event], model: ModelLayout) -> Traffic:
    """Add up the bytes of a predicted or a recorded step."""
    units = {unit.name: unit for unit in model.units}
    shard, replicas = model.shard_size, model.replicate_size
    gather = reduce = replicate = gathers = reductions = to_device = to_host = 0
    for event in events:
        if event.kind is EventKind.UNSHARD_ISSUED and shard > 1:
            gather += gather_message_nbytes(units[event.unit]) * (shard - 1)
            gathers += len(units[event.unit].buckets)
        elif event.kind is EventKind.REDUCE_ISSUED:
            own = event.nbytes // shard
            reduce += reduce_message_nbytes(event, units[event.unit], shard) * (shard - 1)
            replicate += all_reduce_nbytes(own, replicas)
            reductions += 1
        elif event.kind is EventKind.TO_DEVICE:
            to_device += event.nbytes
        elif event.kind is EventKind.TO_HOST:
            to_host += event.nbytes
    return Traffic(gather, reduce, replicate, gathers, reductions, to_device, to_host)


def gather_message_nbytes(unit: UnitLayout) -> int:
    """Return bytes that a rank sends to each other to unshard a unit."""
    return sum(bucket.gather_message_nbytes for bucket in unit.buckets)


def reduce_message_nbytes(event: Event, unit: UnitLayout, shard_size: int) -> int:
    """Return the bytes that a rank sends to each other to reduce the bucket of a unit whose gradient has that size."""
    buckets = (bucket for bucket in unit.buckets if bucket.trainable and bucket.reduce_nbytes == event.nbytes)
    bucket = next(buckets, None)
    return event.nbytes // shard_size if bucket is None else bucket.reduce_message_nbytes


def carried(nbytes: float, ranks: int, *, stride: int, ranks_per_host: int) -> tuple[float, float]:
    """Return bytes on each device's link inside the host and between hosts, in an all-gather or reduce-scatter.

    With h hosts, each must receive the (h - 1)/h of the buffer it does not hold, once, over the links of all its
    devices together (NCCL runs one ring per link, so that all of them carry a part). `nbytes` are those of the
    whole buffer; the ranks are `stride` apart, so that some of them share a host or none does.
    """
    neighbours = max(1, min(ranks, ranks_per_host // stride))
    across = nbytes * (1 - 1 / (ranks / neighbours)) / neighbours
    return nbytes * (neighbours - 1) / neighbours, across


def exchanged(nbytes: float, ranks: int, *, stride: int, ranks_per_host: int) -> tuple[float, float]:
    """Return bytes on a device's link inside the host and on that between hosts, when it gets `nbytes` in an exchange.

    They come from all others evenly. Unlike in a gather, each rank gets different data, so no device's link carries a
    part for its neighbours.
    """
    neighbours = max(1, min(ranks, ranks_per_host // stride))
    others = max(1, ranks - 1)
    return nbytes * (neighbours - 1) / others, nbytes * (ranks - neighbours) / others
