"""Who computes with which whole matrix: an optimizer's work dealt to the ranks, from layouts alone. No torch.

Some optimizers need a matrix as a whole, Muon for one. Each matrix has an *owner*, the one rank that gets all pieces of
it and sends pieces of the result back. Along the replicate axis all have the same pieces, and matrices are dealt, too:

    bucket        |  q  |  k  |  v  |   o   |     up      |    down     |
    intervals     |     rank 0      |     rank 1      |     rank 2      |
    owners        |  0  |  0  |  0  |   1   |      1      |      2      |       only cut matrices travel

The dealing is even in work and in elements, and else leaves a matrix with the rank that has most of it: nothing but
arithmetic on numbers that every rank has, so all ranks deal alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from fullshard.core.errors import LayoutError
from fullshard.core.layout import BucketLayout, Interval

_EVEN_ENOUGH = 1.05
"""How much more than the most even dealing a rank may get, if that keeps matrices where they are."""
NEWTON_SCHULZ_STEPS = 5
PRECONDITION_FREQUENCY = 10
ROOT_FREQUENCY = 50
MAX_PRECOND_DIM = 10_000
_SLOWNESS_OF_DECOMPOSITIONS = 10
"""How much longer a decomposition takes than a matrix product of as many operations: assumed."""


class MatrixCost(Protocol):
    """What an optimizer's owner of a matrix does with it.

    Attributes:
        sent_as: dtype of what is sent to it and back, and what it computes in.
    """

    @property
    def sent_as(self) -> str:
        """See above."""

    def flops(self, rows: int, columns: int) -> int:
        """Multiplications and additions in a step, on average."""

    def kept(self, rows: int, columns: int) -> int:
        """Elements that stay with it from step to step."""

    def working(self, rows: int, columns: int) -> int:
        """Elements that it needs besides, while it computes."""


@dataclass(frozen=True, slots=True)
class NewtonSchulz:
    """Muon's iteration, which keeps nothing."""

    sent_as: str = "bfloat16"

    def flops(self, rows: int, columns: int) -> int:
        """Of all iterations."""
        short, long = sorted((rows, columns))
        return NEWTON_SCHULZ_STEPS * (4 * short * short * long + 2 * short**3)

    def kept(self, rows: int, columns: int) -> int:
        """Nothing."""
        return 0

    def working(self, rows: int, columns: int) -> int:
        """Two more of the matrix, and two of its square."""
        return 2 * (rows * columns + min(rows, columns) ** 2)


