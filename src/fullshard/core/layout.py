"""Define the elements of each parameter that a rank owns (the interval layout). This module does not import torch.

A bucket is the concatenation of its parameters in definition order, each of which starts on an aligned element. The
bucket is padded so that it divides into equal intervals, as gathers require. Rank r of a shard group owns elements
[r*S, (r+1)*S):

    parameters   |aaaaaaaaa...|bbbbb...|cccccccccccccccccccccc|dd..|......|      ('.' = padding)
    intervals    |     rank 0      |     rank 1      |     rank 2         |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fullshard.core.errors import LayoutError
from fullshard.core.sizes import round_up

ALIGNMENT_NBYTES = 16
"""NCCL falls back to scalar copies when a rank's payload is not a multiple of 16 bytes."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Elements [start, stop) of a flat sequence. The interval is empty if start == stop."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start

    def intersect(self, other: Interval) -> Interval:
        """Return the intersection. If it is empty, it is at the end of this interval that is closer to `other`."""
        start = min(max(self.start, other.start), self.stop)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> Interval:
        """Return the interval moved by `offset` elements."""
        return Interval(self.start + offset, self.stop + offset)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter in a layout, with its name in the model and its global shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements of the unsharded parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """The offsets of a bucket's parameters and the interval of every rank. Build it with `BucketLayout.build`."""

    specs: tuple[ParameterSpec, ...]  # the parameters in definition order
    offsets: tuple[int, ...]  # the offset of each parameter in the bucket, in elements
    shard_numel: int  # the number of elements per rank, S
    world_size: int  # the number of ranks that share the bucket, which form one shard group
    alignment: int  # a divisor of every parameter offset and of every interval start, in elements

    @classmethod
    def build(
        cls, specs: Sequence[ParameterSpec], *, itemsize: int, world_size: int, atom: int | None = None
    ) -> BucketLayout:
        """Pack `specs`, in definition order, for `world_size` ranks.

        `itemsize` is the size in bytes of the narrowest dtype in which the bucket is communicated. `atom` is the number
        of elements that must stay on the same rank, such as those of a row; None means as many as fill 16 bytes.
        """
        if world_size < 1 or itemsize < 1 or (ALIGNMENT_NBYTES % itemsize and itemsize % ALIGNMENT_NBYTES):
            raise LayoutError(f"cannot lay out items of {itemsize} bytes across {world_size} ranks")
        alignment = max(1, ALIGNMENT_NBYTES // itemsize if atom is None else atom)
        offsets, end = [], 0
        for spec in specs:
            offsets.append(round_up(end, alignment))
            end = offsets[-1] + spec.numel
        shard_numel = round_up(-(-end // world_size), alignment)
        return cls(tuple(specs), tuple(offsets), shard_numel, world_size, alignment)

    def __post_init__(self) -> None:
        names, end = set[str](), 0
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            if offset < end or offset % self.alignment:
                raise LayoutError(
                    f"parameter {spec.name!r} at offset {offset} overlaps the previous parameter or is not aligned"
                )
            if spec.name in names:
                raise LayoutError(f"parameter {spec.name!r} is listed twice in one bucket")
            names.add(spec.name)
            end = offset + spec.numel
        if end > self.full_numel or self.shard_numel % self.alignment:
            raise LayoutError(
                f"{end} elements do not fit into {self.world_size} aligned intervals of {self.shard_numel} elements"
            )

    @cached_property
    def full_numel(self) -> int:
        """Return the number of elements of the unsharded bucket, including padding."""
        return self.shard_numel * self.world_size

    @cached_property
    def numel(self) -> int:
        """Return the number of elements of the parameters, without padding."""
        return sum(spec.numel for spec in self.specs)

    @cached_property
    def largest_numel(self) -> int:
        """Return the number of elements of the largest parameter."""
        return max(spec.numel for spec in self.specs)

    def rank_interval(self, rank: int) -> Interval:
        """Return the elements of the bucket that `rank` owns."""
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def interval(self, index: int, rank: int) -> Interval:
        """Return the elements of the flattened parameter `index` that `rank` owns, or an empty interval if none."""
        offset = self.offsets[index]
        full = Interval(offset, offset + self.specs[index].numel)
        return full.intersect(self.rank_interval(rank)).shift(-offset)

    def shard_slice(self, index: int, rank: int) -> slice:
        """Return the position of `interval(index, rank)` in the rank's shard."""
        local = self.interval(index, rank)
        if local.numel == 0:
            return slice(0, 0)
        start = self.offsets[index] + local.start - rank * self.shard_numel
        return slice(start, start + local.numel)
