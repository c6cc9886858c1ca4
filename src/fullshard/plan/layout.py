"""Units as the engine would lay them out over the ranks: the same buckets, the same intervals, without tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from fullshard.core.layout import BucketLayout, ParameterSpec
from fullshard.core.offload import Offload
from fullshard.core.sizes import packed_nbytes
from fullshard.core.strategy import Strategy
from fullshard.plan.shapes import FLOATING, Block, ModelShape, ParameterShape, itemsize


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of a run, by role; None leaves a role to the rule in `compute` and `reduce`."""

    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    gather_as: str | None = None
    reduce_as: str | None = None

    def compute(self, parameter: ParameterShape) -> str:
        """Dtype of the unsharded parameter. Bytes with a meaning of their own are never cast."""
        if self.compute_dtype is None or parameter.exact or parameter.dtype not in FLOATING:
            return parameter.dtype
        return parameter.statistics or self.compute_dtype

    def reduce(self, stored: str) -> str:
        """Dtype in which gradients of parameters stored as `stored` are summed: at least float32 unless told."""
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        compute = self.compute_dtype if self.compute_dtype is not None and stored in FLOATING else stored
        return "float32" if itemsize(compute) < itemsize("float32") else compute


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket.

    Attributes:
        layout: which rank owns what.
        dtype, compute_dtype, reduce_dtype: stored, unsharded, and of the gradient's sum.
        trainable: whether it has gradients.
        largest_numel: elements of its largest parameter.
        gather_as, reduce_as: what an interval is sent as, in either direction, if that is another dtype.
        offload: what lives in host memory.
    """

    layout: BucketLayout
    dtype: str
    compute_dtype: str
    reduce_dtype: str
    trainable: bool
    largest_numel: int
    gather_as: str | None = None
    reduce_as: str | None = None
    offload: Offload = field(default_factory=Offload)

    @property
    def main_is_on_host(self) -> bool:
        """Whether this rank's interval as it is stored lives there; of a frozen bucket there is nothing else."""
        return self.offload.main_weights if self.trainable else self.offload.compute_shards

    @property
    def is_gathered_from_host(self) -> bool:
        """Whether what is gathered is copied from there before every gather."""
        return self.main_is_on_host and self.offload.compute_shards

    @property
    def state_visits_device(self) -> bool:
        """Whether its optimizer state lives on the host and is updated on the device."""
        return self.trainable and self.offload.optimizer_state and not self.main_is_on_host

    @property
    def compute_shard_nbytes(self) -> int:
        """Bytes of what is gathered from, where that is not the stored interval itself on the device."""
        return self.layout.shard_numel * itemsize(self._sent_dtype)

    @property
    def device_nbytes(self) -> int:
        """Bytes of this rank's interval that stay on the device."""
        if not self.main_is_on_host:
            return self.main_nbytes
        return 0 if self.is_gathered_from_host else self.compute_shard_nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of it in host memory; of another dtype than the stored one, what is gathered from is a second copy."""
        if not self.main_is_on_host:
            return 0
        has_copy = self.is_gathered_from_host and self._sent_dtype != self.dtype
        return self.main_nbytes + (self.compute_shard_nbytes if has_copy else 0)

    @property
    def _sent_dtype(self) -> str:
        # Packing is done on the device, from exact values.
        return self.compute_dtype if self.gather_as is None else self.dtype

    @property
    def gather_message_nbytes(self) -> int:
        """Bytes of a message with one interval of the weights."""
        return _message_nbytes(self.layout.shard_numel, self.compute_dtype, self.gather_as)

    @property
    def reduce_message_nbytes(self) -> int:
        """Bytes of a message with one interval of the gradient."""
        return _message_nbytes(self.layout.shard_numel, self.reduce_dtype, self.reduce_as)

    @property
    def shares_main(self) -> bool:
        """Whether unsharding is nothing: one rank owns everything, in the dtype it computes in."""
        return self.layout.world_size == 1 and self.dtype == self.compute_dtype and not self.main_is_on_host

    @property
    def main_nbytes(self) -> int:
        """Bytes of this rank's interval as it is stored."""
        return self.layout.shard_numel * itemsize(self.dtype)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the unsharded bucket."""
        return self.layout.full_numel * itemsize(self.compute_dtype)

    @property
    def reduce_nbytes(self) -> int:
        """Bytes of the unsharded gradient."""
        return self.layout.full_numel * itemsize(self.reduce_dtype)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of this rank's interval of the gradient, in the dtype it is summed in."""
        return self.layout.shard_numel * itemsize(self.reduce_dtype)

    @property
    def main_gradient_dtype(self) -> str:
        """The wider of the stored dtype and that of the sum: gradients are accumulated in it."""
        return max(self.dtype, self.reduce_dtype, key=itemsize)

    @property
    def main_gradient_nbytes(self) -> int:
        """Bytes of the accumulated gradient."""
        return self.layout.shard_numel * itemsize(self.main_gradient_dtype)


def _message_nbytes(numel: int, dtype: str, sent_as: str | None) -> int:
    return numel * itemsize(dtype) if sent_as is None else packed_nbytes(numel, itemsize(sent_as))


