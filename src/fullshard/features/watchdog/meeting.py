"""A wait for all ranks before an operation that cannot be interrupted and whose errors do not name a missing rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.waiting import Waiting


def meet(group: dist.ProcessGroup, device: torch.device, what: str) -> None:
    """Wait until all ranks of a group have arrived, so that the next operation does not hang.

    If a rank is missing, the wait ends with an error that names it, which the next operation could not do. The wait is
    a collective between the hosts, and is skipped if the group does not support one. An accelerator's collective cannot
    detect a missing rank: either the host does not wait for it, or, as in NCCL's barrier, it waits until NCCL ends the
    process. On a CPU, nothing is needed, because collectives are watched there anyway.
    """
    host = torch.device("cpu")
    if device.type != "cpu" and torch_private.backend_of(group, host) is not None:
        with torch_private.without_transforms(), Waiting(what, [group]):
            dist.all_reduce(torch.zeros(1, device=host), group=group)
