"""Shampoo, sharded: each matrix is preconditioned by one rank, which keeps what is needed for it.

Gupta et al., "Shampoo: Preconditioned Stochastic Tensor Optimization" (arXiv 1802.09568), with averages in the place of
sums, roots found now and then, and the step's size of another optimizer (Anil et al., arXiv 2002.09018), Adam as in Shi
et al. (arXiv 2309.06497).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import nn

from fullshard.core.matrices import MAX_PRECOND_DIM, ROOT_FREQUENCY, InverseRoots
from fullshard.optim.preconditioned import MEAN, SIDES, SQUARES, OwnedMatrix, PreconditionedMatrices
from fullshard.optim.with_adamw import AdamWOptions, check_not_negative, local_of

_ROOT = "_root"
_LEAST_NORM = 1e-30


class Shampoo(PreconditionedMatrices):
    """Shampoo for hidden matrices, as large a step as Adam's; AdamW for the rest.

    With M the mean gradient, L and R averages of G G^T and G^T G, a matrix moves along L^-1/4 M R^-1/4; along L^-1/2 M
    if only its rows have a factor, and as Adam moves it if neither side has, and before the first roots.

    Args:
        params: a model, whose parameters are dealt out by `MatrixRule`; or parameters, or groups of them, as torch's
            optimizers take them. A group with `algorithm="adamw"` is updated by AdamW, one with `flatten=True` has
            convolutions; a parameter of three dims is a batch of matrices otherwise, of more it is flattened.
        lr: learning rate of both, unless `adamw_lr` is given. One that was found for AdamW can be kept.
        betas: of the mean; of the factors, and of the squares that Adam's step needs.
        eps: added to the root of the squares.
        weight_decay: decoupled, of both, unless `adamw_weight_decay` is given.
        precondition_frequency: steps from one root to the next.
        max_precond_dim: rows, or columns, beyond which that side has no factor.
        root_eps: added to the factors' eigenvalues.
        sent_as: what gradients are sent to owners and updates back in. float32 gives the numbers of one process,
            bfloat16 sends half.
        adamw: see `AdamWOptions`.

    Attributes:
        rule: what became of the model's parameters; None if it was not given one.

    Raises:
        ConfigError: a value that cannot be.
        OptimizerError: a vector in a group of Shampoo's.
    """

    algorithm = "shampoo"
    owned_state = frozenset({MEAN, SQUARES, *SIDES, *(side + _ROOT for side in SIDES)})

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = ROOT_FREQUENCY,
        max_precond_dim: int = MAX_PRECOND_DIM,
        root_eps: float = 1e-12,
        *,
        sent_as: torch.dtype = torch.float32,
        **adamw: Unpack[AdamWOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
            "root_eps": root_eps,
        }
        super().__init__(params, defaults, InverseRoots(precondition_frequency, max_precond_dim), sent_as, **adamw)

    def _check(self, group: dict[str, Any], where: str) -> None:
        super()._check(group, where)
        for key in ("eps", "root_eps"):
            check_not_negative(group, key, where)

    def _made(self, parameter: torch.Tensor, number: int, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        owned = _Rooted(self.state[parameter], number, matrix.device)
        gradient = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        steps, betas = self._steps(parameter), group["betas"]
        if steps == 1:
            owned.begin(gradient, group["max_precond_dim"])
        owned.take_into_factors(gradient, betas[1])
        if steps % group["precondition_frequency"] == 0:
            owned.find_roots(1 - betas[1] ** steps, group["root_eps"])
        return owned.direction(gradient, steps, group)

    def _apply(self, parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
        """Decay, and move by the update."""
        lr, weights = float(group["lr"]), local_of(parameter)
        weights.mul_(1 - lr * group["weight_decay"])
        weights.add_(update.to(weights.device, weights.dtype), alpha=-lr)


class _Rooted(OwnedMatrix):
    """An owned matrix with roots of its factors."""

    def begin(self, gradient: torch.Tensor, largest: int) -> None:
        """Begin with zero averages. Roots have their memory from the start, so that no later step needs more."""
        super().begin(gradient, largest)
        for side in SIDES:
            if (factor := self[side]) is not None:
                self[side + _ROOT] = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)

    def find_roots(self, part: float, eps: float) -> None:
        """Compute the roots of the factors, which have seen `part` of the full weight of an average."""
        sides = [side for side in SIDES if self[side] is not None]
        for side in sides:
            values, vectors = torch.linalg.eigh(self[side] / part)
            values = values - values[0].clamp(max=0) + eps  # those below 0 are rounded
            self[side + _ROOT] = vectors * values.pow(-1 / (2 * len(sides))) @ vectors.T

    def direction(self, gradient: torch.Tensor, steps: int, group: dict[str, Any]) -> torch.Tensor:
        """Return the preconditioned mean with the norm of Adam's direction; Adam's direction before there are roots."""
        mean, squares, betas = self[MEAN], self[SQUARES], group["betas"]
        mean.lerp_(gradient, 1 - betas[0])
        squares.lerp_(gradient.square(), 1 - betas[1])
        seen, squares_seen = (1 - beta**steps for beta in betas)
        adam: torch.Tensor = (mean / seen).div_(squares.sqrt().div_(math.sqrt(squares_seen)).add_(group["eps"]))
        left, right = (self[side + _ROOT] for side in SIDES)
        if steps < group["precondition_frequency"] or (left is None and right is None):
            return adam
        turned = mean if left is None else left @ mean
        turned = turned if right is None else turned @ right
        grafted: torch.Tensor = turned * (adam.norm() / turned.norm().clamp(min=_LEAST_NORM))
        return grafted
