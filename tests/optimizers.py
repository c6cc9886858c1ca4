"""torch's optimizers in the ways scripts make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn, optim

Make = Callable[[Iterator[nn.Parameter]], optim.Optimizer]


def in_groups(parameters: Iterator[nn.Parameter]) -> optim.Optimizer:
    """The usual two groups: matrices decay and vectors do not, so neighbours in a bucket are in different groups."""
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
