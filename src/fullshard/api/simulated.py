"""Collectives of a group that does not exist: one process plays rank r of N, to see what the engine would do.

Results have the right shape and no meaning, so this is for tensors without data. Bytes are counted as a rank would send
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fullshard.comm import torch_private
from fullshard.comm.base import BufferSpec, Collectives, FullBuffer, Parts, Reduction, Work, cut, own_interval
from fullshard.comm.mesh import Mesh
from fullshard.comm.resized_buffer import ResizedBuffer
from fullshard.comm.torch_dist import completed
from fullshard.core.sizes import all_reduce_nbytes


@dataclass(slots=True)
class SimulatedCollectives(Collectives):
    """One of `size` ranks that never hears from the others; `sent_nbytes` is what it would have sent so far."""

    rank: int
    size: int
    sent_nbytes: int = 0

    def _buffer(self, spec: BufferSpec) -> FullBuffer:
        return ResizedBuffer(self, spec)

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Work:
        """Count, and leave `full` as it is."""
        return self._done(full, full.nbytes // self.size * (self.size - 1))

    def _reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        """Count, and take this rank's own interval for the sum."""
        own = own_interval(full, self.rank, self.size)
        nbytes = own.nbytes if how.packing is None else how.packing.nbytes(own.numel())
        return self._done(own / how.divisor, nbytes * (self.size - 1))

    _reduce_packed = _reduce

    def all_reduce(self, tensor: torch.Tensor, *, tag: int) -> Work:
        """Count, and take this rank's own values for the sum."""
        return self._done(tensor, all_reduce_nbytes(tensor.nbytes, self.size))

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, parts: Parts, *, tag: int) -> Work:
        """Count, and take this rank's own part."""
        own = cut(leaving, parts.leaving)[self.rank]
        cut(arriving, parts.arriving)[self.rank].copy_(own)
        return self._done(arriving, leaving.nbytes - own.nbytes)

    def _done(self, result: torch.Tensor, nbytes: int) -> Work:
        self.sent_nbytes += nbytes
        return completed(result)


def simulated_mesh(*, rank: int, replicate_size: int, shard_size: int, device: torch.device) -> Mesh:
    """Return the mesh that rank `rank` of `replicate_size` x `shard_size` ranks would have, without the others."""
    replicate_rank, shard_rank = divmod(rank, shard_size)
    rows = [list(range(r * shard_size, (r + 1) * shard_size)) for r in range(replicate_size)]
    return Mesh(
        device,
        SimulatedCollectives(shard_rank, shard_size),
        SimulatedCollectives(shard_rank, shard_size),
        SimulatedCollectives(replicate_rank, replicate_size),
        torch_private.mesh_without_groups(device.type, rows, rank),
        rank=rank,
        ranks=tuple(range(replicate_size * shard_size)),
    )
