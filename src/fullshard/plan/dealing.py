"""Assign complete matrices to ranks for optimizers that need them. This module only uses layouts, not torch.

Some optimizers, such as Muon, need complete matrices. Each matrix has an *owner*: the rank that collects all pieces of
the matrix, updates it, and sends the pieces of the result back. All ranks along the replicate axis hold the same
pieces, so matrices are also divided among them:

    bucket        |  q  |  k  |  v  |   o   |     up      |    down     |
    intervals     |     rank 0      |     rank 1      |     rank 2      |
    owners        |  0  |  0  |  0  |   1   |      1      |      2      |       only split matrices are sent

All ranks, and the planner, compute the assignment from the same numbers, so they get the same result.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fullshard.core.layout import BucketLayout, Interval

NEWTON_SCHULZ_STEPS = 5
HALVED_ROWS = 512
"""Symmetric products with at least this many rows skip their upper right quarter, which is copied instead."""
_EVEN_ENOUGH = 1.05
"""The most load of a rank, relative to the most even assignment, if less is sent or more is overlapped."""
_AHEAD = 0.25
"""The most temporary extra load, as a fraction of one exchange's work. The other ranks wait for it."""
_ENOUGH_EXCHANGES = 4
"""With this many exchanges, only parts of the first and the last do not overlap with computation."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One complete matrix, and its position in a bucket."""

    bucket: int
    interval: Interval
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements of the matrix."""
        return self.interval.numel

    @property
    def flops(self) -> int:
        """The FLOP of an update: Muon's iterations each compute two symmetric products and a general one."""
        short, long = sorted((self.rows, self.columns))
        made = short * short - (short // 2 * (short - short // 2) if short >= HALVED_ROWS else 0)
        return NEWTON_SCHULZ_STEPS * 2 * (made * (long + short) + short * short * long)


def matrix_shape(shape: Sequence[int], *, flatten: bool) -> tuple[int, int, int]:
    """Return (count, rows, columns) of the matrices in a parameter of this shape.

    A parameter with three dims is a batch of matrices, such as the weights of experts. A vector is a single row. With
    `flatten`, as for a convolution, the parameter is a single matrix whose columns are all dims but the first.
    Parameters with more than three dims are always flattened.
    """
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    if len(shape) == 3 and not flatten:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], math.prod(shape[1:])


def matrices_in(bucket: int, layout: BucketLayout, index: int, *, flatten: bool) -> list[Matrix]:
    """Return the matrices in the parameter at position `index` in bucket number `bucket`. There may be none."""
    count, rows, columns = matrix_shape(layout.specs[index].shape, flatten=flatten)
    numel, offset = rows * columns, layout.offsets[index]
    starts = range(offset, offset + count * numel, numel) if numel else ()
    return [Matrix(bucket, Interval(start, start + numel), rows, columns) for start in starts]


@dataclass(frozen=True)
class Dealing:
    """An assignment of matrices to the ranks that update them. Create it with `deal`."""

    layouts: tuple[BucketLayout, ...]  # the layouts of the buckets
    matrices: tuple[Matrix, ...]  # the matrices in the order of the optimizer's parameters
    exchanges: tuple[tuple[int, ...], ...]  # for each exchange, the buckets whose pieces are sent together
    replicate_size: int
    shard_size: int
    owners: tuple[tuple[int, int], ...] = ()  # for each matrix, its owner's position on each axis (replicate, shard)

    @cached_property
    def by_bucket(self) -> list[list[int]]:
        """The numbers of the matrices in each bucket."""
        numbers: list[list[int]] = [[] for _ in self.layouts]
        for number, matrix in enumerate(self.matrices):
            numbers[matrix.bucket].append(number)
        return numbers

    def of_ranks(self, amount: Callable[[int], int], buckets: Iterable[int] | None = None) -> list[int]:
        """Return, for each rank, the sum of `amount(number)` over its matrices, in all buckets or only in `buckets`."""
        amounts = [0] * (self.replicate_size * self.shard_size)
        for bucket in range(len(self.layouts)) if buckets is None else buckets:
            for number in self.by_bucket[bucket]:
                row, rank = self.owners[number]
                amounts[row * self.shard_size + rank] += amount(number)
        return amounts

    def work(self, buckets: Iterable[int] | None = None) -> list[int]:
        """Return the number of floating-point operations that each rank performs in a step."""
        return self.of_ranks(lambda number: self.matrices[number].flops, buckets)

    def held_by(self, number: int, rank: int) -> int:
        """Return the number of elements of matrix `number` that lie in the interval of a rank."""
        matrix = self.matrices[number]
        return matrix.interval.intersect(self.layouts[matrix.bucket].rank_interval(rank)).numel

    def arriving(self, number: int) -> int:
        """Return the number of elements of matrix `number` that its owner receives from other ranks."""
        return self.matrices[number].numel - self.held_by(number, self.owners[number][1])

    @property
    def busiest_numel(self) -> int:
        """The number of elements that the busiest rank of each exchange receives, and later sends, in all exchanges."""
        return sum(max(self.of_ranks(self.arriving, exchange)) for exchange in self.exchanges)


