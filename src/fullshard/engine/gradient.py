"""The gradients of one bucket: collected unsharded during backward, reduced, and added to the main gradient.

collect             see `engine.unsharded_gradient`                               when autograd produces a gradient
launch              reduce-scatter along the shard axis, and divide               once per backward, in order
advance             all-reduce along the replicate axis; then to main weights     when a later bucket launches
accumulate_early    add to earlier micro-batches, if nothing else remains to do   when the reduction has ended
publish             add to the main gradient, which is published as `.grad`       at the end of backward
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fullshard.comm.base import Work
from fullshard.engine.main_gradient import MainGradient
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.unsharded_gradient import UnshardedGradient

if TYPE_CHECKING:
    from fullshard.engine.bucket import Bucket


class Gradient:
    """The gradients of a trainable bucket. In this class, `main` is the main gradient, not the main weights.

    Autograd must be disabled when `launch`, `advance` and `publish` are called.
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[ShardedParameter], *, storage_id: int | None) -> None:
        self._bucket, self.dtype = bucket, bucket.reduce_dtype
        self._is_away = bucket.plan.main_is_on_host  # `advance` copies the sum there
        self.unsharded = UnshardedGradient(bucket, parameters, storage_id=storage_id)
        self.main = MainGradient(bucket, parameters)
        self._reducing: Work | None = None
        self._replicating: Work | None = None  # set even if that axis has one rank; it then completes immediately
        self._earlier: torch.Tensor | None = None  # another reduction of the same backward
        self._partial: torch.Tensor | None = None  # sums of earlier backwards, along the shard axis only

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of the unsharded gradient in the reduction dtype."""
        return self._bucket.layout.full_numel * self.dtype.itemsize

    def launch(self) -> None:
        """Launch the reduction of the collected gradients, with zeros for parameters that were not used.

        The zeros give the reduction the same shape on every rank. If the bucket has already been reduced in this
        backward, the caller must have advanced that reduction.
        """
        self.main.check_not_torn()
        full = self.unsharded.hand_over()
        self._reducing = self._bucket.mesh.reduce.reduce_scatter(
            full,
            tag=self._bucket.tag,
            divisor=self._bucket.reduction.divisor,
            packing=self._bucket.reduce_packing,
            dtype=self.dtype,
            inspector=self._bucket.reduction.inspector,
        )

    @property
    def keeps_unreduced(self) -> bool:
        """Return whether an earlier backward left gradients in this bucket that are not reduced along both axes."""
        return self.unsharded.is_kept or self._partial is not None

    @property
    def held(self) -> list[torch.Tensor]:
        """Return the tensors that hold gradients between two backwards."""
        found = (self.unsharded.full, self._partial, self.main.tensor)
        return [tensor for tensor in found if tensor is not None]

    @property
    def is_reducing(self) -> bool:
        """Return whether a reduction along the shard axis is in progress."""
        return self._reducing is not None

    @property
    def is_arriving(self) -> bool:
        """Return whether `publish` would have to wait for other ranks, for a copy or for a hook."""
        bucket = self._bucket
        goes_on = bucket.mesh.replicate_size > 1 or self._is_away or bucket.reduction.hook is not None
        return self._reducing is not None or (goes_on and self._replicating is not None)

    def advance(self) -> None:
        """Wait for the reduction along the shard axis, and start the one along the replicate axis."""
        if self._reducing is None:
            return
        shard, self._reducing = self._reducing.wait(), None  # this frees the unsharded gradient's memory
        if self._replicating is not None:  # a bucket was reduced twice in one backward, and both results count
            self._earlier = self._replicating.wait()
        if self._partial is not None:
            shard.add_(self._partial)
            self._partial = None
        if self._bucket.reduction.requires_all_reduce:
            self._replicating = self._bucket.mesh.replicate.all_reduce(shard, tag=self._bucket.tag)
            if self._is_away:
                # Copy now, not in `publish`, so that the copy overlaps with the rest of backward.
                self._replicating = self._bucket.storage.take_gradient(self._bucket, self._replicating, shard.nbytes)
        else:
            self._partial = shard

    @property
    def adds_early(self) -> bool:
        """Return whether a main gradient exists and new gradients can be added to it before the end of backward.

        This is False for gradients on the host. The host would have to wait for a copy and compute the sum while it
        still has to launch the rest of backward.
        """
        if self.main.tensor is None:
            return False
        return self._bucket.reduction.hook is None and not self._is_away

    def accumulate_early(self) -> None:
        """Add gradients that are reduced along both axes to the main gradient, to free their memory early.

        Call this only if `adds_early` is true. It does nothing if any `.grad` is no longer part of the main gradient.
        """
        self.advance()
        if self._replicating is not None and self.main.is_untouched:
            self.main.add_early(self._arrive(self._replicating))

    def _arrive(self, replicating: Work) -> torch.Tensor:
        """Return the gradient of one backward, reduced along both axes, even if it took more than one reduction."""
        shard, self._replicating = replicating.wait(), None
        if self._earlier is not None:
            shard.add_(self._earlier)
            self._earlier = None
        return shard

    def publish(self, used: bytearray) -> bool:
        """Wait for the reduction and publish the result. Return False if there is nothing to publish.

        `used` has a flag for each parameter, set if it got a gradient on any rank. The `.grad` of other parameters does
        not change. After this, the caller must clear its record of used parameters.
        """
        self.advance()
        if self.main.is_ahead:
            self.main.publish_early(used)
            if self._replicating is None:
                return True
        if self._replicating is None:
            return False
        shard = self._arrive(self._replicating)
        self._bucket.reduction.call_hook(shard)  # the hook sees only this backward's sum
        self.main.add(shard, used)
        return True

    def reset(self) -> None:
        """Discard all gradients of a failed backward, and those that earlier backwards have kept without reducing them.

        Every `.grad` that is published already stays; see `MainGradient.mark_torn`.
        """
        for work in (self._reducing, self._replicating):
            if work is not None:
                work.wait()  # it writes to memory that is about to be freed
        self.main.mark_torn()
        self._reducing = self._replicating = self._earlier = self._partial = None
        self.unsharded.reset()
