"""The learning-rate scheduler that `prepare` returns, which steps with the optimizer.

As in Accelerate, it steps once per *rank* and optimizer step, unless loaders split their batches over the ranks. A
script can therefore compute the length of its schedule from the loader before `prepare`.
"""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from fullshard.api import torch_private
from fullshard.api.optimizer import AcceleratedOptimizer
from fullshard.api.state import GradientState
from fullshard.core.errors import OptimizerError
from fullshard.engine.parameter import sharded_parameters


class AcceleratedScheduler:
    """Wraps a scheduler, which can be any object with `step` and `state_dict`.

    The schedule advances by `steps` at each optimizer step, unless an optimizer skipped that step. If `with_optimizer`
    is False, the schedule advances by one at every call.
    """

    def __init__(
        self, scheduler: Any, *, optimizers: Sequence[AcceleratedOptimizer], with_optimizer: bool = True, steps: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.gradient_state = GradientState()
        self.with_optimizer = with_optimizer
        self.steps = steps
        self._is_checked = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if the optimizers have just stepped.

        Raises:
            OptimizerError: the schedule belongs to an optimizer that was not prepared.
        """
        if not self._is_checked:
            self._check_optimizer()
        if not self.with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif self.gradient_state.sync_gradients and not any(one.step_was_skipped for one in self.optimizers):
            for _ in range(self.steps):
                # A schedule of fixed length raises at its end, which an incomplete last step of an epoch may pass.
                if torch_private.steps_of(self.scheduler) <= getattr(self.scheduler, "total_steps", float("inf")):
                    self.scheduler.step(*args, **kwargs)

    def _check_optimizer(self) -> None:
        """Check at the first step that the schedule's optimizer is prepared. By then, all objects are prepared."""
        held = getattr(self.scheduler, "optimizer", None)
        if isinstance(held, Optimizer) and self.optimizers and not sharded_parameters(held):
            groups = {id(group) for optimizer in self.optimizers for group in optimizer.param_groups}
            if groups.isdisjoint(map(id, held.param_groups)):
                raise OptimizerError(
                    f"the {type(self.scheduler).__name__} schedules an {type(held).__name__} that was not prepared, "
                    "so the learning rate of the prepared optimizer would not change",
                    hint="create the scheduler from the optimizer that is prepared",
                )
        self._is_checked = True

    def __getattr__(self, name: str) -> Any:
        # Forward everything else, such as `get_last_lr`, `state_dict` and `load_state_dict`.
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
