"""What the engine asks about the memory of a host, beside collectives: all that it knows of CPUs.

On a CPU a page that is touched for the first time costs as much as copying it three times, and ranks of one host can
read one another's. What comes of that is in `comm.cpu`; nothing else knows whether it runs on a CPU.
"""

from __future__ import annotations

import torch

from fullshard.comm.track import Track


class HostPages:
    """What is done about pages of host memory, by itself nothing: the allocator of an accelerator needs no help.

    Attributes:
        widens: whether `reduce_scatter` sums in a wider dtype than that of `full` without a copy.
        placed: how many buffers have been given a place where ranks look for one another's. As every rank gives places
            by itself, one that has given fewer, because it failed to shard a model, finds no other's any more.
    """

    widens: bool = False
    placed: int = 0

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory, shape (numel,), from which `reduce_scatter` is fastest."""
        return torch.empty(numel, dtype=dtype, device=device)

    def wait_for_readers(self) -> None:
        """Wait until no other rank reads what this rank has freed: main weights may change after that."""

    def open_track(self) -> Track:
        """A new track of a model, heeded by who waits here, if ranks can look. The same on every rank."""
        return Track()

    def heed(self, track: Track) -> None:
        """Who waits here is to look at a track, too."""
