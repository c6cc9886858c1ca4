"""Track calls without a post-backward hook, and which models have a part in the backward under way.

If backward makes a gradient for none of a call's inputs, nothing shows that it has left the call, and that may be so on
some ranks only. The other ranks free the unit there, reduce its gradients and gather again for an earlier call; they
would wait for ranks that do not. So whenever backward reaches a call, of any model, the calls that it must have left
are ended.
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
        backward: torch's number of the backward under way, if it has come to the model; -1 for an end without one.
    """

    def __init__(self) -> None:
        self.units: Sequence[Unit] = ()
        self.backward: int | None = None
        self._calls: dict[Call, Unit] = {}  # calls that backward is in
        _models.add(weakref.ref(self, _models.discard))

    def begin(self) -> None:
        """Begin a backward that has reached the model."""
        self.backward = torch_private.backward_under_way()

    def end(self) -> None:
        """End the backward, or give it up."""
        self.backward = None
        self._calls.clear()

    def reach(self, unit: Unit, call: Call) -> None:
        """End the calls that backward has left, before `call` of `unit`, which it has reached, gathers anything."""
        self.leave(after=call.number)
        call.reach()
        if not call.inputs_left:  # others end by themselves, maybe later if autograd has several queues
            self._calls[call] = unit

    def leave(self, *, after: int) -> None:
        """End calls that began after the one of that number, in any model; -1: the backward is over."""
        models = [self, *self._others()]
        left = {call: model for model in models for call in model._calls if call.number > after}
        if left:
            self._leave(left, is_over=after < 0)

    @staticmethod
    def leave_before_recompute() -> None:
        """End calls that backward has left, before a forward that it runs again gathers anything.

        The calls in that forward get later numbers than all before, so the node that backward is at decides. In a
        backward inside it (nested reentrant checkpoints), the calls of the forward do not run in the same thread
        everywhere.
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
            else:  # freed before, with its last gradient, or at the end with all others
                call.end()
                unit.reduce_if_left()

    def finish_others(self) -> None:
        """Free units that other models have unsharded: ranks that have freed theirs wait for this rank."""
        for other in self._others():
            for unit in other.units:
                unit.finish_backward()

    def _others(self) -> list[HooklessCalls]:
        if len(_models) == 1:
            return []
        return [o for o in _all_models() if o is not self and o.backward is not None and o.backward == self.backward]


_models: set[weakref.ref[HooklessCalls]] = set()  # not a `WeakSet`, whose length takes an interpreter step


def _all_models() -> list[HooklessCalls]:
    # A copy: any may die at any moment, and is removed then; ranks may be threads.
    return [model for reference in _models.copy() if (model := reference()) is not None]
