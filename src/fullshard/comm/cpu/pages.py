"""What a CPU does about pages of its memory, whether ranks share them or not."""

from __future__ import annotations

import torch

from fullshard.comm.cpu.heap import heap
from fullshard.comm.host_pages import HostPages


class CpuPages(HostPages):
    """Those of a process: the allocator's heap. See `HostPages`."""

    are_dear = True

    def begin_training(self) -> None:
        """The heap is as full as it was before; what it grows by from here on counts."""
        heap()

    def begin_last_unit(self) -> None:
        """Give back what the forward did not fill."""
        heap().begin_last_unit()


def pages_of(device: torch.device) -> HostPages:
    """Those of a rank that shares none with others."""
    return CpuPages() if device.type == "cpu" else HostPages()
