"""The reductions of a backward: launched in the same order on all ranks, and published when they are complete.

    launch       reduce a bucket, and wait for the oldest in progress to limit the memory of unsharded gradients
    early        add gradients that have arrived to the main gradient, or publish them if an extension wants them early
    publish      publish the others at the end of backward

`core.schedule` decides which bucket is next, and `engine.backward` decides when one is complete.
"""

import contextlib
from collections.abc import Mapping

from fullshard.core.events import EventKind
from fullshard.core.schedule import Reductions
from fullshard.engine.bucket import Bucket
from fullshard.engine.extension import Extensions
from fullshard.engine.unit_parameters import UnitState

_NOTHING = contextlib.nullcontext()


class Reducer:
    """The reductions of one model.

    Attributes:
        order: the buckets that are to be reduced, that are being reduced, and that are waiting to be published.
        publishes_early: whether an extension wants each gradient of this backward as soon as it is final.
        published: the buckets published in this backward.
    """

    def __init__(self, extensions: Extensions) -> None:
        self._extensions = extensions
        self.order: Reductions[Bucket] = Reductions()
        self.publishes_early = False
        self.published: set[Bucket] = set()

    def launch(self, bucket: Bucket) -> None:
        """Launch the reduction of a bucket's gradients. Every rank must do this in the same order."""
        gradient = bucket.gradient
        bucket.owner.emit(EventKind.REDUCE_ISSUED, gradient.nbytes)
        self._advance(bucket)  # finish its earlier reduction in the same backward
        gradient.launch()
        oldest = self.order.launch(bucket)
        if oldest is not None:  # at the limit: free the oldest one's memory before allocating more
            self._advance(oldest)
        if self.publishes_early:
            self.publish_when_final()
        else:
            for each in self.order.latest():
                gradient = each.gradient
                if gradient.adds_early and self._is_over(each):
                    with each.owner.waiting("reduce"):
                        gradient.accumulate_early()

    def publish_when_final(self) -> None:
        """If an extension wants gradients early, publish the buckets whose gradients are final.

        These are the buckets to which backward will not return and of which this rank used every parameter. Which
        parameters were used only by other ranks is not known before the end.
        """
        if not self.publishes_early:
            return
        for bucket in list(self.order.waiting):
            unit = bucket.owner
            is_left = unit.state is UnitState.SHARDED and not unit.calls.pending()
            if is_left and self._is_over(bucket) and bucket.is_complete:
                self._publish(bucket, bucket.gradient.unsharded.used)

    def publish(self, used: Mapping[Bucket, bytearray]) -> None:
        """Wait for the reductions in progress, and publish every gradient that has not been published yet.

        `used` has a flag for each parameter of a bucket, set if the parameter got a gradient on any rank.
        """
        for bucket in self.order.launched:  # advance all of them first, so that their replicate-axis reductions overlap
            self._advance(bucket)
        for bucket in list(self.order.waiting):
            self._publish(bucket, used[bucket])

    def clear(self) -> None:
        """Clear the record of a backward that has ended or failed."""
        self.order.clear()
        self.published.clear()
        self.publishes_early = False

    def _is_over(self, bucket: Bucket) -> bool:
        return self.order.is_over(bucket, bucket.mesh.shard_size, bucket.mesh.replicate_size)

    def _publish(self, bucket: Bucket, used: bytearray) -> None:
        """Publish the gradient of a bucket once its reduction is complete."""
        unit, gradient = bucket.owner, bucket.gradient
        del self.order.waiting[bucket]
        with unit.waiting("reduce") if gradient.is_arriving else _NOTHING:
            is_there = gradient.publish(used)
        if not is_there:
            return
        self.published.add(bucket)
        unit.emit(EventKind.REDUCE_DONE)
        if self.publishes_early and not any(doubts() for doubts in self._extensions.doubts_gradients):
            for tell in self._extensions.bucket_is_final:
                tell(bucket)

    def _advance(self, bucket: Bucket) -> None:
        gradient = bucket.gradient
        if gradient.is_reducing:
            with bucket.owner.waiting("reduce"):
                gradient.advance()


def call_gradient_hooks(bucket: Bucket, used: bytearray) -> None:
    """Call the hooks that users have registered on the parameters of a bucket, for parameters that were used."""
    for parameter, is_used in zip(bucket.sharded_parameters, used, strict=True):
        if is_used and parameter.local_grad is not None:
            for hook in list(parameter.gradient_hooks.values()):
                hook(parameter)
