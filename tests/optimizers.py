"""torch's optimizers in the ways scripts make them; and steps with gradients that do not depend on the sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn, optim

from fullshard.features import ShardedParameter

Make = Callable[[Iterator[nn.Parameter]], optim.Optimizer]


def in_groups(parameters: Iterator[nn.Parameter]) -> optim.Optimizer:
    """The usual two groups: matrices decay and vectors do not, so neighbors in a bucket are in different groups."""
    known = list(parameters)
    groups = [
        {"params": [p for p in known if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in known if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return optim.AdamW(groups, lr=1e-2, amsgrad=True)


def makers(classes: Iterable[type[optim.Optimizer]]) -> dict[str, Make]:
    """`classes` with a learning rate alone, by their names, and what else scripts do."""
    return {
        **{cls.__name__: lambda parameters, cls=cls: cls(parameters, lr=1e-2) for cls in classes},  # type: ignore[misc]
        "AdamW fused": lambda parameters: optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
        "AdamW foreach": lambda parameters: optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=True),
        "AdamW in groups": in_groups,
        "SGD momentum": lambda parameters: optim.SGD(
            parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
        ),
    }


def given_gradients(
    model: nn.Module,
    step: int,
    *,
    leaves_out: Callable[[str, int], bool] = lambda name, step: False,
    change: Callable[[str, torch.Tensor], None] = lambda name, grad: None,
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Parameters that train and whole gradients, the same on every rank, whatever the sharding.

    Args:
        model: sharded or not.
        step: what they depend on.
        leaves_out: which parameter, by name and step, gets none.
        change: to a gradient, in place.
    """
    for number, (name, parameter) in enumerate(model.named_parameters()):
        grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + number))
        change(name, grad)
        if parameter.requires_grad and not leaves_out(name, step):
            yield parameter, grad


def step_with(
    model: nn.Module,
    optimizer: Any,
    *,
    first: int = 0,
    steps: int = 3,
    after: Callable[[], Any] = lambda: None,
    **gradients: Any,
) -> None:
    """Steps `first` to `steps` with `given_gradients`; `after` each, what else a loop does."""
    for step in range(first, steps):
        for parameter, whole in given_gradients(model, step, **gradients):
            grad = whole.to(parameter.dtype)
            if isinstance(parameter, ShardedParameter):
                parameter.grad = parameter.wrap(parameter.spec.cut(grad).clone())
            else:
                parameter.grad = grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        after()
