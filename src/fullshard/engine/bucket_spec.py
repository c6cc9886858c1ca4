"""The layout of a bucket without its memory: its parameters, ranks, dtypes and places."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fullshard.comm.device import require_dtype
from fullshard.comm.mesh import Mesh
from fullshard.comm.packing import Packing, packing_for
from fullshard.core.bucket import BucketKey, BucketPlan
from fullshard.engine.offload import Storage
from fullshard.engine.precision import MixedPrecisionPolicy, dtype_name, torch_dtype
from fullshard.engine.reduction_settings import ReductionSettings
from fullshard.engine.span import Name, RaggedShard, Span
from fullshard.engine.tile import plain_of, tile_of
from fullshard.wrap.extended import Composition, is_composed, is_extended
from fullshard.wrap.partition import Slot
from fullshard.wrap.quantized import is_exact


def by_bucket(slots: Sequence[Slot], policy: MixedPrecisionPolicy) -> list[list[Slot]]:
    """Group slots by bucket, in the order of each bucket's first parameter."""
    groups: dict[tuple[BucketKey, int | None], list[Slot]] = {}
    for slot in slots:
        alone = id(slot) if slot.is_alone else None
        groups.setdefault((_key(slot, policy), alone), []).append(slot)
    return list(groups.values())


def _key(slot: Slot, policy: MixedPrecisionPolicy) -> BucketKey:
    """Return the key that a parameter shares with all others of its bucket."""
    parameter, statistics = slot.parameter, slot.statistics_dtype
    return BucketKey.of(
        policy.dtypes_of(slot.compute_dtype),
        dtype_name(parameter.dtype),
        trainable=parameter.requires_grad,
        exact=is_exact(parameter),
        statistics=None if statistics is None else dtype_name(statistics),
    )


class BucketSpec:
    """Parameters that share dtypes and trainability, and the layout that follows from that.

    Args:
        slots: parameters of one `BucketKey`, on the mesh's device.
        mesh: the ranks that share the bucket.
        policy: dtypes per role.
        storage: where `main` and the compute shard are.

    Attributes:
        plan: dtypes, places and bytes, as the planner had them when the bucket was made: it may have been frozen then.
        slices: the place of each parameter in this rank's interval.
        tiles: the part of each parameter in the bucket, where tensor parallelism has split it.
        tag: its number in the model, the same on every rank; set when the model is put together.
        reduction: the unit's settings, once the bucket is part of one.
    """

    tag: int

    def __init__(self, slots: Sequence[Slot], *, mesh: Mesh, policy: MixedPrecisionPolicy, storage: Storage) -> None:
        self.slots, self.mesh, self.storage = slots, mesh, storage
        self.plan = plan = BucketPlan.of(
            _key(slots[0], policy),
            [tuple(plain_of(slot.parameter).shape) for slot in slots],
            policy.dtypes_of(),
            world_size=mesh.shard_size,
            offload=storage.offload,
            by_rows=slots[0].is_alone,
            is_extended=is_extended(slots[0].parameter),
        )
        self.layout = plan.layout
        self.dtype, self.compute_dtype, self.reduce_dtype, self.compute_shard_dtype = map(
            torch_dtype, (plan.dtype, plan.compute_dtype, plan.reduce_dtype, plan.compute_shard_dtype)
        )
        require_dtype(mesh.device, self.dtype, "parameters")
        require_dtype(mesh.device, self.compute_dtype, "param_dtype")
        require_dtype(mesh.device, self.reduce_dtype, "reduce_dtype")
        self.tiles = [tile_of(slot) for slot in slots]
        self.gather_packing, self.reduce_packing = _packing(plan.gather_as), _packing(plan.reduce_as)
        self.main_is_on_host = plan.main_is_on_host
        self.is_gathered_from_host = plan.is_gathered_from_host
        self.state_visits_device = plan.state_visits_device
        self.slices = [self.layout.shard_slice(index, mesh.shard_rank) for index in range(len(slots))]
        self.reduction = ReductionSettings.of(mesh)

    def span(self, index: int) -> Span:
        """Return which elements of parameter `index` each rank has; the span has no name yet."""
        layout, tile = self.layout, self.tiles[index]
        if tile is not None and not tile.is_beneath:
            tile = None
        shape = layout.specs[index].shape if tile is None else tile.whole_shape
        slot, parameter = self.slots[index], self.slots[index].parameter
        composition = Composition.of(parameter) if is_composed(parameter) else None
        row_numel = 0 if composition is None else math.prod(shape[1:])
        placement = RaggedShard(layout.shard_numel, layout.offsets[index], row_numel)
        return Span(
            *(self.mesh, shape, placement, Name(), tile),
            composition=composition,
            as_rows=slot.by_rows,
            reduction=self.reduction,
        )


def _packing(sent_as: str | None) -> Packing | None:
    return None if sent_as is None else packing_for(torch_dtype(sent_as))
