"""Optimizers whose kernels take addresses, or that code their state in blocks, update plain tensors: local intervals.

During such an optimizer's step its groups hold, in place of each sharded parameter, a plain parameter that is this
rank's interval, with its gradient and the state, which stays as the optimizer has made it. bitsandbytes' kernels take
addresses; torchao's optimizers are compiled, and count blocks within what a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.sharded_tensor import ShardedTensor

_PACKAGES = ("bitsandbytes", "torchao")
TORCHAO_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""The state that torchao's optimizers may keep as codes, and whether it may be negative; the last one for AMSGrad."""

_LENT = "_fullshard_lent"
_PLAIN = "_fullshard_plain"


def takes_local(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer is one that updates plain tensors."""
    return is_of(optimizer, *_PACKAGES)


def is_of(optimizer: torch.optim.Optimizer, *packages: str) -> bool:
    """Return whether the optimizer's class, or one that it derives from, is of one of these packages."""
    return any(cls.__module__.partition(".")[0] in packages for cls in type(optimizer).__mro__)


def local_parameter(parameter: ShardedParameter) -> nn.Parameter:
    """Return this rank's part of a sharded parameter as a plain parameter, always the same object.

    It is flat, or rows of a composed parameter.
    """
    plain: nn.Parameter | None = getattr(parameter, _PLAIN, None)
    if plain is None:
        plain = nn.Parameter(parameter.local, requires_grad=parameter.requires_grad)
        setattr(parameter, _PLAIN, plain)
    # An empty parameter has nothing to update, and CUDA refuses to launch a kernel for it.
    gradient = parameter.local_grad if plain.numel() else None
    plain.grad = None if gradient is None else gradient.view(parameter.spec.local_shape)
    return plain


def lend(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put plain parameters in place of sharded ones, until `take_back`; returns what `step` is to be called with.

    A closure is called with the sharded ones back in their place.
    """
    take_back(optimizer)  # an earlier step has failed
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


def take_back(optimizer: torch.optim.Optimizer, *, has_stepped: bool = False) -> None:
    """Put the sharded parameters back, with the state; nothing if they are there.

    Args:
        optimizer: the one that they were lent to.
        has_stepped: whether it has updated them. torchao's state dicts are whole, so a parameter without elements
            on this rank, which was not updated here, counts steps as it does elsewhere.
    """
    counts = has_stepped and is_of(optimizer, "torchao")
    for members, index, parameter in vars(optimizer).pop(_LENT, ()):
        plain = members[index]
        members[index] = parameter
        if counts and not plain.numel() and parameter.local_grad is not None:
            keys = list(TORCHAO_SIGNED)[: 3 if optimizer.param_groups[0].get("amsgrad") else 2]
            fresh = {"step": torch.tensor(0.0)} | {key: torch.zeros_like(parameter.local) for key in keys}
            optimizer.state[plain] = optimizer.state.get(plain) or fresh
            optimizer.state[plain]["step"] += 1
        if plain in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(plain)
        plain.grad = None


def as_local(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return state with this rank's interval, a plain tensor, in place of each sharded one."""
    return {key: value.local if isinstance(value, ShardedTensor) else value for key, value in state.items()}
