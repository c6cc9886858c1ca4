"""`torchacc.amp`: the loss scaler for float16."""

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.core.errors import OptimizerError
from fullshard.integrations.torchacc.eager import lazy_device

_scaled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class GradScaler(torch.amp.GradScaler):
    """A loss scaler like torch's. If a gradient overflows on any rank, all ranks skip the step.

    Args:
        init_scale: The initial scale.
        growth_factor: The factor by which the scale grows after `growth_interval` steps without overflow.
        backoff_factor: The factor by which the scale shrinks after an overflow.
        growth_interval: The number of steps without overflow after which the scale grows.
        enabled: If False, losses are not scaled and no steps are skipped.
        use_zero_grad: Has no effect. In TorchAcc, an overflow leads to a step with zero gradients instead of a skipped
            step; here the step is always skipped.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ) -> None:
        if use_zero_grad:
            warnings.warn("GradScaler(use_zero_grad=True) has no effect here: the step is skipped", stacklevel=2)
        super().__init__(lazy_device().type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Perform the optimizer step unless a gradient overflowed on some rank."""
        if self.is_enabled():
            _scaled.add(optimizer)
        return super().step(optimizer, *args, **kwargs)


def require_scaler(model: nn.Module) -> None:
    """Make every optimizer refuse to update `model` without a loss scaler: small float16 gradients would underflow."""
    reference = weakref.ref(model)

    def check(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        model = reference()
        if model is None or optimizer in _scaled:
            return
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise OptimizerError(
                f"{type(optimizer).__name__} updates a model that computes in float16, but it does not use a loss "
                "scaler",
                hint=(
                    "use scaler = torchacc.amp.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); "
                    "scaler.update(). Or use compute.bf16, which does not need a scaler"
                ),
            )

    register_optimizer_step_pre_hook(check)
