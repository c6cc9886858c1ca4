"""The optimizer that `prepare` returns. It takes a step only when gradient accumulation is complete."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn
from torch.optim import Optimizer

from fullshard.api.forwarding import forwarded
from fullshard.api.state import GradientState
from fullshard.core.errors import ConfigError, OptimizerError
from fullshard.engine.parameter import sharded_parameter_of
from fullshard.features import clip_grad_norm_, repoint
from fullshard.features.nonfinite import was_left_out


def check_parameters(optimizer: Optimizer, models: Iterable[nn.Module], ranks: int) -> None:
    """Refuse an optimizer that has parameters of models which are not prepared: their gradients would not be averaged.

    With a single rank, there is nothing to average, so refuse it only if none of its parameters is in a prepared model.
    """
    own = {id(parameter) for model in models for parameter in model.parameters()}
    trained, foreign = 0, []
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            trained += parameter.requires_grad
            if parameter.requires_grad and id(parameter) not in own and sharded_parameter_of(parameter) is None:
                name = group["param_names"][index] if "param_names" in group else f"parameter {index}"
                foreign.append(f"{name} of group {number}, shape {tuple(parameter.shape)}")
    if not foreign or (ranks == 1 and len(foreign) < trained):
        return
    raise OptimizerError(
        f"{len(foreign)} of the {trained} trainable parameters of {type(optimizer).__name__} do not belong to any "
        f"prepared model, for example {foreign[0]}",
        hint="create the optimizer from the parameters of the prepared model"
        if len(foreign) == trained
        else "also prepare the module that owns them (for example, a loss with weights)",
    )


def refuse_stand_in(value: Any) -> None:
    """Refuse an object that only stands in for an optimizer or scheduler, because it would not train the model."""
    name = type(value).__name__
    if isinstance(value, list | tuple | dict | type):
        what = f"the class {value.__name__}" if isinstance(value, type) else f"a {name}"
        raise ConfigError(f"prepare: got {what}", hint="pass the objects themselves: prepare(model, optimizer)")
    if isinstance(value, DummyOptim | DummyScheduler):
        raise OptimizerError(
            f"accelerate.utils.{name} is a placeholder for an object that DeepSpeed creates from its configuration "
            "file, but fullshard does not use DeepSpeed",
            hint="use a torch.optim.AdamW and its scheduler",
        )
    if not isinstance(value, Optimizer | nn.Module) and callable(getattr(value, "zero_grad", None)):
        raise OptimizerError(
            f"{type(value).__module__}.{name} is not a torch.optim.Optimizer, so it would still hold the unsharded "
            "parameters",
            hint="pass the torch optimizer that it wraps",
        )


class AcceleratedOptimizer(Optimizer):
    """Wraps an optimizer. `step` and `zero_grad` do nothing between the micro-batches of one step.

    `step_was_skipped` is True if the last step was skipped because a gradient overflowed in fp16 or was not finite.
    `models` is a list to which models that are prepared later are added. `ranks` is the number of ranks with different
    data.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scaler: torch.amp.GradScaler | None,
        clipping: float | None = None,
        models: Iterable[nn.Module] = (),
        ranks: int = 1,
    ) -> None:
        # The base class is only for isinstance checks, for example in schedulers, so its constructor is not called.
        self.optimizer = optimizer
        self.gradient_state = GradientState()
        self.gradient_state.has_optimizer = True
        self.scaler = scaler
        self.clipping = clipping
        self._models, self._ranks, self._is_checked = models, ranks, False
        self.is_unscaled = False
        self.step_was_skipped = False

    state: Any = forwarded("optimizer.state", may_set=True)
    """State per parameter."""
    param_groups: list[dict[str, Any]] = forwarded("optimizer.param_groups", may_set=True)
    """Parameter groups."""
    defaults: dict[str, Any] = forwarded("optimizer.defaults", may_set=True)
    """Default hyperparameters."""
    state_dict: Any = forwarded("optimizer.state_dict")
    """Returns the wrapped optimizer's state dict."""
    load_state_dict: Any = forwarded("optimizer.load_state_dict")
    """Loads a state dict into the wrapped optimizer."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters if the current micro-batch ends a step."""
        self.step_was_skipped = False
        if not self.gradient_state.sync_gradients:
            return None
        if not self._is_checked:
            self._check_parameters(closure)
        self.gradient_state.updates += 1
        self.gradient_state.has_optimizer = True  # a newer Accelerator may have reset it
        if self.clipping is not None:
            self._clip(self.clipping, closure)
        if self.scaler is None:
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            self.step_was_skipped = was_left_out(self.optimizer)
            return result
        scale = self.scaler.get_scale()
        result = self.scaler.step(self.optimizer, *(() if closure is None else (closure,)))
        self.scaler.update()
        self.is_unscaled = False
        # The scale shrinks exactly when a rank found an overflow, which the engine reports to all ranks.
        self.step_was_skipped = self.scaler.get_scale() < scale
        return result

    def _check_parameters(self, closure: Callable[[], Any] | None) -> None:
        """Check at the first step that the parameters belong to prepared models. By then, all are prepared."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        trains_alone = any(sharded_parameter_of(p) is None and p.grad is not None for p in parameters)
        if self._ranks > 1 or not (trains_alone or closure):
            check_parameters(self.optimizer, self._models, self._ranks)
        self._is_checked = True

    def _clip(self, limit: float, closure: Callable[[], Any] | None) -> None:
        if closure is not None:
            raise ConfigError(
                "gradient_clipping does not support a closure, which would compute the gradients after they were "
                "clipped",
                hint="remove gradient_clipping, and clip in the closure",
            )
        self.unscale()
        clip_grad_norm_((p for group in self.optimizer.param_groups for p in group["params"]), limit)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients if the current micro-batch ends a step."""
        if self.gradient_state.sync_gradients:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, at most once per step."""
        if self.scaler is not None and not self.is_unscaled:
            self.scaler.unscale_(self.optimizer)
            self.is_unscaled = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group. It may contain the original, unsharded parameters of a model that is now sharded."""
        self.optimizer.add_param_group(param_group)
        repoint(self.optimizer)
        self._is_checked = False

    def __getstate__(self) -> dict[str, Any]:
        # The base class would pickle only forwarded attributes. Leave out `step`, which a scheduler may have wrapped.
        return {name: value for name, value in vars(self).items() if name != "step"} | {"_models": (), "_ranks": 1}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __getattr__(self, name: str) -> Any:
        # Called only for names that this class lacks: helpers of the wrapped optimizer such as `.train()`.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"
