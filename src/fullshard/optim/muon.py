"""Sharded Muon. One rank orthogonalizes each matrix, and all other work stays on the rank that holds the elements.

    every rank     computes momentum, direction, weight decay and update for its own interval, elementwise
    the owner      runs Newton-Schulz on the direction, which it receives in bfloat16, the dtype of the iteration

The optimizer's state is therefore one tensor per parameter, with the same layout as the parameter. The results equal
those of `torch.optim.Muon` on unsharded tensors.
"""

import math
from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import nn

from fullshard.core.errors import ConfigError
from fullshard.optim.newton_schulz import COEFFICIENTS, DTYPE, EPS, orthogonalized
from fullshard.optim.with_adamw import AdamWOptions, MatricesWithAdamW, local_gradient, local_of
from fullshard.plan.dealing import NEWTON_SCHULZ_STEPS, matrix_shape

_MOMENTUM = "momentum_buffer"
_SCALINGS = (None, "original", "match_rms_adamw")


class Muon(MatricesWithAdamW):
    """An optimizer that updates hidden matrices with Muon and the other parameters with AdamW.

    Arguments and results are the same as for `torch.optim.Muon`.

    Args:
        params: a model, whose parameters `MatrixRule` assigns; or parameters or parameter groups, in the form that
            torch's optimizers take. AdamW updates a group with `algorithm="adamw"`. A group with `flatten=True`
            contains convolutions. Without `flatten`, a parameter with three dims is a batch of matrices. A parameter
            with more dims is always flattened.
        lr, weight_decay: used for both algorithms, unless `adamw_lr` or `adamw_weight_decay` is given.
        momentum, nesterov: settings of the direction. `nesterov` selects Nesterov momentum.
        ns_coefficients, eps, ns_steps: see `newton_schulz.orthogonalized`.
        adjust_lr_fn: how the learning rate depends on the shape of a matrix. `original` (also None) multiplies it by
            sqrt(max(1, rows / columns)). `match_rms_adamw` multiplies it by 0.2 sqrt(max(rows, columns)), so that a
            learning rate tuned for AdamW can be kept.
        adamw: see `AdamWOptions`.

    Attributes:
        rule: how the parameters of the model are assigned, or None if `params` is not a model.

    Raises:
        ConfigError: a value is invalid.
        OptimizerError: a group that Muon updates contains a vector.
    """

    name, algorithm = "Muon", "muon"
    sent_as = DTYPE

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = NEWTON_SCHULZ_STEPS,
        adjust_lr_fn: str | None = None,
        **adamw: Unpack[AdamWOptions],
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, defaults, **adamw)

    def _check(self, group: dict[str, Any], where: str) -> None:
        if not group["momentum"] >= 0:
            raise ConfigError(f"{where}: momentum is {group['momentum']}, expected 0 or more")
        if group["adjust_lr_fn"] not in _SCALINGS:
            raise ConfigError(
                f"{where}: adjust_lr_fn is {group['adjust_lr_fn']!r}, expected original or match_rms_adamw"
            )

    def _given(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Update the momentum with the gradient, and return the direction to orthogonalize."""
        state = self.state[parameter]
        if not state:
            state[_MOMENTUM] = torch.zeros_like(parameter.grad)  # type: ignore[arg-type]
        gradient, momentum = local_gradient(parameter), local_of(state[_MOMENTUM])
        assert gradient is not None  # noqa: S101 -- of those that have one
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _made(self, parameter: torch.Tensor, number: int, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        return orthogonalized(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def _apply(self, parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
        """Apply weight decay and the update to the weights."""
        lr, weights = float(group["lr"]), local_of(parameter)
        _, rows, columns = matrix_shape(parameter.shape, flatten=group["flatten"])
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        else:
            ratio = math.sqrt(max(1, rows / columns)) if columns else 1.0
        weights.mul_(1 - lr * group["weight_decay"])
        weights.add_(update.to(weights.device), alpha=-lr * ratio)
