"""A bucket: the parameters of one unit that share dtypes and trainability, in one flat buffer.

Six tensors always have these names:

    original parameter   the user's `nn.Parameter` object; bound once to a view of `full`
    main                 this rank's interval, shape (S,), in the stored dtype; persistent; the optimizer updates it
    sharded parameter    a view of `main` for one parameter; `module.parameters()` yields it at rest
    compute shard        the input of the gather: `main` itself, or a copy of it that the unit's `Storage` holds
    full                 the unsharded bucket, shape (W * S,), in the compute dtype; filled only while it is needed
    gradient             see `engine.gradient`

The buffer that owns `full`, a `comm.base.FullBuffer`, fills it. In some buffers `main` is this rank's part of `full`.
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
    """The memory of one bucket, and the operations that unshard and reshard it. `BucketSpec` adds the layout.

    Attributes:
        has_gradient: whether the bucket has ever been trainable. Only then does `gradient` exist.
        storage_ids: the storages of the unsharded bucket, which never change during the life of the bucket.
        has_gradient_hooks: whether the script has ever put a post-accumulate hook on one of its sharded parameters.
    """

    main: torch.Tensor
    full: torch.Tensor
    buffer: FullBuffer
    originals: Originals
    gradient: Gradient
    parameter_type: type[ShardedParameter] = ShardedParameter

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        owner: Unit,
        number: int,
        weights: Values | None = None,
    ) -> None:
        super().__init__(slots, mesh=owner.mesh, policy=owner.policy, storage=owner.storage, reduction=owner.reduction)
        self.owner, self.number = owner, number
        self.has_gradient_hooks = False
        self._gathering: Work | None = None
        self._kept: tuple[torch.Tensor, Collectives] | None = None
        self._is_lost = False
        with torch.no_grad(), torch.inference_mode(False):  # tensors created in inference mode cannot be trained
            self._allocate(weights)
        is_trainable = slots[0].parameter.requires_grad
        self.sharded_parameters = [self.parameter_type(self, i, requires_grad=is_trainable) for i in range(len(slots))]
        self._trainable = [is_trainable] * len(slots)
        self.has_gradient = False
        if is_trainable:
            self.make_gradient()

    def make_gradient(self) -> None:
        """Prepare to collect and reduce gradients."""
        self.gradient = Gradient(self, self.sharded_parameters, storage_id=min(self.storage_ids))
        self.has_gradient = True

    def _allocate(self, weights: Values | None) -> None:
        """Copy this rank's interval from the original parameters, then bind these to views of `full`."""
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
        """Fill `main` with this rank's interval of each parameter, from memory or from `weights`."""
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
        """Number of parameters that require a gradient."""
        return self.gradient.unsharded.expected if self.has_gradient else 0

    @property
    def is_complete(self) -> bool:
        """Return whether every parameter that requires a gradient has one. Return False for a frozen bucket."""
        return self.has_gradient and self.gradient.unsharded.is_complete

    @property
    def shares_main(self) -> bool:
        """Return whether unsharding is a no-op, because one rank owns all elements in the compute dtype."""
        return self.full is self.main

    def issue_unshard(self, *, exactly: bool = False) -> None:
        """Launch the all-gather of the compute shards into `full`. If `exactly` is set, do not pack them."""
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
        """Return whether `main` has changed since the last gather."""
        return self._version != self.main_version

    @property
    def main_version(self) -> int:
        """Return the number of in-place changes of `main`."""
        return self.main._version

    @property
    def stored(self) -> list[torch.Tensor]:
        """Return the tensors that store this rank's part of the parameters."""
        return [self.main]

    def weights(self, index: int) -> torch.Tensor:
        """Return this rank's stored part of parameter `index`."""
        return self.main[self.slices[index]]

    def touch(self) -> None:
        """Record that `main` is about to change, possibly in a way that torch does not count."""
        self._version = -1

    def wait_unshard(self) -> None:
        """Wait for the all-gather if one is in progress."""
        if self._gathering is not None:
            try:
                self._gathering.wait()
            except RuntimeError:  # waiting again would last until the group's time-out
                self._gathering, self._is_lost = None, True
                raise
            self._gathering, self._is_lost = None, False

    def reshard(self, *, kept_by: Collectives | None = None) -> None:
        """Free the memory of `full` after its gather, unless the gather failed: other ranks may still write to it.

        `kept_by` are neighbours that each keep a part, so that the next gather involves only them unless `main` changes
        first. Ranks keep no parts if staying unsharded costs nothing or if the buffer is of another kind.
        """
        if self._is_lost:
            return
        self._kept = None
        if kept_by is not None and isinstance(self.buffer, ResizedBuffer):
            # Copy the part, because the memory of `full` is about to be freed.
            self._kept = own_interval(self.full, kept_by.rank, kept_by.size).clone(), kept_by
        self.buffer.free(keeps_memory=self.owner.keeps_memory)

    def write_back(self) -> None:
        """Copy changes in this rank's interval of the unsharded parameters into `main`.

        Only changed elements are copied. If the compute dtype is narrower, the others are more precise in `main` than
        in `full`.
        """
        if self.shares_main:
            return
        with torch.no_grad():
            own = own_interval(self.full, self.mesh.shard_rank, self.mesh.shard_size).to(self.main.device)
            changed = own != self.main.to(self.compute_dtype)
            self.main.copy_(torch.where(changed, own.to(self.dtype), self.main))

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Freeze or unfreeze the original parameter immediately, as the script did with the sharded one.

        Autograd checks the original again when its gradient arrives, and must find the last value that the script has
        set, even after a forward in which the parameter was frozen.
        """
        self._trainable[index] = requires_grad
        self.originals.parameters[index].requires_grad_(requires_grad)
        if requires_grad and not self.has_gradient:  # it was frozen until now
            self.make_gradient()
            self.owner.watch_gradients(self)
        if self.has_gradient:
            self.gradient.unsharded.expected = sum(self._trainable)

    def take_requires_grad(self) -> None:
        """Adopt `requires_grad` changes made on originals, which modules hold in forward and while unsharded."""
        current = list(map(_requires_grad, self.originals.parameters))
        if current == self._trainable:
            return
        for sharded, before, now in zip(self.sharded_parameters, list(self._trainable), current, strict=True):
            if before != now:
                sharded.requires_grad_(now)
