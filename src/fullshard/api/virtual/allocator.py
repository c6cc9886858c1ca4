"""The arithmetic of CUDA's caching allocator, as torch configures it by itself: addresses are not needed, sizes are.

A block is a part of a segment, and belongs to the stream it was asked for on. What is freed may be taken again by that
stream at once. A request takes the smallest free block that fits, and leaves the rest of it if that is worth keeping;
neighbours that are free become one. Only where none fits a new segment is asked of the device.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field
from typing import Any

from fullshard.core.sizes import MIB

GRAIN = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
ROUND = 2 * MIB

_NUMBERS = itertools.count()


@dataclass(slots=True, order=True)
class SegmentPart:
    """A block, in the order in which free ones are looked through; `asked` is 0 while it is free."""

    nbytes: int
    number: int = field(default_factory=lambda: next(_NUMBERS))
    stream: Any = field(default=None, compare=False)
    is_small: bool = field(default=False, compare=False)
    asked: int = field(default=0, compare=False)
    before: SegmentPart | None = field(default=None, compare=False, repr=False)
    after: SegmentPart | None = field(default=None, compare=False, repr=False)

    def cut(self, size: int) -> SegmentPart:
        """Keep `size` bytes, and return the rest."""
        rest = SegmentPart(self.nbytes - size, stream=self.stream, is_small=self.is_small, before=self)
        self.nbytes, rest.after = size, self.after
        if rest.after is not None:
            rest.after.before = rest
        self.after = rest
        return rest

    def join(self) -> None:
        """Take the next block in."""
        assert self.after is not None  # noqa: S101 -- the caller has seen it
        self.nbytes, self.after = self.nbytes + self.after.nbytes, self.after.after
        if self.after is not None:
            self.after.before = self


@dataclass(slots=True)
class Allocator:
    """One device's memory: `capacity` bytes, of which `reserved` are in segments and `allocated` in use.

    The peaks count since `reset_peaks`. Before more than the capacity is asked for, segments that are free go back.
    """

    capacity: float = float("inf")
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    _free: dict[tuple[Any, bool], list[SegmentPart]] = field(default_factory=dict)

    def reset_peaks(self) -> None:
        """Count the peaks from now on."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def take(self, nbytes: int, stream: Any) -> SegmentPart | None:
        """Return memory for `nbytes` bytes on `stream`; None for none."""
        if nbytes == 0:
            return None
        size = -(-nbytes // GRAIN) * GRAIN
        is_small = size <= SMALL
        pool = self._free.setdefault((stream, is_small), [])
        place = bisect.bisect_left(pool, size, key=lambda block: block.nbytes)
        block = pool.pop(place) if place < len(pool) else self._segment(size, stream, is_small=is_small)
        rest = block.nbytes - size
        if rest >= GRAIN if is_small else rest > SMALL:
            bisect.insort(pool, block.cut(size))
        block.asked = size
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give(self, block: SegmentPart | None) -> None:
        """Free a block."""
        if block is None:
            return
        self.allocated -= block.asked
        block.asked = 0
        pool = self._free[block.stream, block.is_small]
        if block.after is not None and not block.after.asked:
            pool.remove(block.after)
            block.join()
        if block.before is not None and not block.before.asked:
            block = block.before
            pool.remove(block)
            block.join()
        bisect.insort(pool, block)

    def _segment(self, size: int, stream: Any, *, is_small: bool) -> SegmentPart:
        nbytes = SMALL_SEGMENT if is_small else MEDIUM_SEGMENT if size < MEDIUM else -(-size // ROUND) * ROUND
        if self.reserved + nbytes > self.capacity:
            for pool in self._free.values():
                whole = [block for block in pool if block.before is None and block.after is None]
                self.reserved -= sum(block.nbytes for block in whole)
                pool[:] = [block for block in pool if block not in whole]
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return SegmentPart(nbytes, stream=stream, is_small=is_small)
