"""Sums on a CPU of the contributions of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm.base import Watch
from fullshard.core.sizes import SUM_BLOCK_NBYTES, sum_blocks


@torch.no_grad()
def average(
    terms: Sequence[torch.Tensor],
    into: torch.Tensor,
    divisor: float,
    watch: Watch | None = None,
    *,
    first_rank: int = 0,
) -> torch.Tensor:
    """Return the sum of `terms` over `divisor`; in the dtype of `into`, which may be one of them.

    A balanced binary tree adds them up in their order: the terms of 8 ranks are added as two times 4 would be.

    Args:
        terms: at least two; those of ranks `first_rank`, `first_rank` + 1 and so on.
        into: shape (n,), as each term; returned.
        divisor: see above.
        watch: see `Reduction`.
        first_rank: see there.
    """
    length = SUM_BLOCK_NBYTES // into.itemsize
    number = sum_blocks(len(terms), is_cast=any(term.dtype != into.dtype for term in terms))
    rooms = [into.new_empty(min(length, into.numel())) for _ in range(number)]
    for start in range(0, into.numel(), length):
        block = into[start : start + length]
        parts = [term[start : start + length] for term in terms]
        total = _sum(parts, [room[: block.numel()] for room in rooms] or [block])
        if divisor != 1:
            total.div_(divisor)
        if watch is not None:
            watch(total, dict(enumerate(parts, start=first_rank)))
        if rooms:  # apart, for `into` may be a term that is still to be read
            block.copy_(total)
    return into


def _sum(terms: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of `terms`, in the first of `rooms` (one for every level); a single term as it is."""
    if len(terms) == 1:
        return terms[0] if terms[0].dtype == rooms[-1].dtype else rooms[0].copy_(terms[0])
    half = 1 << (len(terms) - 1).bit_length() - 1
    return torch.add(_sum(terms[:half], rooms), _sum(terms[half:], rooms[1:] or rooms), out=rooms[0])
