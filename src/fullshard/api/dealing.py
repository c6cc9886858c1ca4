"""Division of one order of items (indices, batches or samples) among the ranks.

The order is cut into *rounds*, one per step. Rank r takes the r-th share of each round:

    order           0 1 2 3 | 4 5 6 7 | 8 9 . .       world size 2, 2 items per rank
    rank 0          0 1     | 4 5     | 8 9
    rank 1              2 3 |     6 7 |     0 1       <- filled up from the start, unless batches are uneven
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Real:
    """The real part of a step: everything except the samples that are repeated to fill it up."""

    samples: int  # the number of real samples, which come first
    dealt: int | None  # the number of samples on all ranks, including repetitions, or None if it is unknown
    batches: int | None = None  # the number of real batches, if complete batches are dealt

    def rows(self, gathered: int, ranks: int) -> int:
        """Return how many of the `gathered` rows of a tensor are real: of samples, or of whole batches."""
        if self.batches is None or gathered == self.dealt:
            return self.samples
        return gathered // ranks * self.batches


@dataclass(slots=True)
class Deal:
    """The rule that divides the items of each round among the ranks."""

    rank: int
    world_size: int
    per_rank: int  # number of items that each rank gets in a round
    drop_last: bool  # drop an incomplete last round instead of filling it up
    # Fill up an incomplete last round, so that all ranks have the same number of shares of the same size. Scripts can
    # change this at any time.
    even: bool = True
    for_all: bool = False  # yield the shares of all ranks in rank order, instead of only this rank's share

    @property
    def round_size(self) -> int:
        """Return the number of items in a round over all ranks."""
        return self.per_rank * self.world_size

    def rounds(self, count: int) -> int:
        """Return how many shares of `count` items this rank gets. With `even`, it is the same number on every rank."""
        whole, rest = divmod(count, self.round_size)
        if self.drop_last or rest == 0:
            return whole
        return whole + (self.even or rest > self.rank * self.per_rank)

    def is_uneven(self, count: int) -> bool:
        """Return whether some ranks get more shares than others when `count` items are dealt."""
        rest = count % self.round_size
        return not self.even and not self.drop_last and 0 < rest <= self.round_size - self.per_rank

    def shares_of(self, items_of_all: list[T]) -> Iterator[list[T]]:
        """Yield this rank's share of one round unless it is empty. With `for_all`, yield the shares of all ranks."""
        for rank in range(self.world_size) if self.for_all else (self.rank,):
            if share := items_of_all[rank * self.per_rank : (rank + 1) * self.per_rank]:
                yield share

    def dealt(self, items: Iterable[T], *, skip: int = 0) -> Iterator[tuple[list[T], int]]:
        """Yield the items of each round for all ranks, and the number of these items that are not repetitions."""
        rest = iter(items)
        first = list(itertools.islice(rest, self.round_size))
        rest = itertools.islice(itertools.chain(first, rest), skip, None)  # skips faster than a Python loop
        current: list[T] = []
        for item in rest:
            current.append(item)
            if len(current) == self.round_size:
                yield current, self.round_size
                current = []
        if current and not self.drop_last:
            real = len(current)
            if self.world_size > 1 and self.even:  # a single rank needs no equal number of batches
                current += itertools.islice(itertools.cycle(first), self.round_size - real)
            yield current, real
