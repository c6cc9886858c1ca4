"""Muon, sharded: each matrix is orthogonalized by one rank, and everything else stays where it is.

    every rank     momentum, the direction, weight decay and the update: element by element, of its own interval
    the owner      Newton-Schulz of the direction, which it gets in bfloat16, that being what the iteration runs in

So the state is one tensor laid out as the parameter, and the numbers are those of `torch.optim.Muon` on whole tensors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fullshard.comm import torch_private
from fullshard.core.errors import ConfigError, OptimizerError
from fullshard.core.matrices import NEWTON_SCHULZ_STEPS, Dealing, matrix_shape
from fullshard.engine.parameter import ShardedParameter, are_same
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.step.matrices import MatrixOptimizer, WholeMatrices
from fullshard.engine.step.segments import use_segments
from fullshard.optim.newton_schulz import COEFFICIENTS, DTYPE, EPS, orthogonalized
from fullshard.optim.rule import MatrixRule

logger = logging.getLogger(__name__)

_MOMENTUM = "momentum_buffer"
_ALGORITHMS = ("muon", "adamw")
_SCALINGS = (None, "original", "match_rms_adamw")
_WITH_THE_MODEL = "fullshard.optim.Muon(model) gives matrices to Muon, and embeddings, head and vectors to AdamW"


class Muon(MatrixOptimizer):
    """Muon for hidden matrices, AdamW for the rest. Arguments and numbers are those of `torch.optim.Muon`.

    Args:
        params: a model, whose parameters are dealt out by `MatrixRule`; or parameters, or groups of them, as torch's
            optimizers take them. A group with `algorithm="adamw"` is updated by AdamW, one with `flatten=True` has
            convolutions; a parameter of three dims is a batch of matrices otherwise, of more it is flattened.
        lr: learning rate of both, unless `adamw_lr` is given.
        weight_decay: decoupled, of both, unless `adamw_weight_decay` is given.
        momentum: of Muon.
        nesterov: whether the direction looks ahead.
        ns_coefficients, eps, ns_steps: see `newton_schulz.orthogonalized`.
        adjust_lr_fn: how the learning rate depends on a matrix's shape: `original` (also None) multiplies it by
            sqrt(max(1, rows / columns)); `match_rms_adamw` by 0.2 sqrt(max(rows, columns)), with which a learning rate
            found for AdamW can be kept.
        adamw_lr, adamw_weight_decay: of AdamW, where they differ.
        adamw_betas, adamw_eps: of AdamW.

    Attributes:
        rule: what became of the model's parameters; None if it was not given one.

    Raises:
        ConfigError: a value that cannot be.
        OptimizerError: a vector in a group of Muon's.
    """

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
        *,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        self._adamw_defaults = {
            **_adamw({}).defaults,
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
            "betas": adamw_betas,
            "eps": adamw_eps,
        }
        self._adamw: optim.AdamW | None = None
        self._whole: list[WholeMatrices] = []
        self._dealt: list[ShardedParameter] = []
        self.rule = MatrixRule.of(params) if isinstance(params, nn.Module) else None
        if self.rule is not None:
            logger.info("%s", self.rule)
        super().__init__(
            params if self.rule is None else self.rule.groups(),  # type: ignore[arg-type]
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "algorithm": "muon",
                "flatten": False,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; see `algorithm` and `flatten` above."""
        if param_group.get("algorithm") == "adamw":
            for key, value in self._adamw_defaults.items():
                param_group.setdefault(key, value)
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1], len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; a collective where any is sharded."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = {p: group for group in self.param_groups if group["algorithm"] == "muon" for p in group["params"]}
        given = {p: group for p, group in members.items() if _gradient(p) is not None}
        for parameter in given:
            if parameter not in self.state or not self.state[parameter]:
                self.state[parameter][_MOMENTUM] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        for parameter, group in given.items():
            if not isinstance(parameter, ShardedParameter):
                _apply(parameter, _orthogonalized_all(self._direction(parameter, group), group), group)
        for whole in self._deal([p for p in members if isinstance(p, ShardedParameter) and p.requires_grad], members):
            whole.update(
                [p for p in given if isinstance(p, ShardedParameter) and p.mesh is whole.mesh],
                DTYPE,
                give=lambda p: self._direction(p, members[p]),
                compute=lambda p, matrix: _orthogonalized(matrix, members[p]),
                take=lambda p, update: _apply(p, update, members[p]),
            )
        self._step_adamw()
        return loss

    @property
    def dealings(self) -> list[Dealing]:
        """Which rank owns which matrix, for each mesh that parameters are on; none before the first step."""
        return [whole.dealing for whole in self._whole]

    def _deal(
        self, parameters: list[ShardedParameter], members: dict[torch.Tensor, dict[str, Any]]
    ) -> list[WholeMatrices]:
        """The matrices of these parameters, dealt again if they are others than in the last step."""
        if not are_same(parameters, self._dealt):
            flattened = {id(p) for p in parameters if members[p]["flatten"]}
            meshes = list(dict.fromkeys(p.mesh for p in parameters))
            self._whole = [WholeMatrices([p for p in parameters if p.mesh is mesh], flattened) for mesh in meshes]
            self._dealt = parameters
        return self._whole

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Take the gradient into the momentum; what is to be orthogonalized, of this rank's elements."""
        gradient, momentum = _gradient(parameter), _local(self.state[parameter][_MOMENTUM])
        assert gradient is not None  # noqa: S101 -- of those that have one
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _step_adamw(self) -> None:
        """AdamW's own step on its groups, with this optimizer's state."""
        groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        if not groups:
            return
        if self._adamw is None:
            self._adamw = _adamw({})
            use_segments(self._adamw)
            # What looks for an optimizer's segments finds them here: their state is this one's.
            setattr(self, torch_private.INIT_GROUP, vars(self._adamw)[torch_private.INIT_GROUP])
        self._adamw.state, self._adamw.param_groups = self.state, groups
        step: Any = optim.AdamW.step
        step.__wrapped__(self._adamw)  # without the hooks, which have run for this optimizer


