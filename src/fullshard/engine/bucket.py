"""A bucket: the parameters of one unit that share dtypes and trainability, in one flat buffer.

Five tensors, always named like this:

    original parameter   the user's `nn.Parameter` object; bound once to a view of `full`
    main                 this rank's interval, in the stored dtype; persistent; what the optimizer updates
    sharded parameter    a view of `main` for one parameter; what `module.parameters()` yields at rest
    full                 the unsharded bucket, in the compute dtype; whole only while it is needed
    gradient             see `engine.gradient`

How `full` becomes whole is the business of its buffer, `comm.base.FullBuffer`; in some of them `main` is its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fullshard.comm.base import FullBuffer, Work, own_interval
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import LifecycleError
from fullshard.core.layout import BucketLayout, ParameterSpec
from fullshard.engine.gradient import Gradient
from fullshard.engine.materialize import WeightSource
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.precision import MixedPrecisionPolicy
from fullshard.wrap.partition import Slot
from fullshard.wrap.quantized import aliases, is_exact

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit


class Bucket:
    """Storage of one bucket and its way from sharded to unsharded and back.

    Args:
        slots: parameters of one dtype and one `requires_grad`, all exact or none, on the mesh's device.
        mesh: the ranks that share it.
        policy: dtypes per role.
        weights: gives the values of parameters that are still on the meta device.
    """

    slots: Sequence[Slot]
    layout: BucketLayout
    main: torch.Tensor
    """shape (S,), stored dtype"""
    full: torch.Tensor
    """shape (W * S,), compute dtype"""
    sharded_parameters: list[ShardedParameter]
    gradient: Gradient | None
    """None if the bucket is frozen"""
    unit: Unit
    """the unit it belongs to, which sets this"""
    slices: list[slice]
    """where in `main` each sharded parameter is"""
    storage_id: int
    """which storage `full` is in, for as long as it lives"""
    trainable_count: int
    """parameters that want a gradient, as of the last forward"""
    tag: int
    """its number in the model, the same on every rank; set when the model is put together"""

    def __init__(
        self, slots: Sequence[Slot], *, mesh: Mesh, policy: MixedPrecisionPolicy, weights: WeightSource | None = None
    ) -> None:
        self.slots, self.mesh = slots, mesh
        first = slots[0].parameter
        self.dtype = first.dtype
        self.compute_dtype = self.dtype if is_exact(first) else policy.compute_dtype(self.dtype)
        self.reduce_dtype = policy.gradient_dtype(first.dtype)
        self.gather_packing = None if is_exact(first) else policy.gather_packing(self.compute_dtype)
        self.reduce_packing = policy.reduce_packing(self.reduce_dtype)
        itemsizes = [self.dtype.itemsize, self.compute_dtype.itemsize]
        if self.dtype.is_floating_point:
            itemsizes.append(self.reduce_dtype.itemsize)
        specs = [ParameterSpec(str(i), tuple(slot.parameter.shape)) for i, slot in enumerate(slots)]
        self.layout = BucketLayout.build(specs, itemsize=min(itemsizes), world_size=mesh.shard_size)
        self._gathering: Work | None = None
        self._versions: list[int] | None = None
        self.slices = [self.layout.shard_slice(index, mesh.shard_rank) for index in range(len(slots))]
        with torch.no_grad(), torch.inference_mode(False):
            self._allocate(weights)
        self.sharded_parameters = [
            ShardedParameter(self, i, requires_grad=slot.parameter.requires_grad) for i, slot in enumerate(slots)
        ]
        self.trainable_count = len(slots) if first.requires_grad else 0
        self._places = [
            (module._parameters, attribute, slot.parameter, sharded)
            for slot, sharded in zip(slots, self.sharded_parameters, strict=True)
            for module, attribute in slot.owners
        ]
        self.gradient = Gradient(self, self.reduce_dtype) if first.requires_grad else None

    def _allocate(self, weights: WeightSource | None) -> None:
        """Copy this rank's interval out of the original parameters, then bind those to views of `full`."""
        layout, mesh = self.layout, self.mesh
        self.buffer: FullBuffer = mesh.gather.full_buffer(
            layout.full_numel,
            self.compute_dtype,
            mesh.device,
            holds_main=self.dtype == self.compute_dtype,
            packing=self.gather_packing,
        )
        self.full = self.buffer.full
        self.storage_id = self.full.untyped_storage()._cdata
        if self.buffer.main is not None:
            self.main = self.buffer.main
        else:
            self.main = torch.zeros(layout.shard_numel, dtype=self.dtype, device=mesh.device)
        for index, slot in enumerate(self.slots):
            interval = layout.interval(index, mesh.shard_rank)
            own = self.main[self.slices[index]]
            if slot.parameter.is_meta and weights is not None:
                weights.read(slot, interval, own)
                slot.make_real(mesh.device)
            else:
                own.copy_(slot.parameter.detach().reshape(-1)[interval.start : interval.stop])
        for index, slot in enumerate(self.slots):
            # `.data` keeps the parameter object (subclasses, tied identities) and gives it a version counter of its
            # own; `nn.Parameter(view)` would share the counter with `full` and fail after the next gather.
            for tensor in (slot.parameter, *aliases(slot.parameter)):
                tensor.data = self._view(self.full, index)
        self.reshard()

    def _view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        spec = self.layout.specs[index]
        return flat.narrow(0, self.layout.offsets[index], spec.numel).view(spec.shape)

    @property
    def shares_main(self) -> bool:
        """Whether unsharding is nothing at all: one rank owns everything, in the dtype it computes in."""
        return self.full is self.main

    @property
    def full_nbytes(self) -> int:
        """Bytes of the unsharded bucket."""
        return self.full.numel() * self.full.itemsize

    def issue_unshard(self, *, exactly: bool = False) -> None:
        """Launch the all-gather of everybody's `main` into `full`; `exactly`: without packing it."""
        self._gathering = self.buffer.gather(self.main, tag=self.tag, exactly=exactly)

    def wait_unshard(self) -> None:
        """Wait for the all-gather, if one is under way."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self._versions is not None:
                originals = tuple(slot.parameter for slot in self.slots)
                torch._C._autograd._unsafe_set_version_counter(originals, tuple(self._versions))
                self._versions = None

    def reshard(self) -> None:
        """Free the memory of `full`."""
        self.wait_unshard()
        if self.buffer.is_zeroed and self._versions is None:
            # Whoever reads them before they are unsharded again gets an error from autograd, not zeros.
            self._versions = self.versions()
            torch.autograd.graph.increment_version([slot.parameter for slot in self.slots])
        self.buffer.free()

    def write_back(self) -> None:
        """Copy what was changed in this rank's interval of the unsharded parameters into `main`.

        Only that: where the compute dtype is narrower, the rest of `main` is more exact than `full`.
        """
        if self.shares_main:
            return
        with torch.no_grad():
            own = own_interval(self.full, self.mesh.shard_rank, self.mesh.shard_size)
            changed = own != self.main.to(self.compute_dtype)
            self.main.copy_(torch.where(changed, own.to(self.dtype), self.main))

    def versions(self) -> list[int]:
        """How often each original parameter has been changed in place."""
        return [slot.parameter._version for slot in self.slots]

    def bind(self, *, unsharded: bool) -> None:
        """Make the modules hold the original or the sharded parameters."""
        for parameters, attribute, original, sharded in self._places:
            parameters[attribute] = original if unsharded else sharded

    def check_binding(self) -> None:
        """Refuse to bind over what is not ours.

        Raises:
            LifecycleError: somebody has put another parameter in place of the original or sharded one.
        """
        for parameters, attribute, original, sharded in self._places:
            current = parameters.get(attribute)
            if current is not sharded and current is not original:
                raise LifecycleError(
                    f"parameter {'='.join(sharded.names)} was replaced after sharding by {type(current).__name__}",
                    hint="change it in place under unsharded(model, writeback=True), or replace it before",
                )

    def sync_requires_grad(self) -> None:
        """Carry a `requires_grad` the user changed on the sharded parameters over to the original ones."""
        self.trainable_count = sum(sharded.requires_grad for sharded in self.sharded_parameters)
        for slot, sharded in zip(self.slots, self.sharded_parameters, strict=True):
            if slot.parameter.requires_grad != sharded.requires_grad:
                slot.parameter.requires_grad_(sharded.requires_grad)
                if self.gradient is None:  # frozen until now
                    self.gradient = Gradient(self, self.reduce_dtype)
                    self.unit.watch_gradients(self)
