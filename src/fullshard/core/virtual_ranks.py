"""Virtual ranks fix what is computed and the order of sums, at any number of real ranks. No torch.

A step's global batch is V equal *slices*, one for each virtual rank. W real ranks run them in V / W *rounds*, rank r
slice j * W + r in round j. What the slices give is added up in one binary tree, of which each round is a subtree:

    V = 8       W = 4, 2 rounds         W = 2, 4 rounds         W = 1, 8 rounds
    s0 s1 ...   (s0+s1)+(s2+s3)  |      s0+s1                   s0
                (s4+s5)+(s6+s7)  v      s2+s3 ...               s1 ...

The lower levels are the sum over the ranks, the upper ones that over the rounds, so the additions are the same ones at
1, 2, 4 and 8 ranks. Why this and not something else: `docs/decisions/0026-virtual-ranks.md`.
"""

from __future__ import annotations

from fullshard.core.errors import ConfigError

BLOCK_NUMEL = 1024
"""Elements of a parameter that no world size cuts apart: their squares are added up on one rank, in one order."""

MOST = BLOCK_NUMEL
"""Virtual ranks: a rank's interval is whole blocks, and falls into as many equal parts as there are ranks."""


def check_virtual_ranks(count: int) -> None:
    """Raise `ConfigError` unless that many virtual ranks are possible."""
    if not (1 <= count <= MOST and count.bit_count() == 1):
        raise ConfigError(
            f"virtual_ranks = {count}: expected a power of two up to {MOST}",
            hint="8 trains alike on 1, 2, 4 and 8 ranks",
        )


def rounds_of(virtual_ranks: int, world_size: int) -> int:
    """Return the rounds in which `world_size` ranks run the slices of a step.

    Raises:
        ConfigError: they cannot.
    """
    check_virtual_ranks(virtual_ranks)
    if virtual_ranks % world_size:
        fitting = ", ".join(str(2**power) for power in range(virtual_ranks.bit_length()))
        raise ConfigError(
            f"{virtual_ranks} virtual ranks on {world_size} ranks: the slices of a step do not divide into rounds",
            hint=f"start {fitting} ranks",
        )
    return virtual_ranks // world_size