@dataclass(frozen=True)
class UnitLayout:
    """One unit.

    Attributes:
        name: the module's qualified name; empty for the root.
        buckets: in the engine's order.
        reshard_after_forward: whether its unsharded parameters are freed between forward and backward.
        feeds_units: whether a trainable parameter of it is used before the first inner unit (an embedding).
        takes_ids: whether its inputs never want a gradient (token ids).
        block: what it computes.
        page_nbytes: bytes of what its forward keeps that are in host memory until its backward.
    """

    name: str
    buckets: tuple[BucketPlan, ...]
    reshard_after_forward: bool
    feeds_units: bool
    takes_ids: bool
    block: Block | None
    is_head: bool = False
    page_nbytes: int = 0

    @cached_property
    def full_nbytes(self) -> int:
        """Bytes of the unsharded unit."""
        return sum(bucket.full_nbytes for bucket in self.buckets)

    @cached_property
    def gathered_nbytes(self) -> int:
        """Of them, those that are allocated when it is unsharded."""
        return sum(bucket.full_nbytes for bucket in self.buckets if not bucket.shares_main)

    @cached_property
    def main_nbytes(self) -> int:
        """Bytes of this rank's intervals."""
        return sum(bucket.main_nbytes for bucket in self.buckets)

    @cached_property
    def trainable(self) -> tuple[BucketPlan, ...]:
        """The buckets with gradients."""
        return tuple(bucket for bucket in self.buckets if bucket.trainable)


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A whole model.

    Attributes:
        units: inner units in definition order, the root last.
        calls: the same in the order their forwards begin, the root first.
        returns_head: whether the root returns what a head that is a unit returns, so that backward comes to that first.
        shard_size, replicate_size: ranks along the axes of the mesh.
    """

    units: tuple[UnitLayout, ...]
    calls: tuple[UnitLayout, ...]
    shard_size: int
    replicate_size: int
    returns_head: bool = False

    def keeping(self, count: int) -> ModelLayout:
        """The same with the last `count` of the units that are freed after forward kept until backward."""
        inner = [unit.name for unit in self.calls if unit.reshard_after_forward]
        kept = set(inner[len(inner) - count :])
        return self._with(
            dataclasses.replace(unit, reshard_after_forward=False) if unit.name in kept else unit for unit in self.units
        )

    def with_pages(self, nbytes: Callable[[Block], int]) -> ModelLayout:
        """The same with so many bytes of each block's activations in host memory between forward and backward."""
        return self._with(
            unit if unit.block is None else dataclasses.replace(unit, page_nbytes=nbytes(unit.block))
            for unit in self.units
        )

    def _with(self, units: Iterable[UnitLayout]) -> ModelLayout:
        by_name = {unit.name: unit for unit in units}
        return dataclasses.replace(
            self, units=tuple(by_name.values()), calls=tuple(by_name[unit.name] for unit in self.calls)
        )

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.shard_size * self.replicate_size

    @property
    def root(self) -> UnitLayout:
        """The outermost unit."""
        return self.units[-1]

    @property
    def buckets(self) -> list[BucketPlan]:
        """Every bucket."""
        return [bucket for unit in self.units for bucket in unit.buckets]


def lay_out(
    model: ModelShape,
    *,
    strategy: Strategy,
    world_size: int,
    shard_size: int | None = None,
    dtypes: Dtypes,
    offload: Offload | None = None,
) -> ModelLayout:
    """Lay a model out.

    Args:
        model: its shapes.
        strategy: a row.
        world_size: ranks.
        shard_size: ranks per shard group, for the hybrid strategies.
        dtypes: per role.
        offload: what lives in host memory. Default: nothing.

    Raises:
        ConfigError: a shard size that is missing or does not divide the world size.
    """
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
                # The root and a head are needed again at once, when backward begins.
                strategy.reshard_after_forward and not is_root and not is_head,
                feeds_units=is_root and embeds,
                takes_ids=is_root or any(p.role == "embedding" for p in unit.parameters),
                block=unit.block,
                is_head=is_head,
            )
        )
    by_name = {unit.name: unit for unit in units}
    calls = tuple(by_name[unit.name] for unit in model.in_call_order())
    return ModelLayout(tuple(units), calls, shard_size, replicate_size)


def _buckets(
    parameters: Sequence[ParameterShape], dtypes: Dtypes, shard_size: int, offload: Offload
) -> tuple[BucketPlan, ...]:
    """Grouped by (stored dtype, compute dtype, trainable, exact), in order of appearance."""
    groups: dict[tuple[str, str, bool, bool], list[ParameterShape]] = {}
    for parameter in parameters:
        key = (parameter.dtype, dtypes.compute(parameter), parameter.trainable, parameter.exact)
        groups.setdefault(key, []).append(parameter)
    return tuple(
        _bucket(tuple(p.shape for p in group), group[0], dtypes, shard_size, offload) for group in groups.values()
    )


def _bucket(
    shapes: tuple[tuple[int, ...], ...], first: ParameterShape, dtypes: Dtypes, shard_size: int, offload: Offload
) -> BucketPlan:
    compute, reduce = dtypes.compute(first), dtypes.reduce(first.dtype)
    itemsizes = [itemsize(first.dtype), itemsize(compute)]
    if first.dtype in FLOATING:
        itemsizes.append(itemsize(reduce))
    layout = _layout(shapes, min(itemsizes), shard_size)
    largest = max(spec.numel for spec in layout.specs)
    gather_as = None if first.exact else _packed(dtypes.gather_as, compute)
    reduce_as = _packed(dtypes.reduce_as, reduce)
    return BucketPlan(layout, first.dtype, compute, reduce, first.trainable, largest, gather_as, reduce_as, offload)


def _packed(sent_as: str | None, dtype: str) -> str | None:
    """What elements of `dtype` are sent as: bytes stay as they are, and so does what is as short."""
    is_shorter = sent_as is not None and dtype in FLOATING and itemsize(sent_as) < itemsize(dtype)
    return sent_as if is_shorter else None


@cache
def _layout(shapes: tuple[tuple[int, ...], ...], narrowest: int, shard_size: int) -> BucketLayout:
    """Layers repeat, so most calls find their layout made."""
    specs = [ParameterSpec(str(index), shape) for index, shape in enumerate(shapes)]
    return BucketLayout.build(specs, itemsize=narrowest, world_size=shard_size)
