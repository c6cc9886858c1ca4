"""How one order of samples is dealt to the ranks. Plain arithmetic on any items: indices, batches or samples.

The order is cut into *rounds*, one per step. Rank r takes the r-th share of each round, so the shares of all ranks, in
rank order, are the round:

    order           0 1 2 3 | 4 5 6 7 | 8 9 . .       world size 2, 2 items per rank
    rank 0          0 1     | 4 5     | 8 9
    rank 1              2 3 |     6 7 |     0 1       <- the last round is filled up from the start of the order
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deal:
    """Which items of each round belong to this rank.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        per_rank: items of a round per rank.
        drop_last: leave out an incomplete last round instead of filling it up.
    """

    rank: int
    world_size: int
    per_rank: int
    drop_last: bool

    @property
    def round_size(self) -> int:
        """Items of a round over all ranks."""
        return self.per_rank * self.world_size

    def rounds(self, count: int) -> int:
        """Number of rounds in an order of `count` items; the same on every rank."""
        return count // self.round_size if self.drop_last else -(-count // self.round_size)

    def shares(self, items: Iterable[T], *, skip: int = 0) -> Iterator[tuple[list[T], int]]:
        """This rank's share of each round, and how many items of the round (of all ranks) are not repetitions.

        Args:
            items: the order, the same on every rank.
            skip: items at the start that were used already.
        """
        start = slice(self.rank * self.per_rank, (self.rank + 1) * self.per_rank)
        rest = iter(items)
        first = list(itertools.islice(rest, self.round_size))
        rest = itertools.islice(itertools.chain(first, rest), skip, None)  # skips without a step of Python for each
        current: list[T] = []
        for item in rest:
            current.append(item)
            if len(current) == self.round_size:
                yield current[start], self.round_size
                current = []
        if current and not self.drop_last:
            real = len(current)
            if self.world_size > 1:  # one rank alone has nobody to keep in step with
                current += itertools.islice(itertools.cycle(first), self.round_size - real)
            yield current[start], real
