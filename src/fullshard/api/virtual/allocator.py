"""The arithmetic of CUDA's caching allocator, as torch configures it by itself: addresses are not needed, sizes are.

A block is a part of a segment, and belongs to the stream it was asked for on. What is freed may be taken again by that
stream at once. A request takes the smallest free block that fits, and leaves the rest of it if that is worth keeping;
neighbours that are free become one. Only where none fits a new segment is asked of the device.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

from fullshard.core.sizes import MIB

GRAIN = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
ROUND = 2 * MIB


class SegmentPart:
    """A part of a segment.

    Attributes:
        nbytes: of it.
        stream: whom it belongs to.
        before, after: neighbours in the segment.
        is_free: whether it can be taken.
        asked: bytes that were asked for.
    """

    __slots__ = ("after", "asked", "before", "is_free", "is_small", "nbytes", "number", "stream")

    def __init__(self, nbytes: int, stream: Any, number: int, *, is_small: bool) -> None:
        self.nbytes, self.stream, self.number, self.is_small = nbytes, stream, number, is_small
        self.before: SegmentPart | None = None
        self.after: SegmentPart | None = None
        self.is_free, self.asked = True, 0


@dataclass(slots=True)
class Allocator:
    """One device's.

    Args:
        capacity: bytes of the device; before more is asked for, segments that are free go back.

    Attributes:
        allocated, reserved: bytes now.
        peak_allocated, peak_reserved: the most, since `reset_peaks`.
        segments: asked of the device so far.
    """

    capacity: float = float("inf")
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    segments: int = 0
    _free: dict[tuple[Any, bool], list[tuple[int, int, SegmentPart]]] = field(default_factory=dict)
    _count: int = 0

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
        place = bisect.bisect_left(pool, (size, -1))
        block = pool.pop(place)[2] if place < len(pool) else self._segment(size, stream, is_small=is_small)
        rest = block.nbytes - size
        if rest >= GRAIN if is_small else rest > SMALL:
            self._split(block, size)
        block.is_free, block.asked = False, size
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def give(self, block: SegmentPart | None) -> None:
        """Free a block."""
        if block is None:
            return
        self.allocated -= block.asked
        block.is_free, block.asked = True, 0
        pool = self._free[block.stream, block.is_small]
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                pool.remove((other.nbytes, other.number, other))
                block = _joined(other, block) if other is block.before else _joined(block, other)
        bisect.insort(pool, (block.nbytes, block.number, block))

    def _segment(self, size: int, stream: Any, *, is_small: bool) -> SegmentPart:
        nbytes = SMALL_SEGMENT if is_small else MEDIUM_SEGMENT if size < MEDIUM else -(-size // ROUND) * ROUND
        if self.reserved + nbytes > self.capacity:
            self.give_back()
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.segments += 1
        self._count += 1
        return SegmentPart(nbytes, stream, self._count, is_small=is_small)

    def give_back(self) -> None:
        """Return unused segments to the device."""
        for key, pool in self._free.items():
            kept = [entry for entry in pool if entry[2].before is not None or entry[2].after is not None]
            self.reserved -= sum(entry[0] for entry in pool) - sum(entry[0] for entry in kept)
            self._free[key] = kept

    def _split(self, block: SegmentPart, size: int) -> None:
        self._count += 1
        rest = SegmentPart(block.nbytes - size, block.stream, self._count, is_small=block.is_small)
        rest.before, rest.after, block.nbytes = block, block.after, size
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        bisect.insort(self._free[block.stream, block.is_small], (rest.nbytes, rest.number, rest))


def _joined(first: SegmentPart, second: SegmentPart) -> SegmentPart:
    first.nbytes += second.nbytes
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    first.is_free = True
    return first
