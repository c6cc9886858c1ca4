"""The common part of SOAP and Shampoo: averages of G G^T and of G^T G, kept and used by the owner of each matrix.

every rank     sends its interval of the gradient, adds its interval of the update: element by element
the owner      factors of rows and columns, what is made of them now and then, both moments: the direction
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import nn

from fullshard.core.errors import ConfigError
from fullshard.core.matrices import MatrixCost
from fullshard.optim.with_adamw import AdamWOptions, MatricesWithAdamW, local_gradient

MEAN, SQUARES = "exp_avg", "exp_avg_sq"
SIDES = ("left", "right")


class PreconditionedMatrices(MatricesWithAdamW):
    """Hidden matrices by a subclass that has factors, all else by AdamW.

    Args:
        params: see `MatricesWithAdamW`.
        defaults: of groups of matrices, `betas`, `precondition_frequency` and `max_precond_dim` among them.
        cost: of a matrix, to its owner.
        sent_as: what gradients are sent to owners and updates back in.
        adamw: see `AdamWOptions`.

    Raises:
        ConfigError: a value that cannot be.
        OptimizerError: a vector in a group of matrices.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        defaults: dict[str, Any],
        cost: MatrixCost,
        sent_as: torch.dtype,
        **adamw: Unpack[AdamWOptions],
    ) -> None:
        if not sent_as.is_floating_point:
            raise ConfigError(f"{type(self).__name__}: sent_as is {sent_as}, expected a dtype of real numbers")
        self.cost, self.sent_as = cost, sent_as
        super().__init__(params, defaults, **adamw)

    def _check(self, group: dict[str, Any], where: str) -> None:
        for number, beta in enumerate(group["betas"]):
            check_average(f"betas[{number}]", beta, where)
        for key in ("precondition_frequency", "max_precond_dim"):
            if group[key] < 1:
                raise ConfigError(f"{where}: {key} is {group[key]}, expected 1 or more")

    def _begin(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        state.setdefault("step", torch.tensor(0.0))
        state["step"] += 1

    def _given(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        gradient = local_gradient(parameter)
        assert gradient is not None  # noqa: S101 -- of those that have one
        return gradient

    def _steps(self, parameter: torch.Tensor) -> int:
        """Return the number of the current step of a parameter, from 1."""
        return int(self.state[parameter]["step"])


def check_average(name: str, beta: float, where: str) -> None:
    """Raise `ConfigError` for a weight of what was that no average can have."""
    if not 0 <= beta < 1:
        raise ConfigError(f"{where}: {name} is {beta}, expected 0 or more, and less than 1")


class OwnedMatrix:
    """The owner's state of one matrix, held in the optimizer's state of its parameter.

    Args:
        state: of the parameter.
        number: of the matrix in it.
        device: where it computes; what was loaded or was elsewhere comes there.
    """

    def __init__(self, state: dict[str, Any], number: int, device: torch.device) -> None:
        self._state, self._number, self._device = state, number, device

    def begin(self, gradient: torch.Tensor, largest: int) -> None:
        """Begin with zero averages. A side of more than `largest` has no factor."""
        self[MEAN], self[SQUARES] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for side, dim in zip(SIDES, gradient.shape, strict=True):
            if dim <= largest:
                self[side] = gradient.new_zeros(dim, dim)

    def take_into_factors(self, gradient: torch.Tensor, beta: float) -> None:
        """Update the averages of G G^T and of G^T G."""
        for side, lines in zip(SIDES, (gradient, gradient.T), strict=True):
            if (factor := self[side]) is not None:
                factor.lerp_(lines @ lines.T, 1 - beta)

    def __getitem__(self, name: str) -> Any:
        key = f"{name}.{self._number}"
        found = self._state.get(key)
        if found is not None and found.device != self._device:
            found = self._state[key] = found.to(self._device)
        return found

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self._state[f"{name}.{self._number}"] = value
