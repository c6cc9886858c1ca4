"""Calls that backward leaves without a sign, and which models have a part in the backward under way.

Where a call has no input whose gradient backward makes, nothing tells that it has been left, and that may be so on some
ranks only. Others free the unit there, reduce its gradients and gather again for an earlier call: ranks that did not
would wait for them. So whatever backward comes to next, in whatever model, ends what it must have left.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

from fullshard.comm import torch_private
from fullshard.engine.call import Call, HookedUnit


class Unannounced:
    """Those of one model.

    Attributes:
        units: of the model.
        backward: torch's number of the backward under way, if it has come to the model; -1 for an end without one.
    """

    def __init__(self) -> None:
        self.units: Sequence[HookedUnit] = ()
        self.backward: int | None = None
        self._calls: dict[Call[Any], HookedUnit] = {}  # that backward is in
        _models.add(weakref.ref(self, _models.discard))

    def begin(self) -> None:
        """Backward has come to the model."""
        self.backward = torch_private.backward_under_way()

    def end(self) -> None:
        """It is over, or given up."""
        self.backward = None
        self._calls.clear()

    def reach(self, unit: HookedUnit, call: Call[Any]) -> None:
        """Backward has come to `call` of `unit`: what it has left is ended before anything more is gathered."""
        self.leave(after=call.number)
        call.reach()
        if not call.inputs_left:  # the others end by themselves; where autograd has several queues, maybe later
            self._calls[call] = unit

    def leave(self, *, after: int) -> None:
        """Backward has left calls that began after the one of that number, of whatever model; -1: it is over."""
        models = [self, *self._others()]
        left = {call: model for model in models for call in model._calls if call.number > after}
        if left:
            self._leave(left, is_over=after < 0)

    @staticmethod
    def leave_before_recompute() -> None:
        """Backward runs a forward again: what it has left is ended before anything is gathered for that.

        The calls in it get later numbers than all before, so what tells is the node that backward is at. In a backward
        inside that (reentrant checkpoints in one another) those of the forward are not the same thread's everywhere.
        """
        node, backward = torch_private.node_under_way(), torch_private.backward_under_way()
        if node is not None:
            models = [model for model in _all_models() if model.backward == backward]
            Unannounced._leave({call: model for model in models for call in model._calls if call.node > node})

    @staticmethod
    def _leave(left: dict[Call[Any], Unannounced], *, is_over: bool = False) -> None:
        for call in sorted(left, key=lambda call: call.number, reverse=True):
            unit = left[call]._calls.pop(call)
            if call.is_active and not is_over:
                unit.post_backward(call)
            else:  # freed before, with its last gradient, or with all others at the end
                call.end()
                unit.reduce_if_left()

    def finish_others(self) -> None:
        """Free what other models have unsharded, for which ranks wait that have done so already."""
        for other in self._others():
            for unit in other.units:
                unit.finish_backward()

    def _others(self) -> list[Unannounced]:
        if len(_models) == 1:
            return []
        return [o for o in _all_models() if o is not self and o.backward is not None and o.backward == self.backward]


_models: set[weakref.ref[Unannounced]] = set()  # not a `WeakSet`, whose length takes a step of the interpreter


def _all_models() -> list[Unannounced]:
    return list(filter(None, map(operator.call, _models.copy())))  # one may go at any moment, and is taken out then
