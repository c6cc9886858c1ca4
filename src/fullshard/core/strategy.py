"""The table of sharding strategies.

A strategy has placements of parameters, gradients, and optimizer state on each mesh axis, and specifies whether
unsharded parameters are freed after forward. Together with the axis sizes, this determines all collectives. A
collective runs if its axis has more than one rank, so no other code depends on the name of a strategy.

    gather  (shard axis)      sharded -> unsharded parameters      all-gather
    reduce  (shard axis)      partial -> sharded gradients         reduce-scatter
    reduce  (replicate axis)  partial -> replicated gradients      all-reduce
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fullshard.core.errors import ConfigError, plural


class Placement(StrEnum):
    """The placement of a tensor along one mesh axis."""

    SHARD = "S"
    """each rank of the axis holds its interval"""
    REPLICATE = "R"
    """each rank of the axis holds the complete tensor"""


class Axis(StrEnum):
    """The axes of the data-parallel device mesh, from the outermost to the innermost."""

    REPLICATE = "replicate"
    SHARD = "shard"


Placements = Mapping[Axis, Placement]
"""A placement for each axis of the mesh that may have more than one rank."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A row of the strategy table."""

    name: str  # the name that users write, such as `FULL_SHARD`
    code: int | None  # the strategy's number in Accelerate, or None if Accelerate does not have this strategy
    # The placements, all on the same axes. All sharded tensors are divided into the same intervals.
    parameters: Placements = field(hash=False)
    gradients: Placements = field(hash=False)
    optimizer_state: Placements = field(hash=False)
    reshards_after_forward: bool  # whether unsharded parameters are freed between forward and backward

    @property
    def placements(self) -> tuple[Placements, Placements, Placements]:
        """Return the placements of parameters, gradients, and optimizer state."""
        return self.parameters, self.gradients, self.optimizer_state

    @property
    def shards(self) -> bool:
        """Return whether any tensor is sharded."""
        return Axis.SHARD in self.optimizer_state

    @property
    def is_hybrid(self) -> bool:
        """Return whether the strategy replicates shard groups, so that it needs a shard size."""
        return len(self.optimizer_state) == len(Axis)

    @property
    def keeps_parameters(self) -> bool:
        """Return whether every rank holds unsharded parameters from their gather until the next optimizer step."""
        return self.parameters.get(Axis.SHARD) is Placement.REPLICATE

    @property
    def keeps_gradients(self) -> bool:
        """Return whether every rank accumulates unsharded gradients and reduces them only in the last micro-batch."""
        return self.gradients.get(Axis.SHARD) is Placement.REPLICATE

    def with_reshard(self, after_forward: bool) -> Strategy | None:
        """Return the row with the same placements and the given behavior after forward, or None if there is none."""
        rows = (row for row in STRATEGIES.values() if row.placements == self.placements)
        return next((row for row in rows if row.reshards_after_forward == after_forward), None)

    def with_axes(self, *axes: Axis) -> Strategy:
        """Return a row with these axes, preferably one with the same behavior after forward."""
        rows = [row for row in STRATEGIES.values() if set(row.optimizer_state) == set(axes)]
        return next((row for row in rows if row.reshards_after_forward == self.reshards_after_forward), rows[0])

    def shard_size_on(self, ranks_per_host: int, shard_size: int | None) -> int | None:
        """Return `shard_size`, or the number of ranks per host if it is None and the strategy is hybrid."""
        return ranks_per_host if self.is_hybrid and shard_size is None else shard_size

    def mesh_shape(self, world_size: int, shard_size: int | None) -> tuple[int, int]:
        """Return the mesh shape `(replicate size, shard size)` of `world_size` ranks.

        Raise `ConfigError` if the shard size, which hybrid strategies require, is missing or does not fit.
        """
        if not self.shards:
            expected = 1
        elif not self.is_hybrid:
            expected = world_size
        elif shard_size is None:
            raise ConfigError(
                f"{self.name} requires the number of ranks per shard group (world size {world_size})",
                hint="set shard_size, usually to the number of devices per host",
            )
        else:
            expected = shard_size
        if shard_size not in (None, expected):
            raise ConfigError(
                f"{self.name} has a shard group of {plural(expected, 'rank')} at world size {world_size}, got "
                f"shard_size = {shard_size}",
                hint="remove shard_size, or use HYBRID_SHARD",
            )
        return replicas(world_size, expected), expected

    def matches(
        self,
        replicate_size: int,
        shard_size: int,
        *,
        reshards_after_forward: bool,
        keeps_parameters: bool = False,
        keeps_gradients: bool = False,
    ) -> bool:
        """Return whether the row fits a mesh of this shape and the given behavior after forward and between steps."""
        axes = {axis for axis, size in ((Axis.REPLICATE, replicate_size), (Axis.SHARD, shard_size)) if size > 1}
        requested = (reshards_after_forward, keeps_parameters, keeps_gradients)
        own = (self.reshards_after_forward, self.keeps_parameters, self.keeps_gradients)
        return self.optimizer_state.keys() == axes and own == (requested if Axis.SHARD in axes else (False,) * 3)


