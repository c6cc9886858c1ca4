"""The layout of a bucket, independent of its memory: parameters, ranks, dtypes and intervals."""

from collections.abc import Sequence

import torch

from fullshard.comm.base import PACKINGS, FullBuffer, Packing
from fullshard.comm.mesh import Mesh
from fullshard.core.bucket import BucketKey, BucketPlan
from fullshard.engine.kinds import kind_of
from fullshard.engine.precision import MixedPrecisionPolicy, dtype_name, torch_dtype
from fullshard.engine.shard_spec import RaggedShard, ReductionSettings, ShardSpec
from fullshard.engine.storage import Storage
from fullshard.wrap.partition import Slot


def by_bucket(slots: Sequence[Slot], policy: MixedPrecisionPolicy) -> list[list[Slot]]:
    """Group the slots of a unit into buckets. Buckets are in the order of their first parameters."""
    groups: dict[tuple[BucketKey, int | None], list[Slot]] = {}
    for slot in slots:
        alone = id(slot) if _is_alone(slot) else None
        groups.setdefault((_key(slot, policy), alone), []).append(slot)
    return list(groups.values())


def _is_alone(slot: Slot) -> bool:
    """Return whether a parameter needs its own bucket, in which each rank owns complete rows."""
    return slot.by_rows or kind_of(slot.parameter).is_alone


def _key(slot: Slot, policy: MixedPrecisionPolicy) -> BucketKey:
    """Return the bucket key of a parameter. Parameters with equal keys share a bucket, unless they need their own."""
    parameter, statistics = slot.parameter, slot.statistics_dtype
    kind = kind_of(parameter)
    return BucketKey.of(
        policy.dtypes_of(slot.compute_dtype),
        dtype_name(parameter.dtype),
        trainable=parameter.requires_grad,
        exact=kind.is_exact,
        form=kind.form(parameter),
        statistics=None if statistics is None else dtype_name(statistics),
    )


class BucketSpec:
    """Describes a bucket: its parameters, their dtypes, and the layout that follows from them.

    Attributes:
        plan: the planner's description of this bucket, made when the bucket is created. It still describes a frozen
            bucket if the parameters become trainable later.
        kinds: the kind of each parameter.
        slices: the slice of this rank's interval that holds each parameter.
        tag: the number of the bucket in the model, equal on every rank; set when the model is assembled.
    """

    tag: int

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        mesh: Mesh,
        policy: MixedPrecisionPolicy,
        storage: Storage,
        reduction: ReductionSettings | None = None,
    ) -> None:
        self.slots, self.mesh, self.storage = slots, mesh, storage
        self.kinds = [kind_of(slot.parameter) for slot in slots]
        self.plan = plan = BucketPlan.of(
            _key(slots[0], policy),
            [tuple(kind.plain(slot.parameter).shape) for kind, slot in zip(self.kinds, slots, strict=True)],
            policy.dtypes_of(),
            world_size=mesh.shard_size,
            offload=storage.offload,
            by_rows=_is_alone(slots[0]),
            is_packed=self.kinds[0].is_packed,
        )
        self.layout = plan.layout
        self.dtype, self.compute_dtype, self.reduce_dtype, self.compute_shard_dtype = map(
            torch_dtype, (plan.dtype, plan.compute_dtype, plan.reduce_dtype, plan.compute_shard_dtype)
        )
        self.gather_packing, self.reduce_packing = _packing(plan.weights_as), _packing(plan.gradients_as)
        self.slices = [self.layout.shard_slice(index, mesh.shard_rank) for index in range(len(slots))]
        self.reduction = reduction or ReductionSettings.of(mesh)

    @property
    def full_nbytes(self) -> int:
        """Return the size of the unsharded bucket in bytes."""
        return self.layout.full_numel * self.compute_dtype.itemsize

    def make_buffer(self) -> FullBuffer:
        """Create the buffer for the unsharded bucket. All ranks must create the same buffers in the same order."""
        return self.mesh.gather.full_buffer(
            self.layout.full_numel,
            self.compute_dtype,
            self.mesh.device,
            holds_main=self.plan.may_hold_main,
            packing=self.gather_packing,
        )

    def shard_spec(self, index: int) -> ShardSpec:
        """Return the spec that defines which elements of parameter `index` each rank owns. It has no name yet."""
        placement = RaggedShard(self.layout.shard_numel, self.layout.offsets[index])
        shape = torch.Size(self.layout.specs[index].shape)
        return self.kinds[index].spec(self.slots[index], self.mesh, shape, placement, self.reduction)


def _packing(sent_as: str | None) -> Packing | None:
    return None if sent_as is None else PACKINGS[torch_dtype(sent_as)]
