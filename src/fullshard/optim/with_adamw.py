"""The base class for optimizers of hidden matrices.

It runs AdamW for the other parameters, and assigns each unsharded matrix to a rank, its owner. A subclass defines which
values of a parameter are sent to the owner, what the owner computes for a matrix, and how the weights are updated.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypedDict, Unpack

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fullshard.comm import torch_private
from fullshard.core.errors import ConfigError, OptimizerError
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.step.plain_tensors import use_plain_tensors
from fullshard.features.matrices import MatrixOptimizer
from fullshard.optim.rule import MatrixRule
from fullshard.plan.dealing import matrix_shape

logger = logging.getLogger(__name__)


class AdamWOptions(TypedDict, total=False):
    """Options for AdamW of the remaining parameters. By default, it uses the matrices' rate and weight decay."""

    adamw_lr: float | None
    adamw_weight_decay: float | None
    adamw_betas: tuple[float, float]
    adamw_eps: float


class MatricesWithAdamW(MatrixOptimizer):
    """Updates hidden matrices with the subclass's algorithm and all other parameters with AdamW.

    Args:
        params: see `Muon`.
        defaults: default options for groups of matrices.
        adamw: see `AdamWOptions`.

    Attributes:
        rule: how the parameters of the model are assigned, or None if `params` is not a model.
        algorithm: the name of the matrix algorithm, as it appears in parameter groups.
        sent_as: the dtype in which matrices are sent to owners and back.
        width: how many values are sent to the owner for each element of a matrix.
        least_dims: the minimum number of dims of a parameter that the subclass's algorithm can update.

    Raises:
        ConfigError: a value is invalid.
        OptimizerError: a group of matrices contains a vector.
    """

    algorithm: str
    sent_as: torch.dtype
    width = 1
    least_dims = 2

    def __init__(
        self, params: nn.Module | Iterable[Any], defaults: dict[str, Any], **adamw: Unpack[AdamWOptions]
    ) -> None:
        if unknown := adamw.keys() - AdamWOptions.__annotations__.keys():
            raise TypeError(f"{self.name} got an unexpected keyword argument {min(unknown)!r}")
        self._adamw = _adamw({})
        self._adamw_defaults = {**self._adamw.defaults, **{key: defaults[key] for key in ("lr", "weight_decay")}}
        self._adamw_defaults |= {key.removeprefix("adamw_"): x for key, x in adamw.items() if x is not None}
        self.rule = MatrixRule.of(params, self.name) if isinstance(params, nn.Module) else None
        if self.rule is not None:
            logger.info("%s", self.rule)
        super().__init__(
            params if self.rule is None else self.rule.groups(),
            {"algorithm": self.algorithm, "flatten": False, **defaults},
        )

    def _check(self, group: dict[str, Any], where: str) -> None:
        """Raise `ConfigError` if an option of a group of matrices is invalid."""
        raise NotImplementedError

    def _given(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return the values that this rank sends to the owner, with the parameter's shape if it is not sharded."""
        raise NotImplementedError

    def _made(self, parameter: torch.Tensor, number: int, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Compute the result for matrix `number` of a parameter. The rank that owns the matrix calls this."""
        raise NotImplementedError

    def _apply(self, parameter: torch.Tensor, made: torch.Tensor, group: dict[str, Any]) -> None:
        """Update this rank's elements of a parameter with the corresponding elements of the owners' results."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as torch does. `Muon` describes the keys `algorithm` and `flatten`."""
        if param_group.get("algorithm") == "adamw":
            param_group = {**self._adamw_defaults, **param_group}
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1], len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. If any parameter is sharded, all ranks must call this."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = self._members()
        given = [p for p in members if local_gradient(p) is not None]
        for parameter in given:
            if not isinstance(parameter, ShardedParameter):
                self._apply(parameter, self._made_of_all(parameter, members[parameter]), members[parameter])
        for whole in self._deal():
            whole.update(
                [p for p in given if isinstance(p, ShardedParameter) and p.mesh is whole.mesh],
                self.sent_as,
                width=self.width,
                give=lambda p: self._given(p, members[p]),
                compute=lambda p, number, matrix: self._made(p, number, matrix, members[p]),
                take=lambda p, made: self._apply(p, made, members[p]),
            )
        self._step_adamw()
        return loss

    def _made_of_all(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Compute the results for all matrices of an unsharded parameter, and return them in the parameter's shape."""
        given = self._given(parameter, group)
        shape = *matrix_shape(parameter.shape, flatten=group["flatten"]), *given.shape[parameter.dim() :]
        matrices = given.reshape(shape) if given.numel() else ()
        # Copies start at an aligned address, as on an owner: a product's bits may depend on the alignment.
        made = [self._made(parameter, n, matrix.clone(), group).reshape(-1) for n, matrix in enumerate(matrices)]
        return torch.cat(made).view(parameter.shape) if made else parameter

    def _step_adamw(self) -> None:
        """Run torch's AdamW step on the groups that AdamW updates, with the state in this optimizer."""
        groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        if not groups:
            return
        use_plain_tensors(self._adamw)
        # The code that ends a step looks here, because this optimizer has the state.
        setattr(self, torch_private.INIT_GROUP, vars(self._adamw)[torch_private.INIT_GROUP])
        self._adamw.state, self._adamw.param_groups = self.state, groups
        step: Any = optim.AdamW.step
        step.__wrapped__(self._adamw)  # without the hooks, which have run for this optimizer

    def _members(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {p: group for group in self.param_groups if group["algorithm"] != "adamw" for p in group["params"]}

    def _check_group(self, group: dict[str, Any], number: int) -> None:
        where = f"{self.name}, parameter group {number}"
        for key in ("lr", "weight_decay"):
            if group[key] is not None and not float(group[key]) >= 0:
                raise ConfigError(f"{where}: {key} is {group[key]}, expected 0 or more")
        if group["algorithm"] not in (self.algorithm, "adamw"):
            raise ConfigError(f"{where}: algorithm is {group['algorithm']!r}, expected {self.algorithm} or adamw")
        if group["algorithm"] == "adamw":
            _adamw({key: group[key] for key in ("betas", "eps")})  # raises torch's own errors
            return
        self._check(group, where)
        for parameter in group["params"]:
            self._check_matrix(parameter, where)

    def _check_matrix(self, parameter: torch.Tensor, where: str) -> None:
        name = getattr(parameter, "name", None) or "a parameter"
        if parameter.dim() < self.least_dims or not parameter.is_floating_point():
            raise OptimizerError(
                f"{where}: {name} of shape {tuple(parameter.shape)} and {parameter.dtype} is not a matrix of real "
                "numbers",
                hint=(
                    f"create the optimizer from the model, as in fullshard.optim.Muon(model), so that {self.name} "
                    "gets the matrices and AdamW the embeddings, head and vectors"
                ),
            )
        if isinstance(parameter, DTensor) and not isinstance(parameter, ShardedTensor):
            raise OptimizerError(
                f"{where}: {name} is a DTensor that fullshard has not sharded ({parameter.placements})",
                hint="shard the model with fullshard.fully_shard or fullshard.Accelerator",
            )


def _adamw(options: dict[str, Any]) -> optim.AdamW:
    """Create torch's AdamW with a single empty parameter. It validates the options and runs the step."""
    return optim.AdamW([nn.Parameter(torch.empty(0))], **options)


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of this rank's elements of a parameter, or None if it has no gradient."""
    if isinstance(parameter, ShardedParameter):
        return parameter.local_grad
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise OptimizerError(f"the gradient of a matrix of shape {tuple(parameter.shape)} is sparse")
    return parameter.grad


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a sharded tensor, or the tensor itself if it is not sharded."""
    return tensor.local if isinstance(tensor, ShardedTensor) else tensor
