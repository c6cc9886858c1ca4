"""Which collectives a group of ranks gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.base import Collectives
from fullshard.comm.cpu.gloo import GlooCollectives
from fullshard.comm.cpu.peers import Peers, connect
from fullshard.comm.cpu.shared_memory import SharedMemoryCollectives
from fullshard.comm.cpu.two_level import TwoLevelCollectives
from fullshard.comm.torch_dist import Alone, NativeCollectives
from fullshard.core.route import Route


def collectives_for(
    group: dist.ProcessGroup | None, device: torch.device, *, only_all_reduce: bool = False
) -> Collectives:
    """Return the first of `choices_for`; for `only_all_reduce`, the same in all Gloo collectives, without trying."""
    is_gloo = group is not None and device.type == "cpu" and torch_private.backend_of(group, device) is not None
    if only_all_reduce and group is not None and is_gloo and dist.get_world_size(group) > 1:
        return GlooCollectives(group)
    return choices_for(group, device)[0].collectives


@dataclass(frozen=True, slots=True)
class Candidate:
    """Collectives that a group could have, in words: their name, and why they are chosen or not."""

    collectives: Collectives
    name: str
    reason: str


def choices_for(group: dist.ProcessGroup | None, device: torch.device) -> list[Candidate]:
    """Return all collectives that a group's ranks can all have, the fastest first. A collective.

    `FULLSHARD_COMM=gloo` on any rank leaves CPUs no shared memory.

    Args:
        group: None stands for this rank alone.
        device: where the tensors are.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [Candidate(Alone(), Route.NONE.value, "one rank has nobody to communicate with")]
    if device.type != "cpu":
        return [Candidate(NativeCollectives(group), dist.get_backend(group), "it is made for the devices' own links")]
    if torch_private.backend_of(group, device) is None:
        return [Candidate(NativeCollectives(group), dist.get_backend(group), "the group is written in Python")]
    point_to_point = Candidate(GlooCollectives(group), Route.POINT_TO_POINT.value, "Gloo's own are slower")
    own = Candidate(NativeCollectives(group), "gloo", "never: each byte of a reduce-scatter is sent twice")

    def make(peers: Peers) -> Candidate:
        route = Route.of(dist.get_world_size(group), on_cpu=True, per_host=peers.size)
        if route is Route.SHARED_MEMORY:
            return Candidate(SharedMemoryCollectives(group, peers), route.value, "all ranks are on one host")
        reason = f"{peers.num_hosts} hosts have {peers.size} ranks each"
        return Candidate(TwoLevelCollectives(group, peers), route.value, reason)

    shared, problem = connect(group, make)
    if shared is not None:
        return [shared, point_to_point, own]
    return [replace(point_to_point, reason=f"the ranks share no memory: {problem}"), own]
