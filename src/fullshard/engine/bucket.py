"""A bucket: the parameters of one unit that share dtypes and trainability, in one flat buffer.

The code uses these names for the tensors of a bucket:

    original parameter   the user's `nn.Parameter` object; bound once to a view of `full`
    main                 this rank's interval, shape (S,), in the stored dtype; persistent; the optimizer updates it
    sharded parameter    a view of `main` for one parameter; `module.parameters()` yields it at rest
    compute shard        the input of the gather: `main` itself, or a copy of it that the unit's `Storage` holds
    full                 the unsharded bucket, shape (W * S,), in the compute dtype; filled only while it is needed
    gradient             see `engine.gradient`

A `comm.base.FullBuffer` owns `full` and fills it. With some of these buffers, `main` is this rank's part of `full`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fullshard.comm import torch_private
from fullshard.comm.base import Collectives, FullBuffer, Work, own_interval
from fullshard.comm.resized_buffer import ResizedBuffer
from fullshard.engine.binding import Originals
from fullshard.engine.bucket_spec import BucketSpec
from fullshard.engine.gradient import Gradient
from fullshard.engine.parameter import ShardedParameter
from fullshard.wrap.partition import Slot, Values

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

_requires_grad = operator.attrgetter("requires_grad")


class Bucket(BucketSpec):
    """The memory of one bucket, and operations to unshard and reshard it. `BucketSpec` describes its layout.

    Attributes:
        has_gradient: whether the bucket has ever been trainable. `gradient` exists only in this case.
        storage_ids: ids of the storages of the unsharded bucket, which never change during the life of the bucket.
        has_gradient_hooks: whether the script has ever put a post-accumulate hook on one of its sharded parameters.
    """

    main: torch.Tensor
    full: torch.Tensor
    buffer: FullBuffer
    originals: Originals
    gradient: Gradient
    parameter_type: type[ShardedParameter] = ShardedParameter

    def __init__(self, slots: Sequence[Slot], *, owner: Unit, number: int, weights: Values | None = None) -> None:
        super().__init__(slots, mesh=owner.mesh, policy=owner.policy, storage=owner.storage, reduction=owner.reduction)
        self.owner, self.number = owner, number
        self.has_gradient_hooks = False
        self._gathering: Work | None = None
        self._kept: tuple[torch.Tensor, Collectives] | None = None
        self._gather_failed = False
        with torch.no_grad(), torch.inference_mode(False):  # tensors created in inference mode cannot be trained
            self._allocate(weights)
        is_trainable = slots[0].parameter.requires_grad
        self.sharded_parameters = [self.parameter_type(self, i, requires_grad=is_trainable) for i in range(len(slots))]
        self._trainable = [is_trainable] * len(slots)
        self.has_gradient = False
        if is_trainable:
            self.make_gradient()

    def make_gradient(self) -> None:
        """Create the object that collects and reduces the gradients of this bucket."""
        self.gradient = Gradient(self, self.sharded_parameters, storage_id=min(self.storage_ids))
        self.has_gradient = True

    def _allocate(self, weights: Values | None) -> None:
        """Copy this rank's interval of the original parameters, and then make these parameters views of `full`."""
        self.buffer = self.make_buffer()
        self.full = self.buffer.full
        # Identify the storage by object, not by address, because it has no memory most of the time.
        self.storage_ids = frozenset({torch_private.storage_id(self.full.untyped_storage())})
        if self.buffer.main is not None:
            self.main = self.buffer.main
        else:
            self.main = self.storage.make_main(self)
        self.compute_shard, self._version = self.storage.make_compute_shard(self), -1
        self._fill(weights)
        for index, slot in enumerate(self.slots):
            # This keeps the parameter object (subclasses, tied identities) and gives it a separate version counter.
            # `nn.Parameter(view)` would share the counter of `full` and fail after the next gather.
            spec = self.layout.specs[index]
            view = self.full.narrow(0, self.layout.offsets[index], spec.numel).view(spec.shape)
            self.kinds[index].set_plain(slot.parameter, view)
        self.originals = Originals([slot.parameter for slot in self.slots])
        self.reshard()

    def _fill(self, weights: Values | None) -> None:
        """Fill `main` with this rank's interval of each parameter. `weights` supplies those on the meta device."""
        for index, slot in enumerate(self.slots):
            interval = self.layout.interval(index, self.mesh.shard_rank)
            own = self.main[self.slices[index]]
            if slot.parameter.is_meta and weights is not None:
                weights.read(slot, interval, own)
                empty = torch.empty(0, dtype=slot.parameter.dtype, device=self.mesh.device)
                slot.make_real(self.kinds[index].like(slot.parameter, empty))
            else:
                own.copy_(self.kinds[index].plain(slot.parameter).reshape(-1)[interval.start : interval.stop])

    @property
    def trainable_count(self) -> int:
        """Return the number of parameters that require a gradient."""
        return self.gradient.unsharded.expected if self.has_gradient else 0

    @property
    def is_complete(self) -> bool:
        """Return whether all trainable parameters have a gradient. Return False if the bucket is frozen."""
        return self.has_gradient and self.gradient.unsharded.is_complete

    @property
    def shares_main(self) -> bool:
        """Return whether unsharding is a no-op, because this rank owns all elements in the compute dtype."""
        return self.full is self.main

    def issue_unshard(self, *, exactly: bool = False) -> None:
        """Launch the all-gather of the compute shards into `full`. With `exactly`, send the values unrounded."""
        # Read before the gather, because a later change of `main` makes the gathered values outdated.
        before, self._version = self._version, self.main_version
        is_changed = before != self._version
        kept, self._kept = self._kept, None
        if kept is not None and isinstance(self.buffer, ResizedBuffer) and not (is_changed or exactly):
            self._gathering = self.buffer.gather_from(*kept, tag=self.tag)
            return
        self._gathering = self.storage.gather(self, exactly=exactly, is_changed=is_changed)

    @property
    def is_outdated(self) -> bool:
        """Return whether `main` has changed since the last gather, so that the gathered values are outdated."""
        return self._version != self.main_version

    @property
    def main_version(self) -> int:
        """Return the version counter of `main`, which counts its in-place changes."""
        return self.main._version

    @property
    def stored(self) -> list[torch.Tensor]:
        """Return the tensors that store this rank's part of the parameters."""
        return [self.main]

    def weights(self, index: int) -> torch.Tensor:
        """Return the part of parameter `index` that this rank stores."""
        return self.main[self.slices[index]]

    def touch(self) -> None:
        """Mark the gathered values as outdated, because `main` may now change in a way that torch does not count."""
        self._version = -1

    def wait_unshard(self) -> None:
        """Wait for the all-gather if one is in progress."""
        if self._gathering is not None:
            try:
                self._gathering.wait()
            except RuntimeError:  # waiting again would last until the group's time-out
                self._gathering, self._gather_failed = None, True
                raise
            self._gathering, self._gather_failed = None, False

    def reshard(self, *, kept_by: Collectives | None = None) -> None:
        """Free the memory of `full`, unless its gather failed, because other ranks may still be writing to it.

        If `kept_by` is given, each of these neighboring ranks keeps a part of `full`. The next gather then involves
        only these ranks, unless `main` changes first. Only a `ResizedBuffer` supports this.
        """
        if self._gather_failed:
            return
        self._kept = None
        if kept_by is not None and isinstance(self.buffer, ResizedBuffer):
            # Copy the part, because the memory of `full` is about to be freed.
            self._kept = own_interval(self.full, kept_by.rank, kept_by.size).clone(), kept_by
        self.buffer.free(keeps_memory=self.owner.keeps_memory)

    def write_back(self) -> None:
        """Copy changes in this rank's interval of the unsharded parameters into `main`.

        Only changed elements are copied. If the compute dtype is narrower than that of `main`, copying all of them
        would round those that did not change.
        """
        if self.shares_main:
            return
        with torch.no_grad():
            own = own_interval(self.full, self.mesh.shard_rank, self.mesh.shard_size).to(self.main.device)
            changed = own != self.main.to(self.compute_dtype)
            self.main.copy_(torch.where(changed, own.to(self.dtype), self.main))

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Freeze or unfreeze an original parameter when the script does so with the sharded parameter.

        This must happen immediately: when the gradient arrives, autograd checks whether the original requires one, and
        must find the value that the script set last, even if the parameter was frozen in forward.
        """
        self._trainable[index] = requires_grad
        self.originals.parameters[index].requires_grad_(requires_grad)
        if requires_grad and not self.has_gradient:  # it was frozen until now
            self.make_gradient()
            self.owner.watch_gradients(self)
        if self.has_gradient:
            self.gradient.unsharded.expected = sum(self._trainable)

    def take_requires_grad(self) -> None:
        """Apply `requires_grad` changes that code made on original parameters to the sharded parameters, too."""
        current = list(map(_requires_grad, self.originals.parameters))
        if current == self._trainable:
            return
        for sharded, before, now in zip(self.sharded_parameters, list(self._trainable), current, strict=True):
            if before != now:
                sharded.requires_grad_(now)