_S: Placements = {Axis.SHARD: Placement.SHARD}
_UNSHARDED: Placements = {Axis.SHARD: Placement.REPLICATE}
_R: Placements = {Axis.REPLICATE: Placement.REPLICATE}
_RS: Placements = {Axis.REPLICATE: Placement.REPLICATE, Axis.SHARD: Placement.SHARD}

STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        #         name                     parameters, gradients, optimizer state
        Strategy("FULL_SHARD", 1, _S, _S, _S, reshards_after_forward=True),
        Strategy("SHARD_GRAD_OP", 2, _S, _S, _S, reshards_after_forward=False),
        Strategy("NO_SHARD", 3, _R, _R, _R, reshards_after_forward=False),
        Strategy("HYBRID_SHARD", 4, _RS, _RS, _RS, reshards_after_forward=True),
        Strategy("HYBRID_SHARD_ZERO2", 5, _RS, _RS, _RS, reshards_after_forward=False),
        Strategy("SHARD_GRAD_OPTIMIZER", None, _UNSHARDED, _S, _S, reshards_after_forward=False),
        Strategy("SHARD_OPTIMIZER", None, _UNSHARDED, _UNSHARDED, _S, reshards_after_forward=False),
    )
}


def replicas(world_size: int, shard_size: int) -> int:
    """Return the number of shard groups. Raise `ConfigError` if `shard_size` does not divide the world size."""
    if shard_size < 1 or world_size % shard_size:
        divisors = ", ".join(str(d) for d in range(1, world_size + 1) if world_size % d == 0)
        raise ConfigError(
            f"shard_size = {shard_size} does not divide world size {world_size}", hint=f"use one of {divisors}"
        )
    return world_size // shard_size


_ALIASES = {"_HYBRID_SHARD_ZERO2": "HYBRID_SHARD_ZERO2"}


def parse_strategy(value: object) -> Strategy:
    """Return the strategy with a name (any case, `-`, `_`, or a space) or code (1 to 5), or a `Strategy` unchanged."""
    if isinstance(value, Strategy):
        return value
    key = str(value).strip().upper().replace("-", "_").replace(" ", "_")
    key = _ALIASES.get(key, key)
    for row in STRATEGIES.values():
        if key in (row.name, str(row.code)):
            return row
    names = ", ".join(row.name if row.code is None else f"{row.name} ({row.code})" for row in STRATEGIES.values())
    stages = "; ZeRO's stage 3 is FULL_SHARD, 2 SHARD_GRAD_OPTIMIZER, 1 SHARD_OPTIMIZER" if "ZERO" in key else ""
    raise ConfigError(f"unknown sharding strategy {value!r}", hint=f"use one of {names}{stages}")