def _adamw(options: dict[str, Any]) -> optim.AdamW:
    """Torch's, of nothing."""
    return optim.AdamW([nn.Parameter(torch.empty(0))], **options)


def _check_group(group: dict[str, Any], number: int) -> None:
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ConfigError(f"Muon, parameter group {number}: lr is a tensor of shape {tuple(lr.shape)}, not one number")
    for key in ("lr", "momentum", "weight_decay"):
        if not float(group[key]) >= 0:
            raise ConfigError(f"Muon, parameter group {number}: {key} is {group[key]}, expected 0 or more")
    if group["algorithm"] not in _ALGORITHMS:
        raise ConfigError(f"Muon, parameter group {number}: algorithm is {group['algorithm']!r}, not muon or adamw")
    if group["adjust_lr_fn"] not in _SCALINGS:
        raise ConfigError(
            f"Muon, parameter group {number}: adjust_lr_fn is {group['adjust_lr_fn']!r}, expected original or "
            "match_rms_adamw"
        )
    if group["algorithm"] == "adamw":
        _adamw({key: group[key] for key in ("betas", "eps")})  # torch's own words about those
        return
    for parameter in group["params"]:
        name = getattr(parameter, "name", None) or "a parameter"
        if parameter.dim() < 2 or not parameter.is_floating_point():
            raise OptimizerError(
                f"Muon, parameter group {number}: {name} of shape {tuple(parameter.shape)} and {parameter.dtype} is no "
                "matrix of real numbers",
                hint=_WITH_THE_MODEL,
            )
        if isinstance(parameter, DTensor) and not isinstance(parameter, ShardedTensor):
            raise OptimizerError(
                f"Muon, parameter group {number}: {name} is a DTensor that fullshard has not sharded "
                f"({parameter.placements})",
                hint="shard the model with fullshard.fully_shard or fullshard.Accelerator",
            )


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """That of this rank's elements."""
    if isinstance(parameter, ShardedParameter):
        return parameter.local_grad
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise OptimizerError(f"Muon: a sparse gradient, of a parameter of shape {tuple(parameter.shape)}")
    return parameter.grad


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor


def _orthogonalized(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    return orthogonalized(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _orthogonalized_all(direction: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Every matrix of a whole parameter."""
    matrices = direction.reshape(matrix_shape(direction.shape, flatten=group["flatten"]))
    made = [_orthogonalized(matrix, group).reshape(-1) for matrix in matrices]
    return torch.cat(made).view(direction.shape) if made else direction


def _apply(parameter: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
    """Decay this rank's elements, and move them by its part of the update."""
    lr, weights = float(group["lr"]), _local(parameter)
    _, rows, columns = matrix_shape(parameter.shape, flatten=group["flatten"])
    if group["adjust_lr_fn"] == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    else:
        ratio = math.sqrt(max(1, rows / columns)) if columns else 1.0
    weights.mul_(1 - lr * group["weight_decay"])
    weights.add_(update.to(weights.device), alpha=-lr * ratio)
