"""Calls that backward leaves without a sign, and which models have a part in the backward under way.

Where no input of a call wants a gradient, nothing tells that backward has left it, and that may be so on some ranks
only. Others free the unit there, reduce its gradients and gather again for an earlier call: ranks that did not would
wait for them. So whatever backward comes to next, in whatever model, ends what it must have left.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from fullshard.comm import torch_private
from fullshard.engine.call import Call


class LeftUnit(Protocol):
    """What is asked of the unit of such a call."""

    def post_backward(self, call: Call[Any]) -> None:
        """Backward has left `call`."""

    def reduce_if_left(self) -> None:
        """Reduce its gradients, unless a call is still to come back."""

    def finish_backward(self) -> None:
        """The whole backward is over."""


class Unannounced:
    """Those of one model.

    Attributes:
        units: of the model.
        backward: torch's number of the backward under way, if it has come to the model; -1 for an end without one.
    """

    def __init__(self) -> None:
        self.units: Sequence[LeftUnit] = ()
        self.backward: int | None = None
        self._calls: dict[Call[Any], tuple[LeftUnit, int]] = {}  # that backward is in, with their places in its order
        _models.add(self)

    def begin(self) -> None:
        """Backward has come to the model."""
        self.backward = torch_private.backward_under_way()

    def end(self) -> None:
        """It is over, or given up."""
        self.backward = None
        self._calls.clear()

    def reach(self, unit: LeftUnit, call: Call[Any], position: int) -> None:
        """Backward comes to `call`: what it has left is ended before anything more is gathered.

        Args:
            unit: whose call it is.
            call: that of an output.
            position: of the unit, in the order in which backward comes to them.
        """
        # By their order in the forward, too: what a checkpoint runs again has later numbers than all before.
        passed = [earlier for earlier, (_, place) in self._calls.items() if place < position]
        self.leave(after=call.number, passed=passed)
        if call.inputs_left is None:
            self._calls[call] = unit, position

    def leave(self, *, after: int, passed: Collection[Call[Any]] = ()) -> None:
        """Backward has left calls that began after the one of that number, of whatever model; -1: it is over."""
        models = [self, *self._others()]
        left = {call: model for model in models for call in model._calls if call.number > after or call in passed}
        for call in sorted(left, key=lambda call: call.number, reverse=True):
            unit, _ = left[call]._calls.pop(call)
            if call.is_active and after >= 0:
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
        return [o for o in _models if o is not self and o.backward is not None and o.backward == self.backward]


_models: weakref.WeakSet[Unannounced] = weakref.WeakSet()
