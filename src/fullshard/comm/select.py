"""Which collectives a group of ranks gets."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm.base import Collectives
from fullshard.comm.shared_memory import connect_collectives
from fullshard.comm.torch_dist import Alone, GlooCollectives, NativeCollectives


def collectives_for(
    group: dist.ProcessGroup | None, device: torch.device, *, only_all_reduce: bool = False
) -> Collectives:
    """The fastest collectives for a group that all its ranks can have. A collective.

    | ranks | collectives |
    |---|---|
    | one | none |
    | on accelerators | the backend's own |
    | on CPUs of one host | shared memory; `FULLSHARD_COMM=gloo` on any rank turns it off |
    | on CPUs of several hosts | Gloo, point to point |

    Args:
        group: None stands for this rank alone.
        device: where the tensors are.
        only_all_reduce: nothing else will be asked for; all-reduce has one implementation per backend.
    """
    if group is None or dist.get_world_size(group) == 1:
        return Alone()
    if device.type != "cpu":
        return NativeCollectives(group)
    shared = None if only_all_reduce else connect_collectives(group)
    return shared or GlooCollectives(group)
