"""Converts an interval of a flattened tensor to boxes, which torch's tools and other checkpoint formats use.

A tensor that is cut along its first dim, or not at all, is flattened row by row. A tensor that is cut along another dim
is flattened chunk by chunk, so that a rank's part is always one interval:

    row by row    0 1 2 3 | 4 5 6 7           in two chunks    0 1 4 5 | 2 3 6 7
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullshard.core.layout import Interval


@dataclass(frozen=True, slots=True)
class IntervalBox:
    """A rectangular part of a tensor, given by a range of indices in each dim."""

    offsets: tuple[int, ...]  # the index of the first element, in each dim
    sizes: tuple[int, ...]  # the number of elements in each dim
    start: int  # the position of the first element in the interval
    strides: tuple[int, ...]  # the distance between neighboring elements in the interval, along each dim


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor that is stored row by row."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def boxes(shape: tuple[int, ...], interval: Interval) -> Iterator[IntervalBox]:
    """Yield the boxes that make up `interval` of a tensor of `shape`, in order. There are at most 2n - 1 for n dims."""
    strides = strides_of(shape)
    at = interval.start
    while at < interval.stop:
        left = interval.stop - at
        # outermost dim with a complete slice that begins here and fits
        dim = next((d for d, stride in enumerate(strides) if at % stride == 0 and stride <= left), len(shape))
        index = tuple(at // stride % size for stride, size in zip(strides, shape, strict=True))
        if dim == len(shape):  # a scalar
            yield IntervalBox((), (), 0, ())
            return
        count = min(left // strides[dim], shape[dim] - index[dim])
        yield IntervalBox(index, (1,) * dim + (count, *shape[dim + 1 :]), at - interval.start, strides)
        at += count * strides[dim]


@dataclass(frozen=True, slots=True)
class Chunking:
    """A way to cut a tensor into chunks."""

    dim: int  # the dim to cut along
    chunks: int  # the number of chunks, cut as by `torch.chunk`, so the last ones may be empty
    # The number of groups of equal size that are each cut this way, for a layer that packs several matrices into one.
    # Each chunk contains one piece of every group.
    groups: int = 1

    def pieces(self, shape: tuple[int, ...], chunk: int) -> list[tuple[int, int, int]]:
        """Return `(start in the tensor, start in the chunk, length)` along `dim` for each piece of a chunk."""
        length = shape[self.dim] // self.groups
        longest = -(-length // self.chunks)
        start = min(chunk * longest, length)
        size = min(longest, length - start)
        return [(group * length + start, group * size, size) for group in range(self.groups)]

    def sizes(self, shape: tuple[int, ...], chunk: int) -> tuple[int, ...]:
        """Return the shape of a chunk of a tensor of `shape`."""
        size = sum(length for _, _, length in self.pieces(shape, chunk))
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def start(self, shape: tuple[int, ...], chunk: int) -> int:
        """Return the position in the flattened tensor at which a chunk starts."""
        return sum(math.prod(self.sizes(shape, before)) for before in range(chunk))

    @property
    def is_row_by_row(self) -> bool:
        """Return whether the tensor is flattened row by row, as if it were not cut."""
        return self.chunks == 1 or (self.dim == 0 and self.groups == 1)


UNCUT = Chunking(0, 1)


def in_full_tensor(box: IntervalBox, chunking: Chunking, shape: tuple[int, ...], chunk: int) -> Iterator[IntervalBox]:
    """Convert a box of a chunk to boxes of the full tensor, one for each piece of the chunk that it overlaps."""
    dim = chunking.dim
    low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    for outer, inner, length in chunking.pieces(shape, chunk):
        first, last = max(low, inner), min(high, inner + length)
        if first < last:
            yield IntervalBox(
                replaced(box.offsets, dim, outer + first - inner),
                replaced(box.sizes, dim, last - first),
                box.start + (first - low) * box.strides[dim],
                box.strides,
            )


def replaced(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    """Return a copy of `values` in which `value` replaces the item for `dim`."""
    return (*values[:dim], value, *values[dim + 1 :])
