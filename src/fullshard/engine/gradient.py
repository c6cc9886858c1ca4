"""Gradients of one bucket: collected unsharded during backward, reduced, and published as sharded `.grad`s.

    autograd      parameter.grad -> copied (and cast) into `full`, then freed        per parameter, as it appears
    launch        reduce-scatter of `full` along the shard axis, and scale           once per backward
    advance       all-reduce of the shard along the replicate axis                   when the next bucket launches
    finish        add to the main gradient, set the sharded parameters' `.grad`      at the end of backward

`full` lives from the first gradient to the end of the reduction. Under `no_sync` it stays and accumulates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fullshard.comm.base import Work
from fullshard.core.errors import LifecycleError

if TYPE_CHECKING:
    from fullshard.engine.bucket import Bucket


class Gradient:
    """The gradient side of a trainable bucket.

    Attributes:
        dtype: in which gradients are collected and summed over ranks.
        main_dtype: in which they are accumulated over micro-batches: the wider of `dtype` and the stored dtype.
        fired: indices of the parameters whose gradient has appeared in this backward.
        used: the same since the last `finish`; more than `fired` after backwards under `no_sync`.
        divisor: what the sum over all ranks is divided by.
        requires_all_reduce: False leaves the replicate axis out and keeps the result aside until it is True again.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        self.bucket, self.dtype = bucket, dtype
        self.main_dtype = torch.promote_types(dtype, bucket.dtype)
        self.fired: set[int] = set()
        self.used: set[int] = set()
        self.divisor = float(bucket.mesh.world_size)
        self.requires_all_reduce = True
        self._full: torch.Tensor | None = None
        self._filled: set[int] = set()
        self._reducing: Work | None = None
        self._replicating: Work | None = None
        self._earlier: torch.Tensor | None = None
        self._held: torch.Tensor | None = None
        self._main: torch.Tensor | None = None
        self._published: list[tuple[torch.Tensor, int] | None] = []
        self._gaps = _gaps(bucket)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded gradient."""
        return self.bucket.layout.full_numel * self.dtype.itemsize

    @property
    def is_collecting(self) -> bool:
        """Whether there are unsharded gradients that no reduction has taken yet."""
        return self._full is not None

    @property
    def is_complete(self) -> bool:
        """Whether every parameter that wants a gradient has one."""
        return len(self.fired) >= sum(p.requires_grad for p in self.bucket.sharded_parameters)

    @torch.no_grad()
    def collect(self, index: int) -> None:
        """Take parameter `index`'s fresh `.grad` into `full`. Adds if this parameter has been collected before."""
        parameter = self.bucket.slots[index].parameter
        grad = parameter.grad
        if grad is None:
            return
        parameter.grad = None
        if parameter.untyped_storage().data_ptr() != self.bucket.full.untyped_storage().data_ptr():
            raise LifecycleError(
                f"rank {self.bucket.mesh.rank}, parameter {'='.join(self.bucket.sharded_parameters[index].names)}: "
                f"forward gave it other data ({parameter.dtype}), which the optimizer would never update",
                hint="a layer that assigns `.data` in forward does this, often to cast it: cast it before sharding",
            )
        if grad.is_sparse:
            grad = grad.to_dense()
        view = self.bucket._view(self._unsharded(), index)
        if index in self._filled:
            view.add_(grad)
        else:
            view.copy_(grad)
        self._filled.add(index)
        self.fired.add(index)
        self.used.add(index)

    def _unsharded(self) -> torch.Tensor:
        if self._full is None:
            mesh = self.bucket.mesh
            self._full = mesh.reduce.staging(self.bucket.layout.full_numel, self.dtype, mesh.device)
            for start, stop in self._gaps:
                self._full[start:stop].zero_()
        return self._full

    @torch.no_grad()
    def launch(self) -> None:
        """Reduce what was collected. What was not used counts as zero, so every rank reduces the same shape."""
        full = self._unsharded()
        for index in range(len(self.bucket.slots)):
            if index not in self._filled:
                self.bucket._view(full, index).zero_()
        self.advance()  # an earlier reduction of this bucket in the same backward
        self._full, self._filled = None, set()
        self._reducing = self.bucket.mesh.reduce.reduce_scatter(full, tag=self.bucket.tag, divisor=self.divisor)

    @torch.no_grad()
    def advance(self) -> None:
        """Once reduced along the shard axis, go on along the replicate axis."""
        if self._reducing is None:
            return
        shard, self._reducing = self._reducing.wait(), None
        if self._replicating is not None:
            self._earlier = self._replicating.wait()
        if self._held is not None:
            shard.add_(self._held)
            self._held = None
        if self.requires_all_reduce:
            self._replicating = self.bucket.mesh.replicate.all_reduce(shard, tag=self.bucket.tag)
        else:
            self._held = shard

    @torch.no_grad()
    def finish(self, used: set[int]) -> bool:
        """Wait for the reduction and publish it; False if there is none.

        Args:
            used: indices of the parameters that got a gradient on any rank. The others keep `.grad` as it is.
        """
        self.advance()
        if self._replicating is None:
            return False
        shard, self._replicating = self._replicating.wait(), None
        if self._earlier is not None:
            shard.add_(self._earlier)
            self._earlier = None
        self._accumulate(shard.to(self.main_dtype), used)
        self.used = set()
        return True

    def _accumulate(self, shard: torch.Tensor, used: set[int]) -> None:
        """Add to the main gradient if the published `.grad`s are still ours, else start a new one from theirs."""
        parameters = self.bucket.sharded_parameters
        layout, rank = self.bucket.layout, self.bucket.mesh.shard_rank
        if self._main is not None and self._is_untouched():
            self._main.add_(shard)
        else:
            for index, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    shard[layout.shard_slice(index, rank)].add_(parameter.grad)
            self._main = shard
            self._published = [None] * len(parameters)
        for index, parameter in enumerate(parameters):
            if index not in used and parameter.grad is None:
                continue
            if self._published[index] is None or self.main_dtype != self.bucket.dtype:
                parameter.grad = self._main[layout.shard_slice(index, rank)].to(self.bucket.dtype)
            assert parameter.grad is not None  # noqa: S101 -- just set, or set before
            self._published[index] = (parameter.grad, parameter.grad._version)

    def _is_untouched(self) -> bool:
        """Whether every `.grad` is the tensor published last, so that the main gradient holds its value.

        Where the dtypes differ the published tensor is a rounded copy, so a change in place counts as touched too.
        """
        copied = self.main_dtype != self.bucket.dtype
        for parameter, published in zip(self.bucket.sharded_parameters, self._published, strict=True):
            grad, version = published if published is not None else (None, 0)
            if parameter.grad is not grad or (copied and grad is not None and grad._version != version):
                return False
        return any(published is not None for published in self._published)

    def release_if_cleared(self) -> None:
        """Give the memory of the main gradient back once the user has set every `.grad` to None."""
        if self._main is not None and all(p.grad is None for p in self.bucket.sharded_parameters):
            self._main, self._published = None, []

    def reset(self) -> None:
        """Forget everything collected or under way, after a failed backward. Published `.grad`s stay."""
        for work in (self._reducing, self._replicating):
            if work is not None:
                work.wait()
        self._reducing = self._replicating = self._full = self._earlier = None
        self._filled, self.fired, self.used = set(), set(), set()


def _gaps(bucket: Bucket) -> list[tuple[int, int]]:
    """Padding between and after the parameters, as (start, stop)."""
    layout, gaps, end = bucket.layout, [], 0
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        if offset > end:
            gaps.append((end, offset))
        end = offset + spec.numel
    return [*gaps, (end, layout.full_numel)]
