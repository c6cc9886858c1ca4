"""SOAP, sharded: each matrix is preconditioned by one rank, which keeps what is needed for it.

    every rank     sends its interval of the gradient, adds its interval of the update: element by element
    the owner      factors of rows and columns, their eigenvectors, Adam's moments in that basis

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv 2409.11321), algorithm 3; the order of a step,
and what it leaves out of the first, are those of the authors' program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import nn

from fullshard.core.matrices import MAX_PRECOND_DIM, PRECONDITION_FREQUENCY, Eigenbases
from fullshard.optim.preconditioned import MEAN, SIDES, SQUARES, OwnedMatrix, PreconditionedMatrices, check_average
from fullshard.optim.with_adamw import AdamWOptions, local_of

_BASIS = "_basis"


class SOAP(PreconditionedMatrices):
    """SOAP for hidden matrices, AdamW for the rest: Adam in the eigenbasis of Shampoo's preconditioner.

    The first step of a matrix finds its basis and updates nothing.

    Args:
        params: a model, whose parameters are dealt out by `MatrixRule`; or parameters, or groups of them, as torch's
            optimizers take them. A group with `algorithm="adamw"` is updated by AdamW, one with `flatten=True` has
            convolutions; a parameter of three dims is a batch of matrices otherwise, of more it is flattened.
        lr: learning rate of both, unless `adamw_lr` is given.
        betas: of the moments.
        shampoo_beta: of the factors; below 0: the second of `betas`.
        eps: added to the root of the second moment.
        weight_decay: decoupled, of both, unless `adamw_weight_decay` is given.
        precondition_frequency: steps from one basis to the next.
        max_precond_dim: rows, or columns, beyond which that side has no factor.
        normalize_grads: scale each update to a root mean square of 1.
        correct_bias: of the moments.
        sent_as: what gradients are sent to owners and updates back in. float32 gives the numbers of one process,
            bfloat16 sends half.
        adamw: see `AdamWOptions`.

    Attributes:
        rule: what became of the model's parameters; None if it was not given one.

    Raises:
        ConfigError: a value that cannot be.
        OptimizerError: a vector in a group of SOAP's.
    """

    algorithm = "soap"
    owned_state = frozenset({MEAN, SQUARES, *SIDES, *(side + _BASIS for side in SIDES)})

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = -1.0,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = PRECONDITION_FREQUENCY,
        max_precond_dim: int = MAX_PRECOND_DIM,
        normalize_grads: bool = False,
        correct_bias: bool = True,
        *,
        sent_as: torch.dtype = torch.float32,
        **adamw: Unpack[AdamWOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
            "normalize_grads": normalize_grads,
            "correct_bias": correct_bias,
        }
        super().__init__(params, defaults, Eigenbases(precondition_frequency, max_precond_dim), sent_as, **adamw)

    def _check(self, group: dict[str, Any], where: str) -> None:
        super()._check(group, where)
        check_average("shampoo_beta", max(0.0, group["shampoo_beta"]), where)

    def _made(self, parameter: torch.Tensor, number: int, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        owned = _Rotated(self.state[parameter], number, matrix.device)
        gradient = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        beta = group["shampoo_beta"] if group["shampoo_beta"] >= 0 else group["betas"][1]
        updates = self._steps(parameter) - 1
        if updates == 0:
            owned.begin(gradient, group["max_precond_dim"])
            owned.take_into_factors(gradient, beta)
            owned.find_bases()
            return torch.zeros_like(gradient)
        direction = owned.direction(gradient, group["betas"], group["eps"])
        if group["normalize_grads"]:
            direction /= direction.square().mean().sqrt() + 1e-30
        owned.take_into_factors(gradient, beta)  # after the direction, which its own gradient's basis would bias
        if updates % group["precondition_frequency"] == 0:
            owned.turn_bases()
        return direction

    def _apply(self, parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
        """Move by the update, and decay; in a parameter's first step neither."""
        updates = self._steps(parameter) - 1
        if updates == 0:
            return
        lr, weights = float(group["lr"]), local_of(parameter)
        size = lr
        if group["correct_bias"]:
            first, second = group["betas"]
            size *= math.sqrt(1 - second**updates) / (1 - first**updates)
        weights.add_(update.to(weights.device, weights.dtype), alpha=-size)
        weights.mul_(1 - lr * group["weight_decay"])


class _Rotated(OwnedMatrix):
    """An owned matrix with eigenvectors of its factors."""

    def find_bases(self) -> None:
        """Compute the factors' eigenvectors, those of the largest eigenvalues first."""
        for side in SIDES:
            if (factor := self[side]) is not None:
                self[side + _BASIS] = torch.linalg.eigh(factor)[1].flip(1).contiguous()

    def turn_bases(self) -> None:
        """Update the eigenvectors by one power iteration, made orthogonal, in the order of eigenvalues."""
        for dim, side in enumerate(SIDES):
            if (factor := self[side]) is not None:
                basis = self[side + _BASIS]
                product = factor @ basis
                order = (basis * product).sum(0).argsort(descending=True)
                self[SQUARES] = self[SQUARES].index_select(dim, order)
                self[side + _BASIS] = torch.linalg.qr(product.index_select(1, order))[0]

    def direction(self, gradient: torch.Tensor, betas: tuple[float, float], eps: float) -> torch.Tensor:
        """Return Adam's direction, computed on the gradient in the bases and turned back into the matrix's own."""
        mean, squares = self[MEAN], self[SQUARES]
        mean.lerp_(gradient, 1 - betas[0])
        squares.lerp_(self._seen(gradient).square(), 1 - betas[1])
        return self._unseen(self._seen(mean) / squares.sqrt().add_(eps))

    def _seen(self, matrix: torch.Tensor) -> torch.Tensor:
        left, right = (self[side + _BASIS] for side in SIDES)
        matrix = matrix if left is None else left.T @ matrix
        return matrix if right is None else matrix @ right

    def _unseen(self, matrix: torch.Tensor) -> torch.Tensor:
        left, right = (self[side + _BASIS] for side in SIDES)
        matrix = matrix if left is None else left @ matrix
        return matrix if right is None else matrix @ right.T
