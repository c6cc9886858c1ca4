"""Sums that a CPU makes of what several ranks have given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm.base import Watch

_BLOCK_NBYTES = 256 * 1024
"""Of a sum that is made in one go: short enough that it is still in the cache when it is divided and looked at."""


@torch.no_grad()
def average(
    terms: Sequence[torch.Tensor],
    into: torch.Tensor,
    divisor: float,
    watch: Watch | None = None,
    *,
    first_rank: int = 0,
) -> torch.Tensor:
    """The sum of `terms`, added up in their order, over `divisor`; in the dtype of `into`, which may be one of them.

    Args:
        terms: at least two; those of ranks `first_rank`, `first_rank` + 1 and so on.
        into: shape (n,), as each term; returned.
        divisor: see above.
        watch: see `Reduction`.
        first_rank: see there.
    """
    length = _BLOCK_NBYTES // into.itemsize
    is_cast = any(term.dtype != into.dtype for term in terms)
    is_apart = is_cast or len(terms) > 2  # `into` may be a term that is still to be read
    room, cast = (into.new_empty(min(length, into.numel()) if wanted else 0) for wanted in (is_apart, is_cast))
    for start in range(0, into.numel(), length):
        block = into[start : start + length]
        parts = [term[start : start + length] for term in terms]
        first, second, *others = parts
        total = room[: block.numel()] if is_apart else block
        if is_cast:
            total.copy_(first)
            others = [second, *others]
        else:
            torch.add(first, second, out=total)
        for other in others:
            total.add_(other if other.dtype == into.dtype else cast[: other.numel()].copy_(other))
        if divisor != 1:
            total.div_(divisor)
        if watch is not None:
            watch(total, dict(enumerate(parts, start=first_rank)))
        if is_apart:
            block.copy_(total)
    return into
