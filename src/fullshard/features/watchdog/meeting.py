"""Wait for all ranks before an operation that cannot be interrupted and cannot name a missing rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.waiting import Waiting


def meet(group: dist.ProcessGroup, device: torch.device, what: str) -> None:
    """Wait until all ranks of a group have arrived, so that the next operation does not hang.

    The next operation could neither be interrupted nor name the missing rank. The function sends a message from host to
    host if the group supports it. With an accelerator's collectives, the host either does not wait until it reads a
    number, or waits until NCCL ends the process, as in NCCL's barrier. Messages between CPUs are watched anyway.
    """
    host = torch.device("cpu")
    if device.type != "cpu" and torch_private.backend_of(group, host) is not None:
        with torch_private.without_transforms(), Waiting(what, [group]):
            dist.all_reduce(torch.zeros(1, device=host), group=group)
