"""Let the optimizers of bitsandbytes and torchao update this rank's intervals as plain tensors.

They cannot use sharded parameters directly: the kernels of bitsandbytes need memory addresses, and torchao's optimizers
are compiled and divide a rank's local part into blocks.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from fullshard.comm.mesh import Mesh
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.step.adapters import OptimizerAdapter
from fullshard.engine.step.plain_tensors import as_local
from fullshard.features.local_optimizers.coded import TORCHAO_BITS, encode

_LENT = "_fullshard_lent"
_PLAIN = "_fullshard_plain"


def local_parameter(parameter: ShardedParameter) -> nn.Parameter:
    """Return this rank's part as a plain parameter, always the same object. It is flat unless sharded by rows."""
    plain: nn.Parameter | None = getattr(parameter, _PLAIN, None)
    if plain is None:
        plain = nn.Parameter(parameter.local, requires_grad=parameter.requires_grad)
        setattr(parameter, _PLAIN, plain)
    # An empty parameter has nothing to update, and CUDA refuses to launch a kernel for it.
    gradient = parameter.local_grad if plain.numel() else None
    plain.grad = None if gradient is None else gradient.view(parameter.spec.local_shape)
    return plain


def lend(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace sharded parameters with plain ones until `take_back`, except in closures. Return `step`'s arguments."""
    take_back(optimizer)  # in case an earlier step failed
    lent: list[tuple[list[Any], int, ShardedParameter]] = []
    for group in optimizer.param_groups:
        members = group["params"]
        for index, parameter in enumerate(members):
            if isinstance(parameter, ShardedParameter):
                lent.append((members, index, parameter))
                members[index] = plain = local_parameter(parameter)
                if parameter in optimizer.state:
                    optimizer.state[plain] = as_local(optimizer.state.pop(parameter))
    setattr(optimizer, _LENT, lent)

    def called_back(closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            take_back(optimizer)
            loss = closure()
            lend(optimizer, (), {})
            return loss

        return call

    new_args = tuple(called_back(argument) if callable(argument) else argument for argument in args)
    return new_args, {key: called_back(value) if callable(value) else value for key, value in kwargs.items()}


def take_back(optimizer: Any) -> list[tuple[nn.Parameter, ShardedParameter]]:
    """Undo `lend`. Return a (plain, sharded) pair for each parameter that was replaced."""
    found = []
    for members, index, parameter in vars(optimizer).pop(_LENT, ()):
        plain = members[index]
        members[index] = parameter
        if plain in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(plain)
        plain.grad = None
        found.append((plain, parameter))
    return found


TORCHAO_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""State that torchao's optimizers may store as codes, and whether it can be negative. AMSGrad adds the last key."""


def is_of(optimizer: torch.optim.Optimizer, package: str) -> bool:
    """Return whether `package` defines the optimizer's class or one of its base classes."""
    return any(cls.__module__.partition(".")[0] == package for cls in type(optimizer).__mro__)


class _Lending(OptimizerAdapter):
    """Base class of adapters for the optimizers of a package that updates plain parameters."""

    package: ClassVar[str]
    keeps_plain_state = True

    def takes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer is from the package."""
        return is_of(optimizer, self.package)

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the sharded parameters with plain ones for the step."""
        return lend(optimizer, args, kwargs)

    def restore(self, optimizer: Any, *, has_stepped: bool = False) -> None:
        """Put the sharded parameters back after the step."""
        take_back(optimizer)


class Bitsandbytes(_Lending):
    """The adapter for optimizers from bitsandbytes."""

    package, needs_plain_memory = "bitsandbytes", True

    def why_no_full_state(self, optimizer: Any, mesh: Mesh) -> str:
        """Return why the state cannot be unsharded: it consists of codes, and a rank without elements has none."""
        return "stored as codes of this rank's interval, if the interval is not empty" if mesh.shard_size > 1 else ""


class Torchao(_Lending):
    """The adapter for optimizers from torchao. Their state dicts can be unsharded."""

    package = "torchao"

    def restore(self, optimizer: Any, *, has_stepped: bool = False) -> None:
        """Put the sharded parameters back. Count the step for parameters without elements here, which torchao skips."""
        for plain, parameter in take_back(optimizer):
            if has_stepped and not plain.numel() and parameter.local_grad is not None:
                keys = list(TORCHAO_SIGNED)[: 3 if optimizer.param_groups[0].get("amsgrad") else 2]
                fresh = {"step": torch.tensor(0.0)} | {key: torch.zeros_like(parameter.local) for key in keys}
                optimizer.state[parameter] = optimizer.state.get(parameter) or fresh
                optimizer.state[parameter]["step"] += 1

    def values(self, kept: Any) -> Any:
        """Return the decoded values if the state is stored as codes, and any other value unchanged."""
        return kept.dequantize() if type(kept).__name__ in TORCHAO_BITS else kept

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state for a checkpoint, with its moments decoded and in float32."""
        return {key: self.values(kept).float() if key in TORCHAO_SIGNED else kept for key, kept in state.items()}

    @torch.no_grad()
    def kept(self, optimizer: Any, parameter: ShardedParameter, state: dict[str, Any]) -> dict[str, Any]:
        """Convert loaded state of this rank's intervals to the format that the optimizer stores, such as codes."""
        kept = dict(state)
        for key in state.keys() & TORCHAO_SIGNED.keys():
            if isinstance(value := state[key], ShardedTensor):
                kept[key] = fresh = optimizer._new_buffer(local_parameter(parameter), TORCHAO_SIGNED[key])
                if (bits := TORCHAO_BITS.get(type(fresh).__name__)) is None:
                    fresh.copy_(value.local)
                    continue
                book = getattr(fresh, "qmap", None)
                codes, scales = encode(value.local.float(), book, bits=bits, block=fresh.block_size)
                fresh.codes.view(-1).copy_(codes)
                fresh.scale.copy_(scales)
        return kept
