"""Collectives that are over at once and move nothing: what is left of a step is the engine's own time on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.comm import torch_private
from fullshard.comm.base import BufferSpec, Collectives, FullBuffer, Reduction, SplitSizes, Work, own_interval
from fullshard.comm.mesh import Mesh
from fullshard.comm.resized_buffer import ResizedBuffer
from fullshard.comm.torch_dist import completed


@dataclass(slots=True)
class AtOnce(Collectives):
    """Rank 0 of `size` ranks that never hears from the others."""

    rank: int
    size: int

    def _buffer(self, spec: BufferSpec) -> FullBuffer:
        return ResizedBuffer(self, spec)

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Work:
        """Leave `full` as it is."""
        return completed(full)

    def _reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        return completed(own_interval(full, self.rank, self.size) / how.divisor)

    _reduce_packed = _reduce

    def all_reduce(self, tensor: torch.Tensor, *, tag: int) -> Work:
        """Take this rank's own values for the sum."""
        return completed(tensor)

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, splits: SplitSizes, *, tag: int) -> Work:
        """Leave `arriving` as it is."""
        return completed(arriving)


def mesh_at_once(size: int) -> Mesh:
    """Return the mesh that rank 0 of `size` ranks would have on a CPU, without the others."""
    device, ranks = torch.device("cpu"), list(range(size))
    group = torch_private.mesh_without_groups("cpu", [ranks], 0)
    return Mesh(device, AtOnce(0, size), AtOnce(0, size), AtOnce(0, 1), group, rank=0, ranks=tuple(ranks))