def deal(
    layouts: Sequence[BucketLayout], matrices: Sequence[Matrix], *, replicate_size: int, shard_size: int
) -> Dealing:
    """Assign each matrix to a rank, so that work and messages are spread evenly.

    The assignment proceeds exchange by exchange. In each, the largest matrix is assigned first, and each matrix goes to
    the rank with the least work so far. It goes to the rank that already holds most of its elements instead, if that
    rank has room and if the complete assignment stays balanced within 5 %.

    An exchange combines several buckets. A single bucket has few matrices, so only a few owners would receive data
    while all others wait. Several buckets together have a matrix for each rank. This needs no more memory, because a
    rank holds little of each bucket and sends at most about half of the largest bucket at a time. If a small number of
    exchanges would be enough, a larger number is used as long as the result stays as balanced. Owners then compute
    while the next pieces are on their way.
    """
    numbers = sorted({matrix.bucket for matrix in matrices})
    whole = max((layouts[number].full_numel for number in numbers), default=1)
    fewest = math.ceil(2 * sum(layouts[number].shard_numel for number in numbers) / whole)
    counts = range(min(fewest, len(numbers)), min(max(fewest, _ENOUGH_EXCHANGES), len(numbers)) + 1)
    dealings = []
    for count in counts if shard_size > 1 else counts[:1]:
        exchanges = _together(numbers, [layouts[number].shard_numel for number in numbers], count)
        empty = Dealing(tuple(layouts), tuple(matrices), exchanges, replicate_size, shard_size)
        even, most = _dealt(empty, [0.0] * len(exchanges))
        local, largest = _dealt(empty, [min(most[-1], load + _AHEAD * most[-1] / len(most)) for load in most])
        is_even = not most or largest[-1] <= most[-1] * _EVEN_ENOUGH
        dealings.append(local if is_even and local.busiest_numel <= even.busiest_numel else even)
    loads = [(max(dealing.work()), dealing.busiest_numel) for dealing in dealings]
    limits = [_EVEN_ENOUGH * min(found) for found in zip(*loads, strict=True)]
    even_enough = [d for d, load in zip(dealings, loads, strict=True) if load[0] <= limits[0] and load[1] <= limits[1]]
    return (even_enough or dealings[:1])[-1]


def _together(numbers: Sequence[int], sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Split `numbers` into at most `count` contiguous parts with about the same total of their `sizes`."""
    parts: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for number, size in zip(numbers, sizes, strict=True):
        parts[before * count // sum(sizes)].append(number)
        before += size
    return tuple(tuple(part) for part in parts if part)


def _dealt(dealing: Dealing, limits: Sequence[float]) -> tuple[Dealing, list[int]]:
    """Return a copy of `dealing` with owners, and the largest load of any rank after each exchange."""
    # A matrix goes to the rank that holds most of it or, if that would exceed the limit, to the least loaded rank.
    matrices, shard_size = dealing.matrices, dealing.shard_size
    flops, numel = sum(matrix.flops for matrix in matrices), sum(matrix.numel for matrix in matrices)
    # The number of elements practically only breaks ties.
    sizes = [16 * matrix.flops * numel + matrix.numel * flops for matrix in matrices]
    loads = [0] * (dealing.replicate_size * shard_size)
    least = [(0, rank) for rank in range(len(loads))]
    owners, most = [(0, 0)] * len(matrices), []
    for exchange, limit in zip(dealing.exchanges, limits, strict=True):
        together = (number for bucket in exchange for number in dealing.by_bucket[bucket])
        for number in sorted(together, key=lambda n: -sizes[n]):
            own = matrices[number].interval
            shard_numel = dealing.layouts[matrices[number].bucket].shard_numel
            holders = range(own.start // shard_numel, (own.stop - 1) // shard_numel + 1)
            nearest = max(holders, key=lambda rank: dealing.held_by(number, rank)) if limit else 0
            rank = min(range(nearest, len(loads), shard_size), key=loads.__getitem__)
            if loads[rank] + sizes[number] > limit:
                while least[0][0] != loads[least[0][1]]:
                    heapq.heappop(least)  # the entry is outdated: the rank has received another matrix
                rank = least[0][1]
            loads[rank] += sizes[number]
            owners[number] = divmod(rank, shard_size)
            heapq.heappush(least, (loads[rank], rank))
        most.append(max(loads))
    return replace(dealing, owners=tuple(owners)), most
