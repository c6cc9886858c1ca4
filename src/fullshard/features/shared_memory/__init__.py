"""Collectives that use shared memory, for ranks that compute on the CPUs of one host."""

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.select import Candidate
from fullshard.features.shared_memory.collectives import SharedMemoryCollectives
from fullshard.features.shared_memory.peers import connect
from fullshard.plan.route import Route

__all__ = ["share_memory"]


def share_memory(group: dist.ProcessGroup, device: torch.device) -> Candidate | str:
    """Return collectives in shared memory, or the reason why they cannot be used. See `Backend`."""
    if device.type != "cpu":
        return "only host memory is shared"
    if torch_private.backend_of(group, device) is None:
        return "the group is written in Python"
    made = connect(group, lambda peers: SharedMemoryCollectives(group, peers))
    if isinstance(made, str):
        return f"the ranks do not share memory: {made}"
    return Candidate(made, Route.SHARED_MEMORY.value, "all ranks are on one host")
