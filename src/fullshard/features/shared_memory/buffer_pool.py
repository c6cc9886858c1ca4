"""Memory that is taken once and handed out again and again.

A page that a process touches for the first time takes the kernel about as long as copying it three times does, and the
system's allocator returns large blocks at once. So buffers that come and go in every step are cut out of one piece.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from threading import Lock

import torch

from fullshard.core.sizes import round_up


class BufferPool:
    """Allocates tensors in a memory from byte `start` on. A place is used again once nothing refers to its tensor."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._top = start
        self._free: dict[int, int] = {}
        self._lock = Lock()
        # Tensors end whenever and in whichever thread they end; appending to a deque is safe there.
        self._returned: deque[tuple[int, int]] = deque()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor of shape (numel,)."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = round_up(numel * dtype.itemsize, mmap.PAGESIZE)
        with self._lock:
            start = self._take(nbytes)
        piece = memoryview(self._memory)[start : start + numel * dtype.itemsize]
        # The tensor's storage holds this very object, so the two end together.
        weakref.finalize(piece, self._returned.append, (start, nbytes)).atexit = False
        return torch.frombuffer(piece, dtype=torch.uint8).view(dtype)

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Return the offset in the memory at which a tensor's data begin; None if the data are elsewhere."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self._top else None

    def _take(self, nbytes: int) -> int:
        self._collect_returned()
        # The smallest that is large enough; of those the first.
        found = min(((size, start) for start, size in self._free.items() if size >= nbytes), default=None)
        if found is not None:
            size, start = found
            del self._free[start]
            if size > nbytes:
                self._free[start + nbytes] = size - nbytes
            return start
        start = next((start for start, size in self._free.items() if start + size == self._top), self._top)
        if start + nbytes > len(self._memory):
            raise MemoryError(f"{nbytes} bytes more than the {len(self._memory)} bytes that ranks of one host share")
        self._free.pop(start, None)
        self._top = start + nbytes
        return start

    def _collect_returned(self) -> None:
        """Put returned places together with free ones beside them."""
        while self._returned:
            start, nbytes = self._returned.popleft()
            before = next((first for first, size in self._free.items() if first + size == start), start)
            nbytes += self._free.pop(start + nbytes, 0)
            self._free[before] = self._free.get(before, 0) + nbytes
