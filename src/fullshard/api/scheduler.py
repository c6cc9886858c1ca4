"""The learning-rate scheduler a script holds after `prepare`: one step per optimizer step.

Accelerate steps a scheduler once per *rank* and optimizer step. Here a schedule is counted in optimizer steps, whatever
the number of ranks, so a script computes the length of its schedule from the prepared loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fullshard.api.optimizer import AcceleratedOptimizer
from fullshard.api.state import GradientState


class AcceleratedScheduler:
    """Wraps a scheduler (anything with `step` and `state_dict`).

    Args:
        scheduler: the scheduler.
        optimizers: a step that any of them skipped is no step for the schedule.
        gradient_state: tells whether the current micro-batch ends a step.
        with_optimizer: step with the optimizer; False: at every call.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        optimizers: Sequence[AcceleratedOptimizer],
        gradient_state: GradientState,
        with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.gradient_state = gradient_state
        self.with_optimizer = with_optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if the optimizers have just stepped."""
        has_stepped = self.gradient_state.sync_gradients and not any(o.step_was_skipped for o in self.optimizers)
        if has_stepped or not self.with_optimizer:
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Current learning rate per parameter group."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
