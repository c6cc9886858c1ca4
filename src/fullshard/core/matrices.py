"""The owner of each whole matrix: an optimizer's work dealt to the ranks, from layouts alone. No torch.

Some optimizers, such as Muon, need whole matrices. Each matrix has an *owner*: the one rank that gets all its pieces
and sends pieces of the result back. Along the replicate axis all ranks have the same pieces, and matrices are dealt
there, too:

    bucket        |  q  |  k  |  v  |   o   |     up      |    down     |
    intervals     |     rank 0      |     rank 1      |     rank 2      |
    owners        |  0  |  0  |  0  |   1   |      1      |      2      |       only cut matrices travel

The dealing is even in work and in elements. Within that limit a matrix goes to the rank that has most of it. The
dealing is pure arithmetic on numbers that every rank has, so all ranks get the same result.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from fullshard.core.errors import LayoutError
from fullshard.core.layout import BucketLayout, Interval

_EVEN_ENOUGH = 1.05
"""A rank's load over the most even dealing's, allowed if less travels or more of it overlaps with computing."""
_AHEAD = 0.25
"""Temporary extra load, as a part of one exchange's work: the others wait for that."""
_ENOUGH_EXCHANGES = 4
"""With this many, only a part of the first exchange and of the last does not overlap with computing."""
NEWTON_SCHULZ_STEPS = 5
HALVED_ROWS = 512
"""A symmetric product of so many rows or more is made without its upper right quarter, which is a copy."""
PRECONDITION_FREQUENCY = 10
ROOT_FREQUENCY = 50
MAX_PRECOND_DIM = 10_000
_SLOWNESS_OF_DECOMPOSITIONS = 10
"""A decomposition's time over that of a matrix product of as many operations: assumed."""


class MatrixCost(Protocol):
    """The cost of a matrix to its owner, for one optimizer.

    Attributes:
        sent_as: dtype of messages to it and back, and of its computation.
    """

    @property
    def sent_as(self) -> str:
        """Return the dtype of messages and of the owner's work; see above."""

    def flops(self, rows: int, columns: int) -> int:
        """Return the multiplications and additions in a step, on average."""

    def kept(self, rows: int, columns: int) -> int:
        """Return the elements that the owner keeps from step to step."""

    def working(self, rows: int, columns: int) -> int:
        """Return the elements that the owner needs in addition while it computes."""


