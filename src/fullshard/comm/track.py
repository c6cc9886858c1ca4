"""Each rank's progress through a model, a number at a time, kept where ranks that wait for it find it.

All ranks must note the same numbers. A rank that has waited for a while looks at what the others have noted: it finds
at once, and not by a time-out, a rank that will never come. Ranks of a host see one another's pages
(`comm.cpu.peers`). To all other ranks, a rank tells its notes in the job's store while it waits (`comm.stalls`).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

MAX_TRACKS = 256
"""The number of models that have a track in shared memory, of all that ever use the same collectives."""
PAGE_NBYTES = mmap.PAGESIZE
_KEPT = PAGE_NBYTES // 8 - 1


class OutOfStep(RuntimeError):
    """A rank has come to something else than this one."""


class Track:
    """One model's track.

    Args:
        memory: a page of zeros for each rank of the host, which holds how many numbers it has noted, and the last ones.
            None: the ranks see no pages of one another.
        rank: this one's position on the host.
        first_rank: position in the group of the host's first.

    Attributes:
        rank_at: which rank of the job has a position in the group.
        words: the message for when this rank has come to one number, and another rank of the job to the second.
        name: in the job's store; the same on every rank, and different from every other track's.
        next_rank: the rank whose track, as told in the store, is compared with this one.
    """

    rank_at: Callable[[int], int]
    words: Callable[[int, int, int], str]
    name: str
    next_rank: int

    def __init__(self, memory: mmap.mmap | None = None, rank: int = 0, first_rank: int = 0) -> None:
        numbers = np.zeros(_KEPT + 1, np.int64) if memory is None else np.frombuffer(memory, np.int64)
        self._pages: npt.NDArray[np.int64] = numbers.reshape(-1, _KEPT + 1)
        self._own, self._rank, self._first_rank = self._pages[rank], rank, first_rank
        self._written = memoryview(self._own)  # the same memory; a single number is written to it in less time
        self._count, self._is_out_of_step = 0, False

    def note(self, number: int) -> None:
        """Note that this rank has come to `number`."""
        if self._count < 0:
            return
        own, count = self._written, self._count
        own[1 + count % _KEPT] = number
        self._count = own[0] = count + 1  # last: a rank that sees the count sees the number

    def end(self) -> None:
        """End the track: this rank had an error on its way, so from here on its numbers mean nothing."""
        self._count = -1
        if not self._is_out_of_step:  # the other must find that, too, or would wait for this rank until its time-out
            self._own[0] = -1

    def compare(self) -> None:
        """Compare the notes of the host's ranks.

        Raises:
            OutOfStep: Another rank has come to something else.
        """
        for rank, other in enumerate(self._pages):
            if rank != self._rank and (found := self._difference(int(other[0]), other)) is not None:
                self._is_out_of_step = True
                raise OutOfStep(self.words(*found, self.rank_at(self._first_rank + rank)))

    def told(self) -> tuple[int, list[int]]:
        """Return, for others to read, how many numbers this rank has noted, and the written part of its page."""
        return self._count, self._own[: 1 + min(max(self._count, 0), _KEPT)].tolist()

    def difference(self, count: int, page: Sequence[int]) -> str:
        """Return in words how the next rank's notes differ; empty if they do not."""
        found = self._difference(count, np.array(page))
        return "" if found is None else self.words(*found, self.next_rank)

    def _difference(self, theirs: int, other: npt.NDArray[np.int64]) -> tuple[int, int] | None:
        """Return the first number that differs and the other rank's, of those that both still have."""
        mine = self._count
        first = max(mine, theirs, _KEPT - 1) + 1 - _KEPT  # one before may be written over just now
        places = 1 + np.arange(first, min(mine, theirs)) % _KEPT
        different = places[self._own[places] != other[places]]
        return (int(self._own[different[0]]), int(other[different[0]])) if len(different) else None
