"""The default memory for an unsharded bucket: a tensor whose storage is allocated for a gather and freed afterwards.

The tensor is never replaced, because autograd saves views of parameters (`weight.t()`) that must keep using its memory.
"""

import torch

from fullshard.comm.base import BufferSpec, Collectives, FullBuffer, Work, own_interval


class ResizedBuffer(FullBuffer):
    """A buffer in private memory, freed by resizing its storage. Other ranks read a copy of the main weights."""

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        self._collectives, self._packing = collectives, spec.packing
        self.full = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        self._storage, self._full_nbytes = self.full.untyped_storage(), self.full.nbytes
        self._own = own_interval(self.full, collectives.rank, collectives.size)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that are allocated now."""
        return self._storage.nbytes()

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Reallocate the memory, copy `main` into this rank's interval, and launch the all-gather.

        The copy from page-locked host memory is asynchronous. Wait for the result before you change `main`.
        """
        self._allocate()
        is_apart = main.device != self.full.device
        if self._packing is not None and not exactly:
            if is_apart:
                main = main.to(self.full.device, non_blocking=main.is_pinned())  # pack on the device of the messages
            return self._packing.gather(self._collectives, self.full, main, tag=tag)
        self._own.copy_(main, non_blocking=is_apart and main.is_pinned())
        return self._collectives.all_gather(self.full, tag=tag)

    def gather_from(self, part: torch.Tensor, neighbors: Collectives, *, tag: int) -> Work:
        """Fill `full` with the parts that this rank (`part`) and its neighbors kept when `full` was last freed."""
        self._allocate()
        own_interval(self.full, neighbors.rank, neighbors.size).copy_(part)
        return neighbors.all_gather(self.full, tag=tag)

    def _allocate(self) -> None:
        if self._storage.nbytes() != self._full_nbytes:  # otherwise resizing would move it
            self._storage.resize_(self._full_nbytes)

    def free(self, *, keeps_memory: bool = False) -> None:
        """Free the memory by resizing the storage to zero bytes, unless `keeps_memory` is set."""
        if not keeps_memory:
            self._storage.resize_(0)
