"""An interval of a flattened tensor as boxes of the tensor: how other formats and torch's tools cut tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullshard.core.layout import Interval


@dataclass(frozen=True, slots=True)
class IntervalBox:
    """Neighbouring elements of a tensor in each of its dims.

    Attributes:
        offsets: index of the first element.
        sizes: elements in each dim.
        start: its first element's place in the interval.
        strides: from one to the next in the interval, along each dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the elements from one to the next along each dim, in a tensor that is stored row by row."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def boxes(shape: tuple[int, ...], interval: Interval) -> Iterator[IntervalBox]:
    """Yield the boxes that make up `interval` of a tensor of `shape`, in order; at most 2n - 1 for n dims."""
    strides = strides_of(shape)
    at = interval.start
    while at < interval.stop:
        left = interval.stop - at
        # outermost dim with a whole slice that begins here and fits
        dim = next((d for d, stride in enumerate(strides) if at % stride == 0 and stride <= left), len(shape))
        index = tuple(at // stride % size for stride, size in zip(strides, shape, strict=True))
        if dim == len(shape):  # a scalar
            yield IntervalBox((), (), 0, ())
            return
        count = min(left // strides[dim], shape[dim] - index[dim])
        yield IntervalBox(index, (1,) * dim + (count, *shape[dim + 1 :]), at - interval.start, strides)
        at += count * strides[dim]
