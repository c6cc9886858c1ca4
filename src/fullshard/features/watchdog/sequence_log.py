"""The log of what a rank has waited for in a model, as numbers that must be the same on all ranks.

A rank that has waited for a while tells its log in the job's store, and compares it with that of the next rank
(`watchdog`). So two ranks that went different ways find each other, long before their time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_KEPT = 512


class SequenceLog:
    """One model's log on this rank, of which the last numbers are kept.

    Args:
        words: makes the message for when this rank has come to one number, and another rank of the job to the second.

    Attributes:
        name: in the job's store; the same on every rank, and different from every other log's.
        next_rank: the rank whose log is compared with this one.
    """

    name: str
    next_rank: int

    def __init__(self, words: Callable[[int, int, int], str]) -> None:
        self._words, self._numbers, self._count = words, [0] * _KEPT, 0

    def note(self, number: int) -> None:
        """Note that this rank has come to `number`."""
        if self._count >= 0:
            self._numbers[self._count % _KEPT] = number
            self._count += 1  # last: another thread that sees the count sees the number

    def end(self) -> None:
        """End the log: this rank had an error on its way, so from here on its numbers mean nothing."""
        self._count = -1

    def told(self) -> tuple[int, list[int]]:
        """Return, for others to read, how many numbers this rank has noted, and the last ones."""
        while True:
            count, numbers = self._count, self._numbers[: min(max(self._count, 0), _KEPT)]
            if count == self._count:
                return count, numbers

    def difference(self, count: int, numbers: Sequence[int]) -> str:
        """Return in words how the log that the next rank has told differs; empty if it does not."""
        mine = self._count
        first = max(mine, count, _KEPT - 1) + 1 - _KEPT  # one before may be written over just now
        for place in (position % _KEPT for position in range(first, min(mine, count))):
            if self._numbers[place] != numbers[place]:
                return self._words(self._numbers[place], numbers[place], self.next_rank)
        return ""
