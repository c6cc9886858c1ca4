"""Gives free pages of the allocator's heap back to the system while a backward goes on.

Activations and reduced gradients take turns: one goes as the other comes. But the allocator seldom has room for a
gradient of many MiB where activations were, because what lives longer, optimizer state and the odd small block, lies
between them. So a heap grows to hold both, full of holes. Whole pages of these holes are given back, every so many
bytes of new gradients and before a very long one, and are mapped again when they are used.

That takes time, about half a millisecond per MiB, and so is only done where it matters: not in small models.
"""

from __future__ import annotations

import ctypes
import functools
import os

SWITCH = "FULLSHARD_HEAP"
"""Environment variable; `keep` leaves the heap as it is."""

TRIM_NBYTES = 2**26
"""Between one time and the next, of what was newly allocated."""


class Heap:
    """This process's heap, where its C library is glibc; elsewhere nothing happens."""

    def __init__(self) -> None:
        is_wanted = os.environ.get(SWITCH, "trim") != "keep"
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if is_wanted else None
        self._grown = 0

    def note(self, nbytes: int) -> None:
        """A gradient of `nbytes` bytes was allocated."""
        self._grown += nbytes
        if self._grown >= TRIM_NBYTES:
            self.give_back()

    def give_back(self) -> None:
        """Give back whole free pages."""
        self._grown = 0
        if self._trim is not None:
            self._trim(ctypes.c_size_t(0))


@functools.cache
def heap() -> Heap:
    """The one of this process."""
    return Heap()
