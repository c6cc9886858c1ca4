"""What each rank of a host has come to, a number at a time, where its neighbours see it.

All ranks must write the same numbers. One that has waited for a while looks at what the others have written: a rank
that will never come is found at once, and not by a time-out.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from fullshard.comm.host_pages import OutOfStep

MAX_TRACKS = 256
"""Models that have one, of all that ever use these collectives."""
PAGE_NBYTES = mmap.PAGESIZE
_KEPT = PAGE_NBYTES // 8 - 1


class SharedTrack:
    """Of one model.

    Args:
        memory: a page for each rank of the host, which is zero: how many numbers it has written, and the last ones.
        rank: this one's position on the host.
        first_rank: position in the group of the host's first.
    """

    def __init__(self, memory: mmap.mmap, rank: int, first_rank: int) -> None:
        self._pages: npt.NDArray[np.int64] = np.frombuffer(memory, dtype=np.int64).reshape(-1, _KEPT + 1)
        self._own, self._rank, self._first_rank = self._pages[rank], rank, first_rank
        self._count, self._is_out_of_step = 0, False

    def note(self, number: int) -> None:
        """This rank has come to it."""
        if self._count < 0:
            return
        own, count = self._own, self._count
        own[1 + count % _KEPT] = number
        self._count = own[0] = count + 1  # last: who sees the count sees the number

    def end(self) -> None:
        """This rank had an error on its way, so that from here on its numbers mean nothing."""
        self._count = -1
        if not self._is_out_of_step:  # the other must find that, too, or would wait for this rank until its time-out
            self._own[0] = -1

    def compare(self) -> None:
        """Compare what all have written.

        Raises:
            OutOfStep: another rank has come to something else than this one.
        """
        count = self._count
        for rank, other in enumerate(self._pages):
            theirs = int(other[0])
            first = max(count, theirs) + 1 - _KEPT  # one before may be written over just now
            if rank == self._rank or min(count, theirs) <= max(first, 0):
                continue
            places = 1 + np.arange(max(first, 0), min(count, theirs)) % _KEPT
            different = places[self._own[places] != other[places]]
            if len(different):
                here, there = int(self._own[different[0]]), int(other[different[0]])
                self._is_out_of_step = True
                raise OutOfStep(self._first_rank + rank, here, there)
