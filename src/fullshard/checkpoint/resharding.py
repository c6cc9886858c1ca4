"""Map the pieces a checkpoint was saved in to the interval a rank wants. Pure arithmetic, no torch.

saved    |--- piece 0 ---|--------- piece 1 ---------|-- piece 2 --|
wanted            [start .......................... stop)
reads             |------|---------------------------|--|
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.checkpoint.format import PieceRecord
from fullshard.core.layout import Interval


@dataclass(frozen=True, slots=True)
class Read:
    """One contiguous copy.

    Attributes:
        piece: what to read of, in the file of its rank.
        source: elements, counted from the start of the piece in that file.
        target: elements, counted from the start of the wanted interval.
    """

    piece: PieceRecord
    source: Interval
    target: Interval


def plan_reads(pieces: Sequence[PieceRecord], wanted: Interval) -> list[Read]:
    """Return the reads that fill `wanted`, in order.

    Args:
        pieces: sorted by start and free of `coverage_problems`.
        wanted: elements of the flattened tensor; empty gives no reads.

    Returns:
        Reads whose targets follow each other without gap from 0 to `wanted.numel`.
    """
    if wanted.numel == 0:
        return []
    first = max(0, bisect_right(pieces, wanted.start, key=lambda piece: piece.start) - 1)
    reads = []
    for piece in pieces[first:]:
        if piece.start >= wanted.stop:
            break
        common = wanted.intersect(piece.interval)
        if common.numel:
            reads.append(Read(piece, common.shift(-piece.start), common.shift(-wanted.start)))
    return reads


def coverage_problems(pieces: Sequence[PieceRecord], numel: int) -> list[str]:
    """Return the reasons why `pieces`, sorted by start, are not each of `numel` elements exactly once."""
    problems = []
    end, last = 0, -1
    for piece in pieces:
        start, stop = piece.start, piece.stop
        if start < 0 or stop > numel or start >= stop:
            problems.append(f"rank {piece.rank} holds elements [{start}, {stop}) of {numel}")
        if start > end:
            problems.append(f"elements [{end}, {start}) are in no file")
        elif start < end and last >= 0:
            problems.append(f"elements [{start}, {min(stop, end)}) are held by rank {last} and by rank {piece.rank}")
        if stop > end:
            end, last = stop, piece.rank
    if end < numel:
        problems.append(f"elements [{end}, {numel}) are in no file")
    return problems
