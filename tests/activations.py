"""A model whose activations are on the host, and what is seen of them: for tests/test_activation_*.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fullshard.core.events import Event
from fullshard.features import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    shard_model,
    units_of,
)
from fullshard.features.offload import ActivationOffload
from fullshard.features.recompute import checkpoint_modules, compile_modules

WIDTH, DEPTH, TOKENS, STEPS = 64, 4, 256, 2
HIDDEN_NBYTES = 4 * TOKENS * WIDTH
"""Of one layer's input in float32: as little as is moved."""

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
ON_HOST = OffloadPolicy(activations=True)


class Layer(nn.Module):
    """Views of one storage, a mask, an output that is saved, dropout, and an adapter beside what may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.down, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        a, b, c = self.base(self.norm(x)).chunk(3, dim=-1)
        out = functional.dropout(torch.tanh(a) * b * mask + c.relu(), 0.1)
        result: torch.Tensor = torch.sigmoid(x + self.down(out) + self.adapter(x))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.linspace(0.5, 1.0, x.numel()).reshape(x.shape).to(x.dtype)
        x = self.up(x)
        for layer in self.layers:
            x = layer(x, mask)
        out: torch.Tensor = self.head(x)
        return out


def batch(seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """What to train, apart from where activations are."""

    policy: MixedPrecisionPolicy | None = None
    checkpointing: str = ""
    is_frozen: bool = False
    micro_batches: int = 1
    two_forwards: bool = False
    strategy: str = "FULL_SHARD"
    shards: bool = False
    compiled: bool = False

    def model(self, offload: OffloadPolicy | None, **arguments: Any) -> nn.Module:
        torch.manual_seed(3)
        model = Model()
        for layer in model.layers if self.is_frozen else ():
            for part in (layer.norm, layer.base, layer.down):
                part.requires_grad_(False)
        layers = list(model.layers)
        if self.checkpointing:
            kinds = {name: self.checkpointing == name for name in ("reentrant", "selective")}
            checkpoint_modules(model, layers, **kinds)
        if self.compiled:
            compile_modules(layers, backend="aot_eager")
        if self.shards and offload is not None:
            offload = OffloadPolicy(compute_shards=True, main_weights=True, activations=True)
        shard_model(
            model,
            unit_modules=layers,
            strategy=self.strategy,
            mp_policy=self.policy,
            offload_policy=offload,
            device=torch.device("cpu"),
            **arguments,
        )
        return model

    def backward(self, model: nn.Module, step: int) -> torch.Tensor:
        torch.manual_seed(step)
        losses = []
        for number in range(self.micro_batches):
            losses.append(model(batch(10 * step + number)).float().square().mean())
            if not self.two_forwards:
                losses[-1].backward()
        total = torch.stack(losses).sum()
        if self.two_forwards:
            total.backward()
        return total.detach()


def moves(case: Case, **arguments: Any) -> list[str]:
    """The second step in words."""
    events: list[Event] = []
    model = case.model(ON_HOST, event_sink=events.append, **arguments)
    for step in range(2):
        events.clear()
        case.backward(model, step)
    return [
        f"{event.kind} {event.unit.removeprefix('layers.') or 'root'}" + (f": {event.nbytes}" if event.what else "")
        for event in events
    ]


class Held:
    """Bytes that autograd holds for a model, on either side, at each turn of a page."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = ActivationOffload.of(units_of(model)[-1].schedule)._pages
        assert self.kept is not None

    def nbytes(self) -> tuple[int, int]:
        """On the device and on the host."""
        assert self.kept is not None
        blocks = [block for page in self.kept._pages for block in page.blocks]
        device = sum(block.nbytes for block in blocks if block.on_device is not None)
        return device, sum(block.nbytes for block in blocks if block.on_host is not None)
