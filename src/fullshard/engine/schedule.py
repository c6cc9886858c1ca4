"""The order of work in one model: which unit to unshard ahead, which gradient to reduce next, what ends a backward.

Ranks must communicate in the same order, whatever becomes ready first on each. `core.schedule` has that order; this
file tells it what has happened, and does what is due. A backward ends with a callback of autograd's, which reduces the
buckets that never became ready (zeros where nothing was used).
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import CommunicationError, LifecycleError
from fullshard.core.events import EventSink
from fullshard.core.schedule import BackwardPrefetch, gathered_ahead
from fullshard.engine.bucket import Bucket
from fullshard.engine.call import Call
from fullshard.engine.end_of_backward import EndOfBackward
from fullshard.engine.extension import Extensions, take_settings
from fullshard.engine.hookless_calls import HooklessCalls
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.reducer import Reducer, call_gradient_hooks
from fullshard.engine.unit import Unit
from fullshard.engine.unit_parameters import UnitState

_SETTINGS: Mapping[str, Any] = {
    "event_sink": None,
    "forward_prefetch": True,
    "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
    "is_last_backward": True,
}
"""Attributes that a script may set on any part of a model, with their defaults."""


class Schedule:
    """The order of work that the units of one model share.

    Args:
        mesh: the ranks that share the model.

    Attributes:
        units: inner units before the units around them; none until it is assembled.
        steps: optimizer steps so far.
        after_step: called with the number of steps before the first forward after a step.
        is_last_backward: whether the next backward ends an accumulation.
        keeps_parameters: whether unsharded parameters stay so until a step, where freeing them would free memory.
        keeps_gradients: whether every backward but the last leaves gradients whole and unreduced.
        extensions: capabilities beside the kernel.
        reducer: launches reductions, and publishes their results.
        hookless_calls: calls that backward leaves without a hook.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.units: list[Unit] = []
        self.event_sink: EventSink | None = None
        self.forward_prefetch = True
        self.backward_prefetch = BackwardPrefetch.BACKWARD_PRE
        self.steps = 0
        self.after_step: Callable[[int], None] | None = None
        self.extensions = Extensions(self)
        self.reducer = Reducer(self.extensions)
        self.is_last_backward = True
        self.keeps_parameters = self.keeps_gradients = False
        self._has_begun = False
        self._stepped_since_forward = False
        self._depth = 0
        # The order of the last whole forward; empty until it was verified on all ranks. A rank that gathers ahead in
        # another order than the others would wait forever.
        self._order: list[Unit] = []
        self._reduce_order: dict[Unit, int] = {}
        self._forward: list[Unit] = []
        self._last_ended: Unit | None = None
        self._participants: dict[Unit, None] = {}
        self.hookless_calls = HooklessCalls()
        self._end_of_backward: Callable[[], object] = lambda: None  # the callback; None once it can no longer be called
        self._thread = threading.get_ident()
        self._queued: set[Unit] = set()
        self._has_kept = False
        self._outer_groups: list[dist.ProcessGroup] | None = None

    def assemble(self, units: Sequence[Unit]) -> None:
        """Take over the units of a model, including those of schedules of its parts."""
        for earlier in dict.fromkeys(other for unit in units if (other := unit.schedule) is not self):
            take_settings(self, earlier, _SETTINGS)
            self.extensions.absorb(earlier.extensions)
        self.units = list(units)
        self.hookless_calls.units = self.units
        for number, unit in enumerate(units):
            unit.schedule, unit.number = self, number
            unit.reduction.watch = self.extensions.watch
        for tell in self.extensions.assembled:
            tell()
        self.know_buckets()

    def know_buckets(self) -> None:
        """Learn that a unit has its buckets now; once all have, number them."""
        if any(unit.stand_ins is not None for unit in self.units):
            return
        self._number_buckets(0)
        for tell in self.extensions.materialized:
            tell()

    def _number_buckets(self, first: int) -> None:
        for tag, bucket in enumerate(self._buckets(), first):
            bucket.tag = tag

    # -- forward ------------------------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit) -> bool:
        """Learn that a unit is about to run forward (not as a recompute); return whether it is the outermost."""
        if self._depth and unit is self.units[-1]:
            self._abandon_forward()
        self._depth += 1  # before code that may raise: end_forward is called even then
        if self._depth == 1:
            self._begin_outermost()
            for tell in self.extensions.forward_begins:
                tell()
        for tell in self.extensions.call_begins:
            tell(unit)
        self._forward.append(unit)
        return self._depth == 1

    def _abandon_forward(self) -> None:
        """Abandon a forward that ended in an interrupt from the keyboard, after which torch calls no hooks."""
        self._depth = 0
        for tell in self.extensions.forward_ends:
            tell(failed=True)
        for unit in self.units:
            unit.abandon_forward()

    def note_save(self) -> None:
        """Learn that all ranks are about to save the model."""
        for tell in self.extensions.before_save:
            tell()

    def _begin_outermost(self) -> None:
        if self._in_backward:
            self.reset()  # the last backward ended in an exception
        for tell in self.extensions.before_forward:
            tell()
        self._thread = threading.get_ident()
        if self._stepped_since_forward and torch.is_grad_enabled():
            self.steps, self._stepped_since_forward = self.steps + 1, False
            for tell in self.extensions.step_begins:
                tell()
            if self.after_step is not None:
                self.after_step(self.steps)
        if not self._has_begun:
            self.begin_use(in_forward=True)
            self._has_begun = True
            self._number_buckets(self.mesh.take_tags(len(self._buckets())))  # tags of no other model
        # The user may have changed things between steps: frozen parameters, loaded weights.
        for unit in self.units:
            unit.take_requires_grad()
            unit.reshard_if_outdated()
        self._last_ended = None
        self._forward = []

    def begin_use(self, *, in_forward: bool = False) -> None:
        """Tell the extensions that the model is about to be gathered, unless a forward has begun before."""
        if not self._has_begun:
            for tell in self.extensions.before_first_use:
                tell(in_forward=in_forward)

    def begin_call(self, unit: Unit) -> None:
        """Learn that a forward has begun that backward may come back to."""
        self._participants[unit] = None

    def end_call(self, unit: Unit, call: Call[Unit]) -> None:
        """Learn that a forward has ended; after it, backward will want the call that ended before."""
        call.previous, self._last_ended = self._last_ended, unit
        for tell in self.extensions.call_ends:
            tell(unit, call)

    def prefetch_forward(self, unit: Unit) -> None:
        """Start unsharding the units after `unit`, now that its own parameters are there."""
        if unit.gathered_after_forward is not None:
            for other in unit.gathered_after_forward:
                other.issue_unshard()
        elif self.forward_prefetch:
            ahead = gathered_ahead(self._order, len(self._forward), unit)
            if ahead is not None:
                ahead.issue_unshard()

    @property
    def is_in_forward(self) -> bool:
        """Return whether a forward is under way."""
        return self._depth > 0

    def leave_forward(self, *, failed: bool) -> bool:
        """Learn that a unit's forward is over, before its memory is freed; return whether it was the outermost."""
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return False
        for tell in self.extensions.forward_ends:
            tell(failed=failed)
        return True

    def end_forward(self, unit: Unit, *, failed: bool) -> None:
        """Learn that a unit has run forward, or failed to.

        After a failure nothing is communicated: the other ranks may be elsewhere, and waiting for them would hide the
        error.
        """
        if not self.leave_forward(failed=failed):
            return
        if not failed:
            if not self._reduce_order:
                ran = dict.fromkeys([*self._forward, *reversed(self.units)])
                self._reduce_order = {unit: -position for position, unit in enumerate(ran)}  # the last one comes first
            self._order = self._forward  # a forward that failed half-way would lack the rest
        for other in self.units:
            # Prefetched and not used, or kept for a backward that will not come.
            keeps = torch.is_grad_enabled() or other.is_kept_for_backward or not other.reshard_after_backward
            if other.state is UnitState.GATHERING or not keeps:
                other.reshard()
            other.rest()
        if not failed:
            self.settle()  # after a forward without backward the user may change main weights at once

    # -- backward -----------------------------------------------------------------------------------------------

    @property
    def _in_backward(self) -> bool:
        return self.hookless_calls.backward is not None

    def begin_backward(self, unit: Unit) -> None:
        """Learn that backward has reached `unit`; the first time, order the reductions.

        The first call also asks autograd for `_finish_backward`.
        """
        if self._in_backward and self._end_of_backward() is None:
            self._give_up_backward()  # the last one has raised, and nothing has noticed since
        if not self._in_backward:
            self._tell_of_backward()
            for each in self.units:
                each.take_requires_grad()  # a module may have changed it within its forward
            # Use an order verified on all ranks, not the units that happened to run or be alive on this one. Without
            # one (a part of the model was called on its own), the last forward comes first.
            participants = list(reversed(self._participants))
            for participant in sorted(participants, key=lambda u: self._reduce_order.get(u, 0)):
                self._enqueue(participant)
            finish = functools.partial(self._finish_backward)
            torch_private.call_after_backward(finish)
            # Autograd frees it with the backward.
            self._end_of_backward = weakref.ref(finish, self._note_dropped_backward)
            del finish
        if unit not in self._queued:
            self._enqueue(unit)

    def _note_dropped_backward(self, _: object) -> None:
        """Learn that autograd has dropped a backward: it has failed unless it has come to its end."""
        if self._in_backward:
            for tell in self.extensions.backward_fails:
                tell()

    def _tell_of_backward(self) -> None:
        for tell in self.extensions.backward_begins:  # first, because it may refuse it
            tell()
        self.hookless_calls.begin()

    def _enqueue(self, unit: Unit) -> None:
        self._queued.add(unit)
        self.reducer.order.expect(bucket for bucket in unit.buckets if bucket.trainable_count)

    def reduce_kept(self) -> None:
        """Reduce gradients that earlier backwards have kept unsharded, as if a backward ended here. A collective.

        Raises:
            LifecycleError: called within a backward, which would take the reduction for its own.
        """
        if self._in_backward:
            raise LifecycleError(
                f"rank {self.mesh.rank}: gradients are to be reduced within a backward that has not ended",
                hint="call it between backwards, on every rank; after one that failed call reset_iter_state() first",
            )
        self._tell_of_backward()
        for unit in sorted(self.units_by_backward(), key=lambda unit: self._reduce_order.get(unit, 0)):
            self._enqueue(unit)
        self._finish_backward()

    def reduce_if_kept(self) -> None:
        """Call `reduce_kept`, unless the last backward, or an earlier call since then, has reduced everything."""
        if self._has_kept:
            self.reduce_kept()

    def prefetch_backward(self, unit: Unit, call: Call[Unit]) -> None:
        """Unshard ahead what backward needs after `unit`, before `unit`'s own gradients are computed."""
        if unit.backward_prefetch is not None:
            for other in unit.backward_prefetch:
                other.issue_unshard()
        elif self.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch(call.previous)
        for tell in self.extensions.call_backward_begins:
            tell(unit, call)

    def prefetch_after_backward(self, previous: Unit | None) -> None:
        """Unshard ahead what backward needs next, after a unit's own gradients were computed."""
        if self.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch(previous)

    def _prefetch(self, unit: Unit | None) -> None:
        # A unit that backward has passed is not gathered again: which units are sharded by now may differ between
        # ranks that used different parameters.
        if unit is not None and unit.awaits_backward and unit.unshard_in_backward:
            unit.issue_unshard()

    def reduce_when_due(self, bucket: Bucket) -> None:
        """Reduce the complete gradients of `bucket`, as soon as those before it in the order have been."""
        for due in self.reducer.order.complete(bucket):
            self._launch(due)

    def _launch(self, bucket: Bucket) -> None:
        if torch.is_grad_enabled():  # under create_graph alone; backward has turned it off otherwise
            with torch.no_grad():
                self._launch(bucket)
        elif self._reduces(bucket.owner):
            with torch_private.without_transforms():
                self.reducer.launch(bucket)

    def _reduces(self, unit: Unit) -> bool:
        return unit.reduce_gradients and (self.is_last_backward or not self.keeps_gradients)

    @torch.no_grad()
    def _finish_backward(self) -> None:
        """Finish the outermost backward; autograd calls this when it is over."""
        with torch_private.without_transforms():
            self._finish()

    def _finish(self) -> None:
        self.hookless_calls.leave(after=-1)  # of other models too: the backward is over for them
        self.hookless_calls.finish_others()
        if self.reducer.publishes_early:  # other ranks may wait for it before they use gradients
            for unit in self.units:
                unit.finish_backward()
                unit.reshard()
        for bucket in self.reducer.order.rest():  # those with a parameter that got no gradient here
            self._launch(bucket)
        # After all launches, so that they overlap, and before anything is published: it may raise an error.
        used = self._agree_on_used()
        self.reducer.publish(used)
        for bucket in self.reducer.published:  # not when published: the message may have needed it until here
            bucket.gradient.unsharded.forget_used()
        for unit in self.units:
            unit.finish_backward()
        self._has_kept = not all(map(self._reduces, self.units))
        hooked = [bucket for bucket in used if bucket.has_gradient_hooks and bucket in self.reducer.published]
        self._end_backward()
        self.settle()
        for tell in self.extensions.backward_ends:
            tell(used)
        for bucket in hooked:  # at rest, because hooks may do anything
            call_gradient_hooks(bucket, used[bucket])

    def parameters(self) -> list[ShardedParameter]:
        """Return all sharded parameters."""
        return [parameter for bucket in self._buckets() for parameter in bucket.sharded_parameters]

    def outer_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of ranks that share the model along axes beside the mesh's."""
        if self._outer_groups is None:
            groups = (parameter.spec.outer_group for parameter in self.parameters())
            self._outer_groups = list(dict.fromkeys(group for group in groups if group is not None))
        return self._outer_groups

    def _buckets(self) -> list[Bucket]:
        return [bucket for unit in self.units for bucket in unit.buckets]

    def _end_backward(self) -> None:
        for unit in self.units:
            for bucket in unit.buckets:
                if bucket.has_gradient:
                    bucket.gradient.unsharded.end_backward()
        self._participants.clear()
        self._last_ended = None
        self._queued.clear()
        self.hookless_calls.end()
        self.reducer.clear()

    def _agree_on_used(self) -> dict[Bucket, bytearray]:
        """Return for each parameter of the reduced buckets whether it got a gradient on any rank.

        A parameter that no rank used must keep `.grad = None`, or weight decay would still move it. The same message
        says whether any rank has collected more than it reduced (through reentrant checkpointing, or a unit that ran
        under `no_sync` only); if so, all ranks reduce that bucket once more. It also says whether all ranks reduced the
        same buckets, and carries what extensions have to say.

        Raises:
            CommunicationError: the ranks disagree; nothing has been published yet.
        """
        trainable = [bucket for bucket in self._buckets() if bucket.has_gradient]
        launched = set(self.reducer.order.launched)
        ends = [bucket.gradient.unsharded.end(is_reduced=bucket in launched) for bucket in trainable]
        message = EndOfBackward([say() for say in self.extensions.message], ends)
        if self.mesh.control_group is not None and ends:
            last = self._forward[-1] if self._forward else self.units[-1]
            with last.waiting("end of backward (the last unit that ran forward)"):
                message.exchange(self.mesh.control_group)
        used: dict[Bucket, bytearray] = {}
        for bucket, anywhere in zip(trainable, message.buckets(), strict=True):
            if anywhere.is_reduced and anywhere.is_not_reduced:
                here = "ran" if bucket in launched else "did not run"
                raise CommunicationError(
                    f"rank {self.mesh.rank}, unit {bucket.owner.name!r}: it {here} in this backward on this rank, "
                    "which is not so on all others",
                    hint="every rank must run the same units in each step",
                )
            if anywhere.has_more:
                self._launch(bucket)
            used[bucket] = anywhere.used
        for hear, (largest, smallest) in zip(self.extensions.heard, message.notes(), strict=True):
            hear(largest, smallest)
        return used

    # -- whole model --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Bring the model back to rest after a failed step: nothing under way, everything sharded."""
        for unit in self.units:
            unit.forget_forwards()
        self._depth = 0
        self._give_up_backward()
        self._participants.clear()

    def _give_up_backward(self) -> None:
        """Forget a failed backward, but keep the forwards before it: another loss may need them."""
        if any(bucket.has_gradient and bucket.gradient.unsharded.is_kept for bucket in self._buckets()):
            warnings.warn(
                f"rank {self.mesh.rank}: a backward has failed, and with it what those before it had kept unreduced "
                "(no_sync) is lost: begin the step again",
                stacklevel=2,
            )
        for unit in self.units:
            unit.give_up_backward()  # first: wait for reductions, which write into memory dropped next
        self._has_kept = False
        participants = self._participants.copy()
        self._end_backward()
        self._participants = participants

    def recover(self) -> None:
        """Drop what a backward that ended in an exception has left; autograd does not report its end.

        Only the thread that trains can tell that from a backward under way.
        """
        if self._in_backward and torch_private.backward_under_way() == -1 and threading.get_ident() == self._thread:
            self.reset()

    @property
    def optimizer_steps(self) -> int:
        """Return the optimizer steps so far, with one that no forward has followed yet."""
        return self.steps + self._stepped_since_forward

    def before_optimizer_step(self) -> None:
        """Drop everything gathered from the old main weights, which are about to change.

        Raises:
            LifecycleError: gradients wait for a last micro-batch that has not come, or are not whole.
        """
        self.recover()  # first: a failed backward's reductions may still write where gradients are read
        if self._depth:
            self._abandon_forward()
        if self.keeps_gradients and not self.is_last_backward:
            raise LifecycleError(
                "an optimizer's step after a backward that was not to be the last: its gradients are not reduced",
                hint="call model.set_is_last_backward(True) before the last backward of a step",
            )
        for bucket in self._buckets():
            if bucket.has_gradient:
                bucket.gradient.main.check_whole()
        self._stepped_since_forward = True  # once for several optimizers
        for unit in self.units:
            unit.reshard()
        self.settle()  # a peer may still be reading main weights where they are

    def units_by_backward(self) -> list[Unit]:
        """Return the units in the order of backward: by the last forward, else by their definition."""
        return list(dict.fromkeys([*reversed(self._order), *self.units]))

    def settle(self) -> None:
        """Wait until no other rank and no copy reads main weights; after that they may change at any time.

        Raises:
            CommunicationError: another rank has ended, or did not get this far.
        """
        for storage in {unit.storage for unit in self.units}:
            storage.settle()
        for mesh in dict.fromkeys(unit.mesh for unit in self.units):
            with self.units[-1].waiting("after the last reshard"):
                mesh.gather.wait_for_readers()
