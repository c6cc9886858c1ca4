"""Wait for all ranks before what could neither be ended nor name a rank that does not come."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.waiting import Waiting


def meet(group: dist.ProcessGroup, device: torch.device, what: str) -> None:
    """Wait until all ranks of a group are here. What follows could neither be ended, nor name a rank that did not come.

    It uses a message from host to host, if the group sends such. An accelerator's collectives either let no host wait,
    and it then waits where it reads a number, or, as NCCL's barrier, wait until NCCL ends the process. Messages between
    CPUs are watched as they are.
    """
    host = torch.device("cpu")
    if device.type != "cpu" and torch_private.backend_of(group, host) is not None:
        with torch_private.without_transforms(), Waiting(what, [group]):
            dist.all_reduce(torch.zeros(1, device=host), group=group)
