"""Time to stream the weights to an inference engine (`checkpoint/stream`): to every rank, and on to a server.

The ranks that own a part of a parameter broadcast it one after the other; no two messages overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.plan.hardware import Cluster
from fullshard.plan.layout import ModelLayout
from fullshard.plan.shapes import ModelShape
from fullshard.plan.time import BASE_LATENCY, STEP_LATENCY

_ITEMSIZE = 2
"""Engines compute in bfloat16; parameters are cast before they are sent."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """One stream of all weights.

    Attributes:
        nbytes: of the weights in bfloat16.
        gathered: seconds until every rank has been given them, one after the other.
        sent: seconds more, if one rank sends them to a server over its own link of the network.
    """

    nbytes: int
    gathered: float
    sent: float


def streaming_of(model: ModelShape, layout: ModelLayout, cluster: Cluster) -> Streaming:
    """Predict the stream of a model without adapters, which are merged on the way, from ranks sharded as `layout`."""
    nbytes, device, ranks = _ITEMSIZE * model.numel, cluster.device, layout.shard_size
    inside, network = device.link * device.link_efficiency, device.network * device.link_efficiency
    cuts = (ranks - 1) * len(layout.buckets)  # a parameter with a cut has two owners
    broadcasts = sum(len(unit.parameters) for unit in model.units) + cuts
    slowest = max(nbytes / inside, nbytes / (cluster.per_host * network) if ranks > cluster.per_host else 0.0)
    gathered = broadcasts * (BASE_LATENCY + (ranks - 1) * STEP_LATENCY) + slowest
    return Streaming(nbytes, gathered if ranks > 1 else 0.0, nbytes / network)
