"""Cuts of a tensor along a dim, and where a part of one cut lies in another. Pure arithmetic.

A tensor that is cut along its first dim, or not at all, is flattened row by row. A tensor that is cut along another dim
is flattened chunk by chunk, so that a rank's part is always one interval:

    row by row    0 1 2 3 | 4 5 6 7           in two chunks    0 1 4 5 | 2 3 6 7
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fullshard.core.boxes import IntervalBox, boxes, strides_of
from fullshard.core.layout import Interval


@dataclass(frozen=True, slots=True)
class Chunking:
    """One way to cut a tensor.

    Attributes:
        dim: along which dim.
        parts: into how many parts, as `torch.chunk` cuts: the last ones may be empty.
        groups: number of groups of equal size that are each cut this way, for a layer that packs several matrices into
            one. A part has a piece of each group.
    """

    dim: int
    parts: int
    groups: int = 1

    def pieces(self, shape: tuple[int, ...], part: int) -> list[tuple[int, int, int]]:
        """Return a part's pieces along `dim`: the start of each in a tensor of `shape` and in the part; the length."""
        length = shape[self.dim] // self.groups
        chunk = -(-length // self.parts)
        start = min(part * chunk, length)
        size = min(chunk, length - start)
        return [(group * length + start, group * size, size) for group in range(self.groups)]

    def sizes(self, shape: tuple[int, ...], part: int) -> tuple[int, ...]:
        """Return the shape of a part of a tensor of `shape`."""
        size = sum(length for _, _, length in self.pieces(shape, part))
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def start(self, shape: tuple[int, ...], part: int) -> int:
        """Return the start of a part in the flattened tensor."""
        return sum(math.prod(self.sizes(shape, before)) for before in range(part))

    @property
    def is_row_by_row(self) -> bool:
        """Return whether the tensor is flattened as if it were not cut."""
        return self.parts == 1 or (self.dim == 0 and self.groups == 1)


UNCUT = Chunking(0, 1)


@dataclass(frozen=True, slots=True)
class Patch:
    """The elements that two cuts of a tensor share, as a box in each.

    Attributes:
        source: where to read: an interval of the tensor as its source flattens it.
        source_sizes, source_offsets: the same as a box, and the start of the patch in it.
        sizes: of the patch.
        target: its start in the wanted elements.
        target_strides: its strides in the wanted elements, along each dim.
    """

    source: Interval
    source_sizes: tuple[int, ...]
    source_offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]


def patches(shape: tuple[int, ...], source: Chunking, target: Chunking, wanted: Interval) -> Iterator[Patch]:
    """Yield what to read of a tensor of `shape`, flattened by `source`, for `wanted` of it flattened by `target`."""
    start = 0
    for part in range(target.parts):
        sizes = target.sizes(shape, part)
        own = wanted.intersect(Interval(start, start + math.prod(sizes)))
        for box in boxes(sizes, own.shift(-start)) if own.numel else ():
            for piece in in_whole(box, target, shape, part):
                yield from _from(shape, source, piece, own.start - wanted.start)
        start += math.prod(sizes)


def in_whole(box: IntervalBox, chunking: Chunking, shape: tuple[int, ...], part: int) -> Iterator[IntervalBox]:
    """Convert a box of a part to boxes of the whole tensor: one per piece of the part that it touches."""
    dim = chunking.dim
    low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    for whole, inner, length in chunking.pieces(shape, part):
        first, last = max(low, inner), min(high, inner + length)
        if first < last:
            yield IntervalBox(
                _with(box.offsets, dim, whole + first - inner),
                _with(box.sizes, dim, last - first),
                box.start + (first - low) * box.strides[dim],
                box.strides,
            )


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _from(shape: tuple[int, ...], source: Chunking, wanted: IntervalBox, offset: int) -> Iterator[Patch]:
    """Yield what to read of the source's parts for a box of the whole, `offset` elements into the wanted interval."""
    dim, start = source.dim, 0
    first, last = wanted.offsets[dim], wanted.offsets[dim] + wanted.sizes[dim]
    for part in range(source.parts):
        held = source.sizes(shape, part)
        for whole, inner, length in source.pieces(shape, part):
            low, high = max(first, whole), min(last, whole + length)
            if low >= high:
                continue
            sizes = _with(wanted.sizes, dim, high - low)
            inside = _with(wanted.offsets, dim, low - whole + inner)
            # The least that is contiguous in the chunk: whole slices of all dims after the first of several elements.
            split = next((d for d, size in enumerate(sizes) if size > 1), len(sizes) - 1)
            covering = (*sizes[: split + 1], *held[split + 1 :])
            corner = (*inside[: split + 1], *(0 for _ in held[split + 1 :]))
            begin = start + sum(a * b for a, b in zip(corner, strides_of(held), strict=True))
            yield Patch(
                source=Interval(begin, begin + math.prod(covering)),
                source_sizes=covering,
                source_offsets=tuple(a - b for a, b in zip(inside, corner, strict=True)),
                sizes=sizes,
                target=offset + wanted.start + (low - first) * wanted.strides[dim],
                target_strides=wanted.strides,
            )
        start += math.prod(held)
