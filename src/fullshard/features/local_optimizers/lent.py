"""Plain parameters, lent to an optimizer for the time of a step.

Its groups then hold, in place of each sharded parameter, a plain parameter that is this rank's interval, with its
gradient and the state, which stays as the optimizer has made it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.step.plain_tensors import as_local

_LENT = "_fullshard_lent"
_PLAIN = "_fullshard_plain"


def local_parameter(parameter: ShardedParameter) -> nn.Parameter:
    """Return this rank's part of a sharded parameter as a plain parameter, always the same object.

    It is flat, unless a parameter's part is shaped as rows.
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


def take_back(optimizer: Any) -> list[tuple[nn.Parameter, ShardedParameter]]:
    """Put the sharded parameters back, with the state, and return those that were lent; nothing if they are there."""
    found = []
    for members, index, parameter in vars(optimizer).pop(_LENT, ()):
        plain = members[index]
        members[index] = parameter
        if plain in optimizer.state:
            optimizer.state[parameter] = optimizer.state.pop(plain)
        plain.grad = None
        found.append((plain, parameter))
    return found
