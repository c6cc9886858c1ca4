"""Compute how units are divided into buckets and shards, exactly as the engine does but without tensors."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Self

from fullshard.core.bucket import BucketKey
from fullshard.core.dtypes import Dtypes
from fullshard.core.offload import Offload
from fullshard.core.strategy import Strategy
from fullshard.plan.buckets import CountedBucket
from fullshard.plan.shapes import Block, ModelShape, ParameterShape


@dataclass(frozen=True)
class UnitLayout:
    """The buckets of one unit, and the properties that determine when its memory is allocated and freed."""

    name: str  # the module's qualified name, which is empty for the root
    buckets: tuple[CountedBucket, ...]
    reshards_after_forward: bool  # whether the unit's unsharded parameters are freed between forward and backward
    feeds_units: bool  # whether a trainable parameter of the unit (an embedding) is used before the first inner unit
    takes_ids: bool  # whether the unit's inputs are token ids, which never need a gradient
    block: Block | None
    is_head: bool = False
    page_nbytes: int = 0  # bytes of the unit's saved tensors that are in host memory until its backward

    @cached_property
    def full_nbytes(self) -> int:
        """Bytes of the unsharded unit."""
        return sum(bucket.full_nbytes for bucket in self.buckets)

    @cached_property
    def gathered_nbytes(self) -> int:
        """The number of bytes that are allocated when the unit is unsharded."""
        return sum(bucket.full_nbytes for bucket in self.buckets if not bucket.shares_main)

    @cached_property
    def coded(self) -> tuple[CountedBucket, ...]:
        """Return the buckets that are stored and sent as codes."""
        return tuple(bucket for bucket in self.buckets if bucket.form is not None)

    @cached_property
    def decoded_nbytes(self) -> int:
        """The size of the unit's coded weights after they are decoded, in bytes."""
        return sum(bucket.full_nbytes for bucket in self.coded)

    @cached_property
    def coded_nbytes(self) -> int:
        """The size of the unit's codes from all ranks in bytes. They are in memory until they have been decoded."""
        return sum(bucket.coded_nbytes for bucket in self.coded)

    @cached_property
    def gathers(self) -> tuple[tuple[int, int], ...]:
        """Return (number of ranks, bytes that a rank sends to each other rank) for each group that unshards a part."""
        groups: dict[int, int] = {}
        for bucket in self.buckets:
            ranks = bucket.layout.world_size
            groups[ranks] = groups.get(ranks, 0) + bucket.gather_message_nbytes
        return tuple(groups.items())

    @cached_property
    def trainable(self) -> tuple[CountedBucket, ...]:
        """Return the buckets that have gradients."""
        return tuple(bucket for bucket in self.buckets if bucket.trainable)


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The layout of a complete model."""

    units: tuple[UnitLayout, ...]  # inner units in definition order, with the root last
    calls: tuple[UnitLayout, ...]  # the same units in the order in which their forwards begin, with the root first
    shard_size: int
    replicate_size: int
    returns_head: bool = False  # whether the head is a unit whose output the root returns; backward reaches it first
    keeps_parameters: bool = False  # whether parameters stay unsharded until the optimizer's step
    keeps_gradients: bool = False  # whether gradients are only reduced with the last micro-batch of a step

    def keeping(self, count: int) -> Self:
        """Return a copy in which the last `count` of the units that are freed after forward stay unsharded."""
        inner = [unit.name for unit in self.calls if unit.reshards_after_forward]
        kept = set(inner[len(inner) - count :])
        return self._with(
            dataclasses.replace(unit, reshards_after_forward=False) if unit.name in kept else unit
            for unit in self.units
        )

    def with_pages(self, nbytes: Callable[[Block], int]) -> Self:
        """Return a copy in which `nbytes(block)` bytes of each unit's activations stay on the host until backward."""
        return self._with(
            unit if unit.block is None else dataclasses.replace(unit, page_nbytes=nbytes(unit.block))
            for unit in self.units
        )

    def _with(self, units: Iterable[UnitLayout]) -> Self:
        by_name = {unit.name: unit for unit in units}
        return dataclasses.replace(
            self, units=tuple(by_name.values()), calls=tuple(by_name[unit.name] for unit in self.calls)
        )

    @property
    def root(self) -> UnitLayout:
        """The outermost unit."""
        return self.units[-1]

    @property
    def buckets(self) -> list[CountedBucket]:
        """The buckets of all units."""
        return [bucket for unit in self.units for bucket in unit.buckets]


@lru_cache(maxsize=256)  # jobs that differ only in their micro-batch, for example, have the same layout
def lay_out(
    model: ModelShape,
    *,
    strategy: Strategy,
    world_size: int,
    shard_size: int | None = None,
    dtypes: Dtypes,
    offload: Offload | None = None,
) -> ModelLayout:
    """Compute how each unit of a model is divided into buckets and shards."""
    replicate_size, shard_size = strategy.mesh_shape(world_size, shard_size)
    units = []
    for unit in model.units:
        is_root = unit is model.root
        is_head = not is_root and any(p.role == "head" for p in unit.parameters)
        embeds = any(p.trainable and p.role in ("embedding", "input") for p in unit.parameters)
        units.append(
            UnitLayout(
                unit.name,
                _buckets(unit.parameters, dtypes, shard_size, offload or Offload()),
                # The root and a head are needed again immediately when backward begins.
                strategy.reshards_after_forward and not is_root and not is_head,
                feeds_units=is_root and embeds,
                takes_ids=is_root or next((p.role for p in unit.parameters if len(p.shape) == 2), "") == "embedding",
                block=unit.block,
                is_head=is_head,
            )
        )
    by_name = {unit.name: unit for unit in units}
    calls = tuple(by_name[unit.name] for unit in model.in_call_order())
    return ModelLayout(
        tuple(units),
        calls,
        shard_size,
        replicate_size,
        keeps_parameters=strategy.keeps_parameters,
        keeps_gradients=strategy.keeps_gradients,
    )


def _buckets(
    parameters: Sequence[ParameterShape], dtypes: Dtypes, shard_size: int, offload: Offload
) -> tuple[CountedBucket, ...]:
    """Return a unit's buckets in the engine's order: the order in which their first parameters are defined."""
    return tuple(
        CountedBucket.of(
            _key(members[0], dtypes),
            [parameter.shape for parameter in members],
            dtypes,
            world_size=shard_size // (members[0].tiles if members[0].of_experts else 1),
            offload=offload,
        )
        for members in grouped(parameters, dtypes)
    )


def grouped(parameters: Sequence[ParameterShape], dtypes: Dtypes) -> list[list[ParameterShape]]:
    """Group a unit's parameters by the bucket that they belong to."""
    groups: dict[tuple[BucketKey, bool], list[ParameterShape]] = {}
    for parameter in parameters:
        groups.setdefault((_key(parameter, dtypes), parameter.of_experts), []).append(parameter)
    return list(groups.values())


def _key(parameter: ParameterShape, dtypes: Dtypes) -> BucketKey:
    return BucketKey.of(
        dtypes,
        parameter.dtype,
        trainable=parameter.trainable,
        exact=parameter.exact,
        form=parameter.form,
        statistics=parameter.statistics,
    )
