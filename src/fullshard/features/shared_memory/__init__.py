"""Collectives of ranks on CPUs that see one another's memory: of one host, or of several with as many ranks on each.

New pages of memory are expensive on a CPU, and the ranks of one host can read one another's. See `collectives` for one
host and `two_level` for several. The kernel knows neither: it asks the backends that `comm.select` has been given.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm.select import Candidate
from fullshard.features.shared_memory.collectives import SharedMemoryCollectives
from fullshard.features.shared_memory.peers import Peers, connect
from fullshard.features.shared_memory.two_level import TwoLevelCollectives
from fullshard.plan.route import Route

__all__ = ["share_memory"]


def share_memory(group: dist.ProcessGroup, device: torch.device) -> Candidate | str:
    """Return collectives over shared memory; see `Backend`. `FULLSHARD_COMM=gloo` on any rank forbids them."""
    if device.type != "cpu":
        return "only host memory is shared"
    made = connect(group, lambda peers: _make(group, peers))
    return made if isinstance(made, Candidate) else f"the ranks share no memory: {made}"


def _make(group: dist.ProcessGroup, peers: Peers) -> Candidate:
    if peers.num_hosts == 1:
        return Candidate(SharedMemoryCollectives(group, peers), Route.SHARED_MEMORY.value, "all ranks are on one host")
    reason = f"{peers.num_hosts} hosts have {peers.size} ranks each"
    return Candidate(TwoLevelCollectives(group, peers), Route.TWO_LEVELS.value, reason)
