"""A small job whose checkpoints the tests of object stores save and load."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import load_checkpoint


def job(seed: int = 0, width: int = 40) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, width), nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    return [value.clone() for value in (*model.state_dict().values(), *values)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def loaded(path: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    model, optimizer = job(seed=99)
    return load_checkpoint(path, model=model, optimizer=optimizer), state_of(model, optimizer)
