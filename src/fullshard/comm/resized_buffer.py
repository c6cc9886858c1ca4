"""A bucket's memory where no better kind exists: a tensor whose storage grows for a gather, and shrinks afterwards.

It never rebinds: autograd saves views of parameters (`weight.t()`), and those keep pointing at this storage.
"""

from __future__ import annotations

import torch

from fullshard.comm.base import BufferSpec, Collectives, FullBuffer, Work, own_interval


class ResizedBuffer(FullBuffer):
    """A buffer in memory of its own, which is freed by resizing its storage.

    It has no readers: the other ranks read a copy of the main weights, made when the gather was launched.
    """

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        self._collectives, self._packing = collectives, spec.packing
        self.full = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        self._storage, self._whole_nbytes = self.full.untyped_storage(), self.full.nbytes
        self._own = own_interval(self.full, collectives.rank, collectives.size)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self._storage.nbytes()

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Bring the memory back, copy `main` into its place and launch the all-gather.

        From page-locked host memory that copy runs while the host goes on: wait for it before you change `main`.
        """
        self._allocate()
        is_apart = main.device != self.full.device
        if self._packing is not None and not exactly:
            if is_apart:
                main = main.to(self.full.device, non_blocking=main.is_pinned())  # packed where the messages are
            return self._packing.gather(self._collectives, self.full, main, tag=tag)
        self._own.copy_(main, non_blocking=is_apart and main.is_pinned())
        return self._collectives.all_gather(self.full, tag=tag)

    def gather_from(self, part: torch.Tensor, neighbours: Collectives, *, tag: int) -> Work:
        """Fill `full` with the parts that neighbours have kept; this rank has kept `part`, its interval among them."""
        self._allocate()
        own_interval(self.full, neighbours.rank, neighbours.size).copy_(part)
        return neighbours.all_gather(self.full, tag=tag)

    def _allocate(self) -> None:
        if self._storage.nbytes() != self._whole_nbytes:  # else it would move
            self._storage.resize_(self._whole_nbytes)

    def free(self, *, keeps_memory: bool = False) -> None:
        """Resize to nothing."""
        if not keeps_memory:
            self._storage.resize_(0)
