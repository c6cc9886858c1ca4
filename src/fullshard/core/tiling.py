"""How tensor parallelism cuts a tensor, and where what one rank has of it lies in another cut. Pure arithmetic.

A tensor that is cut along its first dim, or not at all, is flattened row by row. One that is cut along another dim is
flattened tile by tile, so that what a rank has is one interval of it in any case:

    row by row    0 1 2 3 | 4 5 6 7           in two tiles    0 1 4 5 | 2 3 6 7
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fullshard.core.boxes import boxes
from fullshard.core.layout import Interval


@dataclass(frozen=True, slots=True)
class Tiling:
    """Along which dim a tensor is cut, into how many parts: as `torch.chunk` cuts, the last ones may be empty."""

    dim: int
    parts: int

    def box(self, shape: tuple[int, ...], part: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of a part in a tensor of `shape`."""
        length = shape[self.dim]
        chunk = -(-length // self.parts)
        start = min(part * chunk, length)
        sizes = (*shape[: self.dim], min(chunk, length - start), *shape[self.dim + 1 :])
        return tuple(start if dim == self.dim else 0 for dim in range(len(shape))), sizes

    def start(self, shape: tuple[int, ...], part: int) -> int:
        """Where a part begins in the flattened tensor."""
        offsets, _ = self.box(shape, part)
        return offsets[self.dim] * math.prod(shape) // max(1, shape[self.dim])

    @property
    def is_row_by_row(self) -> bool:
        """Whether the tensor is flattened as if it were not cut."""
        return self.dim == 0 or self.parts == 1


UNTILED = Tiling(0, 1)


@dataclass(frozen=True, slots=True)
class Patch:
    """Elements that two cuts of a tensor have in common, as a box in each.

    Attributes:
        source: where to read: an interval of the tensor as its source flattens it.
        source_sizes, source_offsets: what that is as a box, and where in it the patch begins.
        sizes: of the patch.
        target: where in what is wanted it begins.
        target_strides: elements from one to the next in what is wanted, along each dim.
    """

    source: Interval
    source_sizes: tuple[int, ...]
    source_offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]


def patches(shape: tuple[int, ...], source: Tiling, target: Tiling, wanted: Interval) -> Iterator[Patch]:
    """What to read of a tensor of `shape` flattened as `source` says, for `wanted` of it flattened as `target` says."""
    for part in range(target.parts):
        offsets, sizes = target.box(shape, part)
        start = target.start(shape, part)
        own = wanted.intersect(Interval(start, start + math.prod(sizes)))
        if not own.numel:
            continue
        for box in boxes(sizes, own.shift(-start)):
            first = tuple(map(sum, zip(offsets, box.offsets, strict=True)))
            at = own.start - wanted.start + box.start
            for patch in _of_box(shape, source, first, box.sizes):
                strides = _strides(box.sizes)
                yield Patch(*patch[1:], target=at + _dot(patch[0], strides), target_strides=strides)


def _of_box(
    shape: tuple[int, ...], source: Tiling, first: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Interval, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """The parts of a box of the whole in the source's tiles: where in the box, and the rest of a `Patch`."""
    for part in range(source.parts):
        offsets, held = source.box(shape, part)
        low = tuple(map(max, first, offsets))
        high = tuple(min(a + size, b + length) for a, size, b, length in zip(first, sizes, offsets, held, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        common = tuple(b - a for a, b in zip(low, high, strict=True))
        inside = tuple(a - b for a, b in zip(low, offsets, strict=True))
        # The least that is contiguous in the tile: whole slices of all dims after the first that is not one element.
        split = next((dim for dim, size in enumerate(common) if size > 1), max(0, len(common) - 1))
        covering = (*common[: split + 1], *held[split + 1 :])
        corner = (*inside[: split + 1], *(0 for _ in held[split + 1 :]))
        start = source.start(shape, part) + _dot(corner, _strides(held))
        yield (
            tuple(a - b for a, b in zip(low, first, strict=True)),
            Interval(start, start + math.prod(covering)),
            covering,
            tuple(a - b for a, b in zip(inside, corner, strict=True)),
            common,
        )


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _dot(index: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(a * b for a, b in zip(index, strides, strict=True))
