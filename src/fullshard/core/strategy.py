"""Sharding strategies as rows of data.

A strategy is a placement per mesh axis and whether the unsharded parameters are dropped after forward. Everything at
run time follows from the sizes of the two mesh axes: collectives run on an axis of size > 1 and are nothing on an
axis of size 1, so no code below the configuration compares a strategy's name.

    gather  (shard axis)      sharded -> unsharded parameters      all-gather
    reduce  (shard axis)      partial -> sharded gradients         reduce-scatter
    reduce  (replicate axis)  partial -> replicated gradients      all-reduce
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fullshard.core.errors import ConfigError


class Placement(StrEnum):
    """Where a tensor lives along one mesh axis."""

    SHARD = "S"
    """each rank of the axis holds its interval"""
    REPLICATE = "R"
    """each rank of the axis holds all of it"""


class Axis(StrEnum):
    """The two axes of the device mesh, outer first."""

    REPLICATE = "replicate"
    SHARD = "shard"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One row of the strategy table.

    Attributes:
        name: the name users write, for example `FULL_SHARD`.
        code: the number Accelerate gives it.
        placements: one placement per mesh axis that has more than one rank, for parameters, gradients and optimizer
            state alike (they share the interval layout).
        reshard_after_forward: whether unsharded parameters are dropped between forward and backward.
        zero: the usual name in the literature.
    """

    name: str
    code: int
    placements: dict[Axis, Placement]
    reshard_after_forward: bool
    zero: str

    def mesh_shape(self, world_size: int, shard_size: int | None) -> tuple[int, int]:
        """`(replicate size, shard size)` of the mesh, whose product is `world_size`.

        Args:
            world_size: number of ranks.
            shard_size: ranks per shard group; only for strategies with both axes, where it is required.

        Raises:
            ConfigError: the size is missing, given where there is no choice, or does not divide the world size.
        """
        if Axis.SHARD not in self.placements:
            expected = 1
        elif Axis.REPLICATE not in self.placements:
            expected = world_size
        elif shard_size is None:
            raise ConfigError(
                f"{self.name} needs the number of ranks per shard group (got none, world size {world_size})",
                hint="set shard_size, usually to the number of devices in one host",
            )
        else:
            expected = shard_size
        if shard_size not in (None, expected):
            raise ConfigError(
                f"{self.name} has a shard group of {expected} ranks at world size {world_size}, "
                f"got shard_size = {shard_size}",
                hint="leave shard_size out, or use HYBRID_SHARD",
            )
        if expected < 1 or world_size % expected:
            divisors = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
            raise ConfigError(
                f"shard_size = {expected} does not divide world size {world_size}", hint=f"use one of {divisors}"
            )
        return world_size // expected, expected

    def is_that_of(self, replicate_size: int, shard_size: int, *, reshards_after_forward: bool) -> bool:
        """Whether a mesh of this shape, with this done after forward, is this row."""
        axes = {axis for axis, size in ((Axis.REPLICATE, replicate_size), (Axis.SHARD, shard_size)) if size > 1}
        frees = reshards_after_forward and Axis.SHARD in axes
        return self.placements.keys() == axes and self.reshard_after_forward == frees


_SHARD = {Axis.SHARD: Placement.SHARD}
_REPLICATE = {Axis.REPLICATE: Placement.REPLICATE}

STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy("FULL_SHARD", 1, _SHARD, True, "ZeRO-3"),
        Strategy("SHARD_GRAD_OP", 2, _SHARD, False, "ZeRO-2"),
        Strategy("NO_SHARD", 3, _REPLICATE, False, "DDP"),
        Strategy("HYBRID_SHARD", 4, _REPLICATE | _SHARD, True, "ZeRO++ hpz"),
        Strategy("HYBRID_SHARD_ZERO2", 5, _REPLICATE | _SHARD, False, "ZeRO-2 in a group"),
    )
}
_ALIASES = {"_HYBRID_SHARD_ZERO2": "HYBRID_SHARD_ZERO2"}


def parse_strategy(value: str | int | Strategy) -> Strategy:
    """The row for a name (any case, `-` or `_` or space), a code (1 to 5, also as text), or a row itself.

    Raises:
        ConfigError: no such strategy; the message lists all.
    """
    if isinstance(value, Strategy):
        return value
    key = str(value).strip().upper().replace("-", "_").replace(" ", "_")
    key = _ALIASES.get(key, key)
    for row in STRATEGIES.values():
        if key in (row.name, str(row.code)):
            return row
    names = ", ".join(f"{row.name} ({row.code})" for row in STRATEGIES.values())
    raise ConfigError(f"unknown sharding strategy {value!r}", hint=f"use one of {names}")
