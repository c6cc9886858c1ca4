"""The backward pass of one model: prefetching, the order of reductions, and the end of the pass.

All ranks must communicate in the same order, although different buckets may become ready first on each rank.
`core.schedule` computes this order. This module reports events to it and performs the operations that are due. An
autograd callback ends the pass: it reduces buckets that never became ready, with zeros for unused parameters.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from fullshard.comm import torch_private
from fullshard.core.errors import CommunicationError, LifecycleError
from fullshard.core.schedule import BackwardPrefetch
from fullshard.engine.bucket import Bucket
from fullshard.engine.call import Call
from fullshard.engine.end_of_backward import EndOfBackward
from fullshard.engine.hookless_calls import HooklessCalls
from fullshard.engine.reducer import Reducer, call_gradient_hooks

if TYPE_CHECKING:
    from fullshard.engine.schedule import Schedule
    from fullshard.engine.unit import Unit


class Backward:
    """The state of the current backward pass, and what it needs to know about earlier forward passes."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.reducer = Reducer(schedule.extensions)
        self.hookless_calls = HooklessCalls()
        self._reduce_order: dict[Unit, int] = {}
        self._participants: dict[Unit, None] = {}  # units with a call since the last backward
        self._queued: set[Unit] = set()  # units with buckets in the order of reductions
        self._has_kept = self._may_fail = False
        # autograd's callback; None once it cannot be called any more
        self._callback: Callable[[], object] = lambda: None

    @property
    def is_under_way(self) -> bool:
        """Return whether a backward pass is in progress, or has failed without the engine having detected it."""
        return self.hookless_calls.backward is not None

    def note_call(self, unit: Unit) -> None:
        """Record that `unit` has run forward, so that the next backward pass is expected to reach it."""
        self._participants[unit] = None

    def order_reductions(self, ran: Sequence[Unit]) -> None:
        """Set the order of reductions to the reverse of the forward order `ran`, unless it has been set before."""
        if not self._reduce_order:
            every = dict.fromkeys([*ran, *reversed(self._schedule.units)])
            self._reduce_order = {unit: -position for position, unit in enumerate(every)}

    def begin(self, unit: Unit) -> None:
        """Begin the backward pass unless one is in progress, and add `unit`'s buckets to the order of reductions."""
        if self.is_under_way and self._callback() is None:
            self.reset(keeps_forwards=True)  # the last one raised an error that nothing has detected yet
        if not self.is_under_way:
            self._announce()
            for each in self._schedule.units:
                each.take_requires_grad()  # a module may have changed it in its forward
            # Use an order verified on all ranks, not the units that happen to have run or be alive on this one. If none
            # exists, because only part of the model was called, the last forward comes first.
            participants = list(reversed(self._participants))
            for participant in sorted(participants, key=lambda u: self._reduce_order.get(u, 0)):
                self._enqueue(participant)
            self._may_fail = True
            end = functools.partial(self.end)
            torch_private.call_after_backward(end)
            # Autograd frees it with the backward.
            self._callback = weakref.ref(end, self._tell_failure)
            del end
        if unit not in self._queued:
            self._enqueue(unit)

    def _tell_failure(self, _: object) -> None:
        """Notify the extensions if autograd discarded the backward pass, because of an error, before it ended."""
        if self._may_fail:  # not `is_under_way`: a thread of autograd may free it when the model is at rest again
            self._may_fail = False
            for tell in self._schedule.extensions.backward_fails:
                tell()

    def _announce(self) -> None:
        for tell in self._schedule.extensions.backward_begins:  # first, because it may raise an error
            tell()
        self.hookless_calls.begin()

    def _enqueue(self, unit: Unit) -> None:
        self._queued.add(unit)
        self.reducer.order.expect(bucket for bucket in unit.buckets if bucket.trainable_count)

    def reduce_if_kept(self) -> None:
        """Reduce the gradients that earlier backward passes kept, as at the end of one. All ranks must call this."""
        if not self._has_kept:
            return
        if self.is_under_way:  # it would treat the reduction as part of itself
            raise LifecycleError(
                f"rank {self._schedule.mesh.rank}: gradients cannot be reduced while a backward is in progress",
                hint="do this between backwards, on every rank; after a failed backward, call reset_iter_state() first",
            )
        self._announce()
        for unit in sorted(self._schedule.units_by_backward(), key=lambda unit: self._reduce_order.get(unit, 0)):
            self._enqueue(unit)
        self.end()

    def prefetch(self, unit: Unit, call: Call) -> None:
        """Gather parameters that backward needs after `unit`'s, before it computes `unit`'s gradients."""
        if unit.prefetched_in_backward is not None:
            for other in unit.prefetched_in_backward:
                other.issue_unshard()
        elif self._schedule.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch(call.previous)
        for tell in self._schedule.extensions.call_backward_begins:
            tell(unit, call)

    def prefetch_after(self, previous: Unit | None) -> None:
        """Gather `previous`, the unit that backward needs next, after the gradients of another unit are computed."""
        if self._schedule.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch(previous)

    def _prefetch(self, unit: Unit | None) -> None:
        # Do not gather a unit again that backward has passed: ranks that used different parameters may differ in which
        # units are sharded by now.
        if unit is not None and unit.calls.pending() and unit.unshard_in_backward:
            unit.issue_unshard()

    def reduce_when_due(self, bucket: Bucket) -> None:
        """Record that the gradients of `bucket` are complete, and launch every reduction that is now due."""
        for due in self.reducer.order.complete(bucket):
            self._launch(due)

    def _launch(self, bucket: Bucket) -> None:
        if torch.is_grad_enabled():  # only under create_graph; otherwise backward has disabled gradients
            with torch.no_grad():
                self._launch(bucket)
        elif self._reduces(bucket.owner):
            with torch_private.without_transforms():
                self.reducer.launch(bucket)

    def _reduces(self, unit: Unit) -> bool:
        return unit.reduce_gradients and (self._schedule.is_last_backward or not self._schedule.keeps_gradients)

    @torch.no_grad()
    def end(self) -> None:
        """End the outermost backward pass. Autograd calls this after its last gradient."""
        with torch_private.without_transforms():
            self._end()

    def _end(self) -> None:
        self.hookless_calls.leave(after=-1)  # also of other models, because backward has ended for them
        self.hookless_calls.end_others()
        if self.reducer.publishes_early:  # ranks that step early wait until no rank reads their main weights
            for unit in self._schedule.units:
                unit.end_backward()
                unit.reshard()
        for bucket in self.reducer.order.remaining():  # buckets with a parameter that got no gradient on this rank
            self._launch(bucket)
        # After all launches, so that they overlap, and before anything is published: it may raise an error.
        used = self._agree_on_used()
        self.reducer.publish(used)
        self._may_fail = False
        for bucket in self.reducer.published:  # only now, because the message needed it after publication
            bucket.gradient.unsharded.clear_used()
        for unit in self._schedule.units:
            unit.end_backward()
        self._has_kept = not all(map(self._reduces, self._schedule.units))
        hooked = [bucket for bucket in used if bucket.has_gradient_hooks and bucket in self.reducer.published]
        self._participants.clear()
        self._clear()
        self._schedule.settle()
        for tell in self._schedule.extensions.backward_ends:
            tell(used)
        for bucket in hooked:  # at rest, because hooks may run any code
            call_gradient_hooks(bucket, used[bucket])

    def _clear(self) -> None:
        for unit in self._schedule.units:
            for bucket in unit.buckets:
                if bucket.has_gradient:
                    bucket.gradient.unsharded.end_backward()
        self._schedule.forward.clear_last_call()
        self._queued.clear()
        self.hookless_calls.end()
        self.reducer.clear()

    def _agree_on_used(self) -> dict[Bucket, bytearray]:
        """Exchange the final message. Return, for each reduced bucket, which parameters were used on any rank."""
        # A parameter that no rank used must keep `.grad = None`, or weight decay would still update it. If any rank
        # collected more than it reduced (reentrant checkpointing, a unit run only under `no_sync`), all reduce again.
        collecting = [bucket for bucket in self._schedule.buckets() if bucket.has_gradient]
        launched = set(self.reducer.order.launched)
        ends = [bucket.gradient.unsharded.bucket_end(is_reduced=bucket in launched) for bucket in collecting]
        message = EndOfBackward([say() for say in self._schedule.extensions.message], ends)
        if self._schedule.mesh.control_group is not None and ends:
            ran = self._schedule.forward.ran
            last = ran[-1] if ran else self._schedule.units[-1]
            with last.waiting("end of backward (the last unit that ran forward)"):
                message.exchange(self._schedule.mesh.control_group)
        used: dict[Bucket, bytearray] = {}
        for bucket, anywhere in zip(collecting, message.buckets(), strict=True):
            if anywhere.is_reduced and anywhere.is_not_reduced:
                here = "ran" if bucket in launched else "did not run"
                raise CommunicationError(
                    f"rank {bucket.mesh.rank}, {bucket.owner}: the unit {here} in this backward on this "
                    "rank, but other ranks differ",
                    hint="run the same units on every rank in each step",
                )
            if anywhere.has_more:
                self._launch(bucket)
            used[bucket] = anywhere.used
        for hear, (largest, smallest) in zip(self._schedule.extensions.heard, message.notes(), strict=True):
            hear(largest, smallest)
        return used

    def reset(self, *, keeps_forwards: bool = False) -> None:
        """Discard a failed backward pass. With `keeps_forwards`, keep the earlier forward passes for another loss."""
        if any(bucket.has_gradient and bucket.gradient.keeps_unreduced for bucket in self._schedule.buckets()):
            warnings.warn(
                f"rank {self._schedule.mesh.rank}: a backward has failed, so the unreduced gradients of earlier "
                "backwards (no_sync) are lost; start the step again",
                stacklevel=2,
            )
        for unit in self._schedule.units:
            unit.reset_backward()  # first, to wait for reductions that write to memory freed below
        self._has_kept = False
        if not keeps_forwards:
            self._participants.clear()
        self._clear()