@dataclass(frozen=True, slots=True)
class NewtonSchulz:
    """Muon's iteration, which keeps nothing."""

    sent_as: str = "bfloat16"

    def flops(self, rows: int, columns: int) -> int:
        """Return all iterations' operations: two symmetric products, of the matrix and its result, and one other."""
        short, long = sorted((rows, columns))
        made = short * short - (short // 2 * (short - short // 2) if short >= HALVED_ROWS else 0)
        return NEWTON_SCHULZ_STEPS * 2 * (made * (long + short) + short * short * long)

    def kept(self, rows: int, columns: int) -> int:
        """Return 0: nothing is kept."""
        return 0

    def working(self, rows: int, columns: int) -> int:
        """Return two more of the matrix, and two of its square."""
        return 2 * (rows * columns + min(rows, columns) ** 2)


@dataclass(frozen=True, slots=True)
class Eigenbases:
    """SOAP's state: two moments; for rows and columns a factor and its eigenvectors, unless a dim is too large.

    Attributes:
        frequency: steps from one decomposition to the next.
        largest: dim that still has a factor.
    """

    frequency: int = PRECONDITION_FREQUENCY
    largest: int = MAX_PRECOND_DIM
    sent_as: str = "float32"

    def flops(self, rows: int, columns: int) -> int:
        """Return three products per basis and one per factor; and, now and then, a product and a decomposition."""
        dims = self._dims(rows, columns)
        often = sum(4 * 2 * dim * rows * columns for dim in dims)
        return often + sum((2 + _SLOWNESS_OF_DECOMPOSITIONS * 8 // 3) * dim**3 for dim in dims) // self.frequency

    def kept(self, rows: int, columns: int) -> int:
        """Return the elements of that state."""
        return 2 * rows * columns + sum(2 * dim * dim for dim in self._dims(rows, columns))

    def working(self, rows: int, columns: int) -> int:
        """Return four more of the matrix, or three of a factor."""
        return max(4 * rows * columns, 3 * max(self._dims(rows, columns), default=0) ** 2)

    def _dims(self, rows: int, columns: int) -> list[int]:
        return [dim for dim in (rows, columns) if dim <= self.largest]


@dataclass(frozen=True, slots=True)
class InverseRoots(Eigenbases):
    """Shampoo's state: as large as SOAP's, with a root of each factor instead of its eigenvectors."""

    frequency: int = ROOT_FREQUENCY

    def flops(self, rows: int, columns: int) -> int:
        """Return a product per factor and one with its root; and, now and then, a decomposition and a product."""
        dims = self._dims(rows, columns)
        often = sum(2 * 2 * dim * rows * columns for dim in dims)
        return often + sum((2 + _SLOWNESS_OF_DECOMPOSITIONS * 9) * dim**3 for dim in dims) // self.frequency


@dataclass(frozen=True, slots=True)
class Matrix:
    """One whole matrix.

    Attributes:
        bucket: number of the bucket that it is in, in a list of them.
        interval: its elements there.
        rows, columns: its shape.
    """

    bucket: int
    interval: Interval
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return self.interval.numel


def matrix_shape(shape: Sequence[int], *, flatten: bool) -> tuple[int, int, int]:
    """Return (how many, rows, columns) of the matrices in a parameter of this shape.

    Args:
        shape: of two dims or more. Three dims are a batch of matrices, for example the weights of experts.
        flatten: treat it as one matrix, with all dims but the first as columns, as for a convolution. More than three
            dims are always flattened.

    Raises:
        LayoutError: it has fewer.
    """
    if len(shape) < 2:
        raise LayoutError(f"a tensor of shape {tuple(shape)} is no matrix")
    if len(shape) == 3 and not flatten:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], math.prod(shape[1:])


def matrices_in(bucket: int, layout: BucketLayout, index: int, *, flatten: bool) -> list[Matrix]:
    """Return the matrices of parameter `index` of bucket `bucket`; none if it has no elements."""
    count, rows, columns = matrix_shape(layout.specs[index].shape, flatten=flatten)
    numel, offset = rows * columns, layout.offsets[index]
    starts = range(offset, offset + count * numel, numel) if numel else ()
    return [Matrix(bucket, Interval(start, start + numel), rows, columns) for start in starts]


def _by_bucket(matrices: Sequence[Matrix], buckets: int) -> list[list[int]]:
    """Group the numbers of the matrices by bucket, for that many buckets."""
    numbers: list[list[int]] = [[] for _ in range(buckets)]
    for number, matrix in enumerate(matrices):
        numbers[matrix.bucket].append(number)
    return numbers


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """Neighbouring elements of a matrix, all of one rank.

    Attributes:
        matrix: its number.
        interval: elements of the bucket.
    """

    matrix: int
    interval: Interval


@dataclass(frozen=True)
class Dealing:
    """The owner of each matrix. Make it with `deal`.

    Attributes:
        layouts: of the buckets.
        matrices: in the order of the optimizer's parameters.
        owners: for each, (position along the replicate axis, along the shard axis).
        exchanges: numbers of the buckets whose pieces travel together.
        replicate_size, shard_size: of the mesh.
        cost: of a matrix, to its owner.
    """

    layouts: tuple[BucketLayout, ...]
    matrices: tuple[Matrix, ...]
    owners: tuple[tuple[int, int], ...]
    exchanges: tuple[tuple[int, ...], ...]
    replicate_size: int
    shard_size: int
    cost: MatrixCost = NewtonSchulz()

    @cached_property
    def _by_bucket(self) -> list[list[int]]:
        return _by_bucket(self.matrices, len(self.layouts))

    def pieces(self, number: int) -> list[tuple[int, MatrixPiece]]:
        """Return (rank of the shard group, its part) for each part of a matrix, in the matrix's order."""
        matrix = self.matrices[number]
        shard_numel = self.layouts[matrix.bucket].shard_numel
        first, last = matrix.interval.start // shard_numel, (matrix.interval.stop - 1) // shard_numel
        ranks = ((r, self.layouts[matrix.bucket].rank_interval(r)) for r in range(first, last + 1))
        return [(r, MatrixPiece(number, matrix.interval.intersect(own))) for r, own in ranks]

    def sent(self, bucket: int, row: int, rank: int) -> list[list[MatrixPiece]]:
        """Return rank `rank`'s part of the matrices of a bucket dealt to `row`, by owner in the shard group."""
        by_owner: list[list[MatrixPiece]] = [[] for _ in range(self.shard_size)]
        own = self.layouts[bucket].rank_interval(rank)
        for number in self._by_bucket[bucket]:
            common = self.matrices[number].interval.intersect(own)
            if common.numel and self.owners[number][0] == row:
                by_owner[self.owners[number][1]].append(MatrixPiece(number, common))
        return by_owner

    def gathered(self, bucket: int, row: int, rank: int) -> list[list[MatrixPiece]]:
        """Return the pieces of a bucket's matrices that rank `rank` of `row` owns, by the rank that has them."""
        by_source: list[list[MatrixPiece]] = [[] for _ in range(self.shard_size)]
        for number in self._by_bucket[bucket]:
            if self.owners[number] == (row, rank):
                for source, piece in self.pieces(number):
                    by_source[source].append(piece)
        return by_source

    # -- how even it is -----------------------------------------------------------------------------------------

    @property
    def work(self) -> list[int]:
        """Operations of each rank in a step, in the order of all ranks."""
        return self._of_ranks(self.cost.flops)

    @property
    def balance(self) -> float:
        """Most work of a rank over the least that the busiest must do: 1 is as even as whole matrices can be.

        The busiest rank must do at least the mean, or the largest matrix if there are more ranks than matrices of that
        size.
        """
        work = self.work
        largest = max((self.cost.flops(m.rows, m.columns) for m in self.matrices), default=0)
        least = max(largest, sum(work) / len(work))
        return max(work) / least if least else 1.0

    @property
    def fullest(self) -> tuple[int, int, int]:
        """Operations of the busiest rank, elements that arrive at the busiest, elements that the fullest keeps."""
        return max(self.work), self.busiest_numel, max(self.kept_numel)

    @property
    def owned_numel(self) -> int:
        """Elements of matrices that the fullest rank has at once: it computes, the next come, the last go back."""
        numel = [self._of_ranks(lambda rows, columns: rows * columns, exchange) for exchange in self.exchanges]
        windows = [numel[max(0, n - 1) : n + 2] for n in range(len(numel))]
        return max((sum(held) for window in windows for held in zip(*window, strict=True)), default=0)

    @property
    def kept_numel(self) -> list[int]:
        """Return the elements that each rank keeps for its matrices."""
        return self._of_ranks(self.cost.kept)

    def work_in(self, exchange: Sequence[int]) -> list[int]:
        """Return each rank's operations for the matrices of these buckets."""
        return self._of_ranks(self.cost.flops, exchange)

    def _of_ranks(self, amount: Callable[[int, int], int], buckets: Sequence[int] | None = None) -> list[int]:
        amounts = [0] * (self.replicate_size * self.shard_size)
        for bucket in range(len(self.layouts)) if buckets is None else buckets:
            for number in self._by_bucket[bucket]:
                matrix, (row, rank) = self.matrices[number], self.owners[number]
                amounts[row * self.shard_size + rank] += amount(matrix.rows, matrix.columns)
        return amounts

    @property
    def moved_numel(self) -> int:
        """Return the elements that all ranks together send to owners; as many come back."""
        return sum(map(self._arriving_numel, range(len(self.matrices))))

    def _arriving_numel(self, number: int) -> int:
        """Return the elements of a matrix that its owner lacks."""
        matrix, (_, rank) = self.matrices[number], self.owners[number]
        return matrix.numel - matrix.interval.intersect(self.layouts[matrix.bucket].rank_interval(rank)).numel

    @property
    def busiest_numel(self) -> int:
        """Elements per exchange that arrive at the busiest rank, which the others wait for, and leave it again."""
        return sum(map(self.busiest_in, self.exchanges))

    def busiest_in(self, exchange: Sequence[int]) -> int:
        """Return the same for one exchange."""
        arriving: dict[tuple[int, int], int] = {}
        for number in (number for bucket in exchange for number in self._by_bucket[bucket]):
            owner = self.owners[number]
            arriving[owner] = arriving.get(owner, 0) + self._arriving_numel(number)
        return max(arriving.values(), default=0)

    def sent_numel(self, row: int, rank: int) -> tuple[int, int, int]:
        """Return the elements that a rank sends in a step: to owners, back from owners, and to the other rows."""
        there = back = across = 0
        for bucket in range(len(self.layouts)):
            own = self.sent(bucket, row, rank)
            there += sum(p.interval.numel for to, pieces in enumerate(own) for p in pieces if to != rank)
            across += (self.replicate_size - 1) * sum(p.interval.numel for pieces in own for p in pieces)
            held = self.gathered(bucket, row, rank)
            back += sum(p.interval.numel for to, pieces in enumerate(held) for p in pieces if to != rank)
        return there, back, across


def deal(
    layouts: Sequence[BucketLayout],
    matrices: Sequence[Matrix],
    *,
    replicate_size: int,
    shard_size: int,
    cost: MatrixCost | None = None,
) -> Dealing:
    """Deal `matrices` to all ranks.

    Exchange by exchange, the largest first, each to the rank with least so far; or, if that comes out as even within
    5 %, to the rank that has most of its elements, for as long as it has room.

    A single bucket has few matrices, so a few owners would receive while all others wait. Several buckets together have
    one for each rank, and cost no memory: a rank has little of each bucket, and sends about half of the largest at
    once, or less. If few exchanges would do, there are more, as long as the dealing stays as even: owners compute while
    the next pieces travel.

    Args:
        layouts: of the buckets, all for `shard_size` ranks.
        matrices: in those.
        replicate_size: ranks along one axis of the mesh.
        shard_size: along the other.
        cost: of a matrix, to its owner; default: Newton-Schulz iteration.
    """
    cost = cost or NewtonSchulz()
    numbers = sorted({matrix.bucket for matrix in matrices})
    whole = max((layouts[number].full_numel for number in numbers), default=1)
    fewest = math.ceil(2 * sum(layouts[number].shard_numel for number in numbers) / whole)
    counts = range(min(fewest, len(numbers)), min(max(fewest, _ENOUGH_EXCHANGES), len(numbers)) + 1)
    dealings = []
    for count in counts if shard_size > 1 else counts[:1]:
        exchanges = _together(numbers, [layouts[number].shard_numel for number in numbers], count)
        even = _Hands(layouts, matrices, replicate_size, shard_size, cost)
        most = even.deal(exchanges)
        local = _Hands(layouts, matrices, replicate_size, shard_size, cost)
        limits = [min(most[-1], load + _AHEAD * most[-1] / len(most)) for load in most]
        is_even = not most or local.deal(exchanges, limits)[-1] <= most[-1] * _EVEN_ENOUGH
        owners = tuple(divmod(owner, shard_size) for owner in (local if is_even else even).owners)
        dealings.append(Dealing(tuple(layouts), tuple(matrices), owners, exchanges, replicate_size, shard_size, cost))
    least = [min(found) for found in zip(*(dealing.fullest for dealing in dealings), strict=True)]
    for dealing in reversed(dealings):
        if all(found <= _EVEN_ENOUGH * best for found, best in zip(dealing.fullest, least, strict=True)):
            return dealing
    return dealings[0]


def _together(numbers: Sequence[int], sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Split neighbours of these sizes into at most `count` parts of about the same size."""
    parts: list[list[int]] = [[] for _ in range(count)]
    before = 0
    for number, size in zip(numbers, sizes, strict=True):
        parts[before * count // sum(sizes)].append(number)
        before += size
    return tuple(tuple(part) for part in parts if part)


class _Hands:
    """The matrices that each rank has been dealt so far.

    Attributes:
        owners: of each matrix, numbered along both axes.
    """

    def __init__(
        self,
        layouts: Sequence[BucketLayout],
        matrices: Sequence[Matrix],
        replicate_size: int,
        shard_size: int,
        cost: MatrixCost,
    ) -> None:
        self._layouts, self._matrices, self._shard_size = layouts, matrices, shard_size
        self._amounts = [(cost.flops(m.rows, m.columns), m.numel + cost.kept(m.rows, m.columns)) for m in matrices]
        self._total = sum(work for work, _ in self._amounts), sum(held for _, held in self._amounts)
        self._hands = [(0, 0)] * (replicate_size * shard_size)
        self._least = [(0, rank) for rank in range(len(self._hands))]
        self.owners = [0] * len(matrices)

    def _load(self, hand: tuple[int, int]) -> int:
        """Return the load in work or in held elements, whichever is the larger part of its total; a whole number."""
        return max(hand[0] * self._total[1], hand[1] * self._total[0])

    def deal(self, exchanges: Sequence[Sequence[int]], limits: Sequence[float] = ()) -> list[int]:
        """Deal all matrices, exchange by exchange.

        A rank that has most of a matrix gets it for as long as its load stays within that exchange's limit.

        Returns:
            The largest of all ranks' loads after each exchange.
        """
        by_bucket = _by_bucket(self._matrices, len(self._layouts))
        most = []
        for exchange, limit in itertools.zip_longest(exchanges, limits):
            together = (number for bucket in exchange for number in by_bucket[bucket])
            for number in sorted(together, key=lambda n: -self._amounts[n][0]):
                self._give(number, limit)
            most.append(max(map(self._load, self._hands)))
        return most

    def _give(self, number: int, limit: float | None) -> None:
        near = range(0) if limit is None else self._nearest(self._matrices[number])
        rank = min(near, key=lambda r: self._load(self._hands[r]), default=-1)
        if limit is None or self._load(self._with(rank, number)) > limit:
            rank = self._least_loaded()
        self._hands[rank] = self._with(rank, number)
        self.owners[number] = rank
        heapq.heappush(self._least, (self._load(self._hands[rank]), rank))

    def _with(self, rank: int, number: int) -> tuple[int, int]:
        (work, held), (more, also_held) = self._hands[rank], self._amounts[number]
        return work + more, held + also_held

    def _least_loaded(self) -> int:
        while True:
            load, rank = self._least[0]
            if load == self._load(self._hands[rank]):
                return rank
            heapq.heappop(self._least)  # it has been dealt something since

    def _nearest(self, matrix: Matrix) -> range:
        """Return the ranks that have most of its elements, one after the other along the replicate axis."""
        shard_numel, interval = self._layouts[matrix.bucket].shard_numel, matrix.interval
        first, last = interval.start // shard_numel, (interval.stop - 1) // shard_numel
        if last - first > 1:
            first += 1  # it has a whole interval, and so does every rank between the two ends
        elif last > first and interval.stop - last * shard_numel > last * shard_numel - interval.start:
            first = last
        return range(first, len(self._hands), self._shard_size)
