"""A unit: one or more modules whose parameters are unsharded together, by hooks, when they are needed.

    pre-forward       move inputs to the device, unshard, prefetch the next unit, cast and watch inputs
    post-forward      watch the outputs' gradients, reshard, cast outputs
    pre-backward      unshard, prefetch the previous unit (runs when the gradient of an output exists)
    post-backward     reshard, hand the gradients over for reduction (runs when all inputs have gradients)

A `Call` (`engine.call`) is one forward of the unit that may have a backward. The unit refers to its calls weakly. The
hooks on the outputs own them, so when a graph is freed, its calls are freed too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.comm import torch_private
from fullshard.core.errors import LifecycleError
from fullshard.core.events import EventKind
from fullshard.engine.bucket import Bucket
from fullshard.engine.bucket_spec import by_bucket
from fullshard.engine.call import Call, Calls, uncompiled
from fullshard.engine.gradient_hooks import GradientHooks
from fullshard.engine.kinds import kind_of
from fullshard.engine.precision import MixedPrecisionPolicy, cast_floating, map_tensors, moved
from fullshard.engine.storage import Storage
from fullshard.engine.unit_parameters import UnitParameters, UnitState
from fullshard.wrap.partition import UnitPlan, Values

if TYPE_CHECKING:
    from fullshard.engine.schedule import Schedule


class Unit(UnitParameters):
    """The engine's state of one unit.

    Attributes:
        asked_to_reshard: whether to reshard between forward and backward. None: unless it is the outermost unit.
        prefetched_in_forward, prefetched_in_backward: the units to prefetch while this one runs; None means the unit
            that is next in order.
        is_kept_for_backward: whether the unit stays unsharded until the backward pass ends, because no output hook will
            signal its start.
    """

    def __init__(
        self,
        plan: UnitPlan,
        *,
        policy: MixedPrecisionPolicy,
        storage: Storage,
        schedule: Schedule,
        reshards_after_forward: bool | None,
    ) -> None:
        self.asked_to_reshard = reshards_after_forward
        self.reshards_after_forward = reshards_after_forward is not False
        self.reshards_after_backward = True
        self.reduce_gradients = self.unshard_in_backward = True
        self.is_kept_for_backward = False
        self.prefetched_in_forward: list[Unit] | None = None
        self.prefetched_in_backward: list[Unit] | None = None
        self.calls = Calls()
        self._current: list[Call] = []  # calls with a forward in progress
        self._ran: set[int] = set()  # modules that have run, until the last one has
        self._running = 0
        self._is_in_method = self._is_outermost = False
        super().__init__(plan, policy=policy, storage=storage, schedule=schedule)
        for module in self.modules:
            module.register_forward_pre_hook(uncompiled(self._pre_forward), prepend=True, with_kwargs=True)
            # always_call: an exception inside forward must not leave the unit unsharded
            module.register_forward_hook(uncompiled(self._post_forward), always_call=True)

    def allocate(self, values: Values | None = None) -> None:
        """Create the buckets and watch their gradients. `values` supplies the values of parameters without memory."""
        buckets = []
        for number, slots in enumerate(by_bucket(self.slots, self.policy)):
            bucket_type = kind_of(slots[0].parameter).bucket_type or Bucket
            buckets.append(bucket_type(slots, owner=self, number=number, weights=values))
        self.set_buckets(buckets)
        self._gradient_hooks = GradientHooks()
        for bucket in self.buckets:
            if bucket.has_gradient:
                self.watch_gradients(bucket)

    def watch_gradients(self, bucket: Bucket) -> None:
        """Register hooks that collect the gradients of `bucket`."""
        self._gradient_hooks.watch(self, bucket)

    def run_method(self, module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a module with the hooks of its forward, unless a forward of the unit is in progress."""
        if self._running and not self.is_at_rest:
            return method(*args, **kwargs)
        try:
            args, kwargs = self._pre_forward(module, args, kwargs)
            self._is_in_method = True  # a forward called by the method is part of it
            output = method(*args, **kwargs)
        except BaseException:
            self._is_in_method = False
            self._post_forward(module, args, None)
            raise
        self._is_in_method = False
        cast = self._post_forward(module, args, output)
        return output if cast is None else cast

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_in_method:
            return args, kwargs
        in_backward = torch_private.backward_under_way() != -1
        if in_backward:  # a recomputation is not a forward of the model, so it changes neither order nor depth
            self.schedule.backward.hookless_calls.leave_before_recompute()
        else:
            self._is_outermost = self.schedule.forward.begin(self)
        if self._is_outermost:  # as in torch, move inputs that are still on the host, even for a recomputation
            args, kwargs = moved((args, kwargs), self.schedule.mesh.device)
        self._running += 1
        self.unshard()
        if not in_backward:  # after this unit's gathers, because a communicator runs gathers in launch order
            self.schedule.forward.prefetch(self)
        self.emit(EventKind.FORWARD_BEGIN)
        if self.policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), self.policy.param_dtype)
        # In backward, a live call means a recomputation with a graph that never runs backward. Reentrant checkpoints
        # have no call.
        if torch.is_grad_enabled() and not (in_backward and self.calls.are_expected):
            self.schedule.backward.note_call(self)
            call = Call()
            self._current.append(call)
            args, kwargs = call.watch_inputs(self, args, kwargs)
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._is_in_method:
            return None
        in_backward = torch_private.backward_under_way() != -1
        self._running = max(0, self._running - 1)
        self.emit(EventKind.FORWARD_END)
        self._ran.add(id(module))
        # This also runs if forward raised an error (always_call).
        failed = output is None and sys.exc_info()[0] is not None
        if not failed:
            # Copy views of parameters, because resharding the unit frees their memory.
            output = map_tensors(lambda t: t.clone() if self.has_view(t) else t, output)
            for tell in self.schedule.extensions.unit_ran:
                tell(self)
        call = self._current.pop() if self._current else None
        if call is not None and not failed:
            self.schedule.forward.end_call(self, call)
            if call.watch_outputs(self, output):
                self.calls.add(call)
            elif any(bucket.trainable_count for bucket in self.buckets):
                self.is_kept_for_backward = True  # no hook will announce its backward
        try:
            if len(self._ran) == len(self.modules):  # the last of the modules unsharded together reshards them
                self._ran.clear()
                keep = in_backward or self.is_kept_for_backward or not self.reshards_after_forward
                if (failed and not in_backward) or not (keep or any(call.is_active for call in self.calls.live())):
                    self.reshard(is_after_forward=torch.is_grad_enabled() and not (failed or in_backward))
        except BaseException:  # another rank has exited, so memory shared with it cannot be freed
            if not in_backward:
                self.schedule.forward.leave(failed=True)
            raise
        if not in_backward:
            self.schedule.forward.end(failed=failed)
        return cast_floating(output, self.policy.output_dtype)

    def begin_backward(self) -> None:
        """Begin the model's backward at the first gradient of this unit, in case no output hook has begun it."""
        if self.state is UnitState.GATHERING and self.freed_nbytes:
            raise LifecycleError(
                f"rank {self.mesh.rank}, {self}: backward reached its parameters before any of its "
                "outputs, while they were still being gathered, so their gradients would be wrong",
                hint=(
                    "return everything that contributes to the loss from its forward, even an auxiliary loss stored "
                    "on the module, or keep the unit unsharded: set_reshard_after_forward(False)"
                ),
            )
        self.schedule.backward.begin(self)

    def pre_backward(self, call: Call) -> None:
        """Unshard the parameters, because backward has reached an output of `call`."""
        if torch.is_grad_enabled() and not (self.is_pinned or all(bucket.shares_main for bucket in self.buckets)):
            raise LifecycleError(
                f"rank {self.mesh.rank}, {self}: backward with create_graph=True (also used by "
                "torch.func's grad, jacrev and hessian) would read parameters again after they were freed",
                hint="run the forward and every backward through its result inside `with unsharded(model)`",
            )
        self.schedule.backward.begin(self)
        if call.is_active:  # another output came first
            return
        self.schedule.backward.hookless_calls.reach(self, call)
        call.begin()
        self._gradient_hooks.stay_last()
        if self.unshard_in_backward:
            self.unshard()
        self.schedule.backward.prefetch(self, call)
        self.emit(EventKind.BACKWARD_BEGIN)

    def post_backward(self, call: Call) -> None:
        """Reshard the parameters and reduce the gradients, because backward has left `call`."""
        self.schedule.backward.hookless_calls.leave(after=call.number)
        call.end()
        self.emit(EventKind.BACKWARD_END)
        pending = self.calls.pending()
        is_over = not any(c.is_active for c in pending) and (len(self.modules) == 1 or not pending)
        if is_over:
            self._reshard_after_backward(call.previous)
        if not pending:
            self._reduce()
        if is_over:  # after the reductions, because other ranks may have launched them at the last gradient
            self.schedule.backward.prefetch_after(call.previous)
        self.schedule.backward.reducer.publish_when_final()

    def reduce_if_left(self) -> None:
        """Reduce the unit's gradients, unless backward has yet to reach a call that will add to them."""
        if not self.calls.pending():
            self._reduce()

    def _reduce(self) -> None:
        for bucket in self.buckets:
            self.schedule.backward.reduce_when_due(bucket)

    def gradients_complete(self, bucket: Bucket) -> None:
        """Reduce `bucket` when its turn comes, because autograd has accumulated all its gradients."""
        if any(not call.is_active for call in self.calls.pending()):
            return  # on other ranks, a later call adds to these gradients before they are reduced
        self.schedule.backward.reduce_when_due(bucket)
        if all(each is bucket or each.is_complete for each in self.buckets):
            self._reshard_if_passed()
        self.schedule.backward.reducer.publish_when_final()

    def _reshard_if_passed(self) -> None:
        """Reshard if all gradients exist and no hook will signal that backward has left the calls."""
        # If an input requires a gradient, or a parameter is frozen, backward may still read a parameter.
        calls = [call for call in self.calls.live() if call.is_in_backward]
        if not any(call.has_inputs for call in calls):
            for call in calls:
                call.end()
            self._reshard_after_backward(None)

    def _reshard_after_backward(self, previous: Unit | None) -> None:
        if self.reshards_after_backward and previous is not self:  # they are equal if the same unit is next
            self.reshard()

    def end_backward(self) -> None:
        """End all calls at the end of the complete backward. Reshard unless `reshards_after_backward` is false."""
        for call in self.calls.live():
            call.end()
        self.is_kept_for_backward = False
        if self.reshards_after_backward:
            self.reshard()
        self.rest()

    def end_interrupted_forward(self) -> None:
        """Return to rest after a forward that ended without its hooks. Keep gradients collected earlier."""
        self._running = 0
        self._current.clear()
        self._ran.clear()
        self.reshard()

    def reset(self) -> None:
        """Discard all forward calls after a failed step."""
        self._running = 0
        self.calls.clear()
        self._current.clear()
        self._ran.clear()
        self.is_kept_for_backward = False

    def reset_backward(self) -> None:
        """Discard a failed backward. Keep the forward calls, because another backward may still reach them."""
        for call in self.calls.live():
            call.is_active = False
        for bucket in self.buckets:
            if bucket.has_gradient:
                with self.waiting("reduce"):
                    bucket.gradient.reset()
        if not self.is_kept_for_backward:
            self.reshard()
