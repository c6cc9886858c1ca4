"""Collectives that use shared memory, for ranks that compute on the CPUs of one host.

New memory pages are expensive on a CPU, and the ranks of one host can read each other's memory.
"""

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.select import Candidate
from fullshard.features.shared_memory.collectives import SharedMemoryCollectives
from fullshard.features.shared_memory.peers import connect
from fullshard.plan.route import Route

__all__ = ["share_memory"]


def share_memory(group: dist.ProcessGroup, device: torch.device) -> Candidate | str:
    """Return collectives that use shared memory, or the reason why the group cannot use them; see `Backend`.

    Setting `FULLSHARD_COMM=gloo` on any rank disables them.
    """
    if device.type != "cpu":
        return "only host memory is shared"
    if torch_private.backend_of(group, device) is None:
        return "the group is written in Python"
    made = connect(group, lambda peers: SharedMemoryCollectives(group, peers))
    if isinstance(made, str):
        return f"the ranks do not share memory: {made}"
    return Candidate(made, Route.SHARED_MEMORY.value, "all ranks are on one host")
