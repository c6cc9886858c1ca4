"""What a dealing of matrices sends, and how even it is, counted in another way than the engine's."""

from __future__ import annotations

from fullshard.features.matrices.exchange import gathered, sent
from fullshard.plan.dealing import Dealing


def sent_numel(dealing: Dealing, row: int, rank: int) -> tuple[int, int, int]:
    """Return the elements that a rank sends in a step: to owners, back from owners, and to the other rows."""
    there = back = across = 0
    for bucket in range(len(dealing.layouts)):
        own, held = (function(dealing, bucket, row, rank) for function in (sent, gathered))
        there += sum(p.interval.numel for to, pieces in enumerate(own) for p in pieces if to != rank)
        across += (dealing.replicate_size - 1) * sum(p.interval.numel for pieces in own for p in pieces)
        back += sum(p.interval.numel for to, pieces in enumerate(held) for p in pieces if to != rank)
    return there, back, across


def balance(dealing: Dealing) -> float:
    """Return most work of a rank over the least that the busiest must do: the mean, or the largest matrix."""
    work = dealing.work()
    return max(work) / max(sum(work) / len(work), max(matrix.flops for matrix in dealing.matrices))
