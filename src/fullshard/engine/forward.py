"""The forward passes of one model: which units have run, in which order, and which one to prefetch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fullshard.core.schedule import gathered_ahead
from fullshard.engine.call import Call
from fullshard.engine.unit_parameters import UnitState

if TYPE_CHECKING:
    from fullshard.engine.schedule import Schedule
    from fullshard.engine.unit import Unit


class Forward:
    """The forward pass in progress, and the order of units in the last complete one.

    Attributes:
        order: the units in the order of the last complete forward; empty before the first. If the orders of two ranks
            differed, one would prefetch a unit that the other does not gather, and hang. Therefore an extension
            compares the first order across ranks.
        ran: the units that the current forward, or the last one, has run so far.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.order: list[Unit] = []
        self.ran: list[Unit] = []
        self._depth = 0
        self._last_ended: Unit | None = None

    @property
    def is_under_way(self) -> bool:
        """Return whether a forward pass is in progress."""
        return self._depth > 0

    def begin(self, unit: Unit) -> bool:
        """Begin a forward of a unit that is not a recomputation. Return whether the unit is the outermost one."""
        schedule = self._schedule
        if self._depth and unit is schedule.units[-1]:  # the outermost again
            self.end_interrupted()
        self._depth += 1  # before code that may raise an error, because `end` is called even then
        if self._depth == 1:
            schedule.before_forward()
            self._depth = 1  # a reset has cleared it
            self._last_ended, self.ran = None, []
            for tell in schedule.extensions.forward_begins:
                tell()
        for tell in schedule.extensions.call_begins:
            tell(unit)
        self.ran.append(unit)
        return self._depth == 1

    def prefetch(self, unit: Unit) -> None:
        """Prefetch the units that come after `unit` in forward, once the parameters of `unit` have been gathered."""
        if unit.prefetched_in_forward is not None:
            for other in unit.prefetched_in_forward:
                other.issue_unshard()
        elif self._schedule.forward_prefetch:
            ahead = gathered_ahead(self.order, len(self.ran), unit)
            if ahead is not None:
                ahead.issue_unshard()

    def end_call(self, unit: Unit, call: Call) -> None:
        """End the forward of a unit, and record in `call` the unit that ran before it, which backward needs next."""
        call.previous, self._last_ended = self._last_ended, unit
        for tell in self._schedule.extensions.call_ends:
            tell(unit, call)

    def leave(self, *, failed: bool) -> bool:
        """Leave the forward of a unit before its memory is freed. Return whether the unit is the outermost one."""
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return False
        for tell in self._schedule.extensions.forward_ends:
            tell(failed=failed)
        return True

    def end(self, *, failed: bool) -> None:
        """End the forward of a unit after it has returned or raised an error.

        A failed forward does not communicate: other ranks may be elsewhere, and waiting for them would hide the error.
        """
        if not self.leave(failed=failed):
            return
        schedule = self._schedule
        if not failed:
            schedule.backward.order_reductions(self.ran)
            self.order = self.ran  # a failed forward would lack the other units
        for unit in schedule.units:
            # Prefetched but not used, or kept for a backward that will not happen.
            keeps = torch.is_grad_enabled() or unit.is_kept_for_backward or not unit.reshards_after_backward
            if unit.state is UnitState.GATHERING or not keeps:
                unit.reshard()
            unit.rest()
        if not failed:
            schedule.settle()  # after a forward without backward, the user may change main weights immediately

    def end_interrupted(self) -> None:
        """End a forward after a keyboard interrupt in it, because torch then does not call the forward hooks."""
        if not self._depth:
            return
        self._depth = 0
        for tell in self._schedule.extensions.forward_ends:
            tell(failed=True)
        for unit in self._schedule.units:
            unit.end_interrupted_forward()

    def reset(self) -> None:
        """Record that no forward is in progress, after the units have discarded their forward calls."""
        self._depth = 0

    def clear_last_call(self) -> None:
        """Clear the record of which unit ran last, because its backward has ended."""
        self._last_ended = None