@dataclass(frozen=True, slots=True)
class Eigenbases:
    """SOAP's: two moments; for rows and for columns a factor and its eigenvectors, unless there are too many of them.

    Attributes:
        frequency: steps from one decomposition to the next.
        largest: dim that still has a factor.
    """

    frequency: int = PRECONDITION_FREQUENCY
    largest: int = MAX_PRECOND_DIM
    sent_as: str = "float32"

    def flops(self, rows: int, columns: int) -> int:
        """Three products with each basis and one for each factor; now and then a product and a decomposition."""
        dims = self._dims(rows, columns)
        often = sum(4 * 2 * dim * rows * columns for dim in dims)
        return often + sum((2 + _SLOWNESS_OF_DECOMPOSITIONS * 8 // 3) * dim**3 for dim in dims) // self.frequency

    def kept(self, rows: int, columns: int) -> int:
        """See above."""
        return 2 * rows * columns + sum(2 * dim * dim for dim in self._dims(rows, columns))

    def working(self, rows: int, columns: int) -> int:
        """Four more of the matrix; or three of a factor."""
        return max(4 * rows * columns, 3 * max(self._dims(rows, columns), default=0) ** 2)

    def _dims(self, rows: int, columns: int) -> list[int]:
        return [dim for dim in (rows, columns) if dim <= self.largest]


@dataclass(frozen=True, slots=True)
class InverseRoots(Eigenbases):
    """Shampoo's: as much is kept, a root of each factor in the place of its eigenvectors."""

    frequency: int = ROOT_FREQUENCY

    def flops(self, rows: int, columns: int) -> int:
        """A product for each factor and one with its root; now and then a decomposition and a product."""
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
    """(how many, rows, columns): the matrices that a parameter of this shape is.

    Args:
        shape: of two dims or more. Of three it is a batch of matrices, the weights of experts for example.
        flatten: one matrix, all dims but the first being columns, as a convolution is seen. One of more than three dims
            always is.

    Raises:
        LayoutError: it has fewer.
    """
    if len(shape) < 2:
        raise LayoutError(f"a tensor of shape {tuple(shape)} is no matrix")
    if len(shape) == 3 and not flatten:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], math.prod(shape[1:])


def matrices_in(bucket: int, layout: BucketLayout, index: int, *, flatten: bool) -> list[Matrix]:
    """Those of parameter `index` of the bucket of that number; none if it has no elements."""
    count, rows, columns = matrix_shape(layout.specs[index].shape, flatten=flatten)
    numel, offset = rows * columns, layout.offsets[index]
    starts = range(offset, offset + count * numel, numel) if numel else ()
    return [Matrix(bucket, Interval(start, start + numel), rows, columns) for start in starts]


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
    """Which rank owns which matrix. Make it with `deal`.

    Attributes:
        layouts: of the buckets.
        matrices: in the order of the optimizer's parameters.
        owners: for each, (position along the replicate axis, along the shard axis).
        replicate_size, shard_size: of the mesh.
        cost: of a matrix, to its owner.
    """

    layouts: tuple[BucketLayout, ...]
    matrices: tuple[Matrix, ...]
    owners: tuple[tuple[int, int], ...]
    replicate_size: int
    shard_size: int
    cost: MatrixCost = NewtonSchulz()

    @cached_property
    def _by_bucket(self) -> list[list[int]]:
        numbers: list[list[int]] = [[] for _ in self.layouts]
        for number, matrix in enumerate(self.matrices):
            numbers[matrix.bucket].append(number)
        return numbers

    def in_bucket(self, bucket: int) -> list[int]:
        """Numbers of the matrices there."""
        return self._by_bucket[bucket]

    @cached_property
    def exchanges(self) -> list[list[int]]:
        """Numbers of the buckets whose pieces travel together.

        A bucket has a few matrices, so a few owners would receive while all others wait. Several buckets have one for
        each, and cost no memory: a rank has little of each bucket. What it sends is at most half of the largest.
        """
        numbers = [number for number in range(len(self.layouts)) if self.in_bucket(number)]
        most = max((self.layouts[number].full_numel for number in numbers), default=0) // 2
        found: list[list[int]] = []
        held = most
        for number in numbers:
            shard_numel = self.layouts[number].shard_numel
            if held + shard_numel > most:
                found.append([])
                held = 0
            found[-1].append(number)
            held += shard_numel
        return found

    def pieces(self, number: int) -> list[tuple[int, MatrixPiece]]:
        """(rank of the shard group, what it has) for each part of a matrix, in the matrix's order."""
        matrix = self.matrices[number]
        shard_numel = self.layouts[matrix.bucket].shard_numel
        first, last = matrix.interval.start // shard_numel, (matrix.interval.stop - 1) // shard_numel
        ranks = ((r, self.layouts[matrix.bucket].rank_interval(r)) for r in range(first, last + 1))
        return [(r, MatrixPiece(number, matrix.interval.intersect(own))) for r, own in ranks]

    def sent(self, bucket: int, row: int, rank: int) -> list[list[MatrixPiece]]:
        """What rank `rank` has of the matrices of a bucket that are dealt to `row`, by owner in the shard group."""
        by_owner: list[list[MatrixPiece]] = [[] for _ in range(self.shard_size)]
        own = self.layouts[bucket].rank_interval(rank)
        for number in self.in_bucket(bucket):
            common = self.matrices[number].interval.intersect(own)
            if common.numel and self.owners[number][0] == row:
                by_owner[self.owners[number][1]].append(MatrixPiece(number, common))
        return by_owner

    def gathered(self, bucket: int, row: int, rank: int) -> list[list[MatrixPiece]]:
        """The pieces of the matrices of a bucket that rank `rank` of `row` owns, by the rank that has them."""
        by_source: list[list[MatrixPiece]] = [[] for _ in range(self.shard_size)]
        for number in self.in_bucket(bucket):
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
        """The most that a rank has to do over the least that the busiest must: 1 is as even as whole matrices can be.

        That is the mean, or the largest matrix where there are more ranks than matrices of that size.
        """
        work = self.work
        largest = max((self.cost.flops(m.rows, m.columns) for m in self.matrices), default=0)
        least = max(largest, sum(work) / len(work))
        return max(work) / least if least else 1.0

    @property
    def owned_numel(self) -> int:
        """Elements of the matrices of the rank that has most of them."""
        return max(self._of_ranks(lambda rows, columns: rows * columns))

    @property
    def kept_numel(self) -> list[int]:
        """Elements that each rank keeps for its matrices."""
        return self._of_ranks(self.cost.kept)

    def _of_ranks(self, amount: Callable[[int, int], int]) -> list[int]:
        amounts = [0] * (self.replicate_size * self.shard_size)
        for matrix, (row, rank) in zip(self.matrices, self.owners, strict=True):
            amounts[row * self.shard_size + rank] += amount(matrix.rows, matrix.columns)
        return amounts

    @property
    def moved_numel(self) -> int:
        """Elements that all ranks together send to owners, and as many come back."""
        moved = 0
        for matrix, (_, rank) in zip(self.matrices, self.owners, strict=True):
            own = self.layouts[matrix.bucket].rank_interval(rank)
            moved += matrix.numel - matrix.interval.intersect(own).numel
        return moved

    @property
    def busiest_numel(self) -> int:
        """Elements that arrive at the busiest rank, which the others wait for, in each exchange; and leave it again."""
        total = 0
        for buckets in self.exchanges:
            arriving: dict[tuple[int, int], int] = {}
            for number in (number for bucket in buckets for number in self.in_bucket(bucket)):
                matrix, owner = self.matrices[number], self.owners[number]
                own = self.layouts[matrix.bucket].rank_interval(owner[1])
                arriving[owner] = arriving.get(owner, 0) + matrix.numel - matrix.interval.intersect(own).numel
            total += max(arriving.values())
        return total

    def sent_numel(self, row: int, rank: int) -> tuple[int, int, int]:
        """Elements that a rank sends in a step: to owners, back from owners, and to the other rows."""
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

    The largest first, each to the rank with least so far; or, if that comes out as even within 5 %, to the rank that
    has most of its elements, for as long as it has room.

    Args:
        layouts: of the buckets, all for `shard_size` ranks.
        matrices: in those.
        replicate_size: ranks along one axis of the mesh.
        shard_size: along the other.
        cost: of a matrix, to its owner; default: Newton-Schulz iteration.
    """
    cost = cost or NewtonSchulz()
    even = _Hands(layouts, matrices, replicate_size, shard_size, cost)
    even.deal(limit=0)
    local = _Hands(layouts, matrices, replicate_size, shard_size, cost)
    local.deal(limit=even.most)
    owners = local.owners if local.most <= even.most * _EVEN_ENOUGH else even.owners
    dealt = tuple(divmod(owner, shard_size) for owner in owners)
    return Dealing(tuple(layouts), tuple(matrices), dealt, replicate_size, shard_size, cost)


class _Hands:
    """What each rank has been dealt so far.

    Attributes:
        owners: of each matrix, numbered along both axes.
        most: the largest of all ranks' loads.
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

    @property
    def most(self) -> int:
        return max(map(self._load, self._hands))

    def _load(self, hand: tuple[int, int]) -> int:
        """Of work or of elements held, whichever is the larger part of all there is; a whole number."""
        return max(hand[0] * self._total[1], hand[1] * self._total[0])

    def deal(self, *, limit: int) -> None:
        """Deal all. A rank that has most of a matrix gets it for as long as its load stays within `limit`."""
        order = sorted(range(len(self._matrices)), key=lambda n: -self._amounts[n][0])
        for number in order:
            matrix = self._matrices[number]
            near = self._nearest(matrix) if limit else range(0)
            rank = min(near, key=lambda r: self._load(self._hands[r]), default=-1)
            if rank < 0 or self._load(self._with(rank, number)) > limit:
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
        """The ranks, one along the replicate axis after the other, that have most of its elements."""
        shard_numel, interval = self._layouts[matrix.bucket].shard_numel, matrix.interval
        first, last = interval.start // shard_numel, (interval.stop - 1) // shard_numel
        if last - first > 1:
            first += 1  # it has a whole interval, and so has every one between the two ends
        elif last > first and interval.stop - last * shard_numel > last * shard_numel - interval.start:
            first = last
        return range(first, len(self._hands), self._shard_size)
