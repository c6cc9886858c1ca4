"""Models that are trained with the optimizer's step in backward: for test_step_in_backward*.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from fullshard.core.events import Event
from fullshard.features import MixedPrecisionPolicy, shard_model
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.steps_in_backward.stepper import STEPS_IN_PARTS, step_in_backward
from tests.optimizers import makers
from tests.traps import BLOCKS, WIDTH, Block, Stack, batch, rank_and_size

MAKE = makers(STEPS_IN_PARTS)


class Tied(nn.Module):
    """Input layer and head share a weight; a block runs twice; a part is used on odd ranks only, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.sometimes, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        if rank_and_size()[0] % 2:
            x = x + self.sometimes(x)
        out: torch.Tensor = self.head(x)
        return out


def make_model(kind: str, events: list[Event] | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A sharded model of one of several kinds."""
    torch.manual_seed(0)
    model: nn.Module = (Tied() if kind == "tied" else Stack()).to(dtype)
    units = [model.get_submodule(name) for name in BLOCKS]
    options: dict[str, Any] = {"event_sink": None if events is None else events.append}
    if kind == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("down" in name or "head" in name)
    if kind == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "bf16 stored":
        model = model.bfloat16()
    if kind == "ignored":
        options["ignored_params"] = [model.get_parameter("head.weight")]
    if kind.startswith("checkpointed"):
        checkpoint_modules(model, units, reentrant=kind.endswith("reentrant"))
    if kind == "hybrid":
        options |= {"strategy": "HYBRID_SHARD", "shard_size": 2}
    if kind in ("NO_SHARD", "SHARD_GRAD_OP"):
        options["strategy"] = kind
    return shard_model(model, unit_modules=units, **options)


def run_backward(model: nn.Module, seed: int) -> torch.Tensor:
    """Forward and backward of one micro-batch of this rank."""
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(batch(seed, rank_and_size()[0]).to(dtype)).float().square().mean()
    loss.backward()
    return loss.detach()


def stepping(kind: str = "plain") -> tuple[nn.Module, optim.Optimizer]:
    """A model and an optimizer that steps in backward."""
    model = make_model(kind)
    optimizer = MAKE["AdamW"](model.parameters())
    step_in_backward(optimizer)
    return model, optimizer
