"""Track calls without a post-backward hook, and the models that take part in the current backward.

If backward computes no gradient for any input of a call, no hook signals that backward has left the call. This may
happen on some ranks only. The other ranks then free the unit, reduce its gradients, and gather again for an earlier
call, so they would wait forever for the ranks without a hook. Therefore, whenever backward reaches a call of any model,
this module ends the calls that backward must have left by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fullshard.comm import torch_private
from fullshard.engine.call import Call

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit


class HooklessCalls:
    """The calls of one model that have no post-backward hook.

    Attributes:
        units: the units of the model.
        backward: torch's number for the current backward if it has reached the model, otherwise None; -1 if gradients
            are reduced outside any backward.
    """

    def __init__(self) -> None:
        self.units: Sequence[Unit] = ()
        self.backward: int | None = None
        self._calls: dict[Call, Unit] = {}  # calls that backward is in
        _models.add(weakref.ref(self, _models.discard))

    def begin(self) -> None:
        """Record that the current backward has reached the model."""
        self.backward = torch_private.backward_under_way()

    def end(self) -> None:
        """Record that the backward has ended or failed."""
        self.backward = None
        self._calls.clear()

    def reach(self, unit: Unit, call: Call) -> None:
        """End the calls that backward has left, before `call` of `unit`, which it reaches next, gathers anything."""
        self.leave(after=call.number)
        call.reach()
        if not call.inputs_left:  # other calls end on their own, perhaps later if autograd has several queues
            self._calls[call] = unit

    def leave(self, *, after: int) -> None:
        """End the calls of all models that have numbers above `after`, or all calls if `after` is -1."""
        models = [self, *self._others()]
        left = {call: model for model in models for call in model._calls if call.number > after}
        if left:
            self._leave(left, is_over=after < 0)

    @staticmethod
    def leave_before_recompute() -> None:
        """End calls that backward has left, before a recomputation gathers anything.

        The calls of the recomputation get higher numbers than all earlier calls. Therefore the autograd node that is
        running decides which calls to end. A backward inside the recomputation (nested reentrant checkpoints) does not
        always run in the same thread as the calls of that forward.
        """
        node, backward = torch_private.node_under_way(), torch_private.backward_under_way()
        if node is not None:
            models = [model for model in _all_models() if model.backward == backward]
            HooklessCalls._leave({call: model for model in models for call in model._calls if call.first_node > node})

    @staticmethod
    def _leave(left: dict[Call, HooklessCalls], *, is_over: bool = False) -> None:
        for call in sorted(left, key=lambda call: call.number, reverse=True):
            unit = left[call]._calls.pop(call)
            if call.is_active and not is_over:
                unit.post_backward(call)
            else:  # freed earlier with its last gradient, or at the end with all others
                call.end()
                unit.reduce_if_left()

    def end_others(self) -> None:
        """End the backward of the units of other models. Ranks that have already ended theirs wait for this rank."""
        for other in self._others():
            for unit in other.units:
                unit.end_backward()

    def _others(self) -> list[HooklessCalls]:
        if len(_models) == 1:
            return []
        return [o for o in _all_models() if o is not self and o.backward is not None and o.backward == self.backward]


_models: set[weakref.ref[HooklessCalls]] = set()  # a `WeakSet` computes its length in Python


def _all_models() -> list[HooklessCalls]:
    # Copy the set: a model may be freed, and removed from it, at any time, and ranks may be threads.
    return [model for reference in _models.copy() if (model := reference()) is not None]
