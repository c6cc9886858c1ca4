"""A model that is trained with parts of it on the host, and the ways to train it: for test_offload*.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import create_autospec

import torch
from torch import nn

from fullshard.features import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, shard_model

WIDTH, DEPTH, STEPS = 48, 3, 3

POLICIES: dict[str, OffloadPolicy] = {
    "everything": CPUOffloadPolicy(),
    "main weights": OffloadPolicy(main_weights=True),
    "optimizer state": OffloadPolicy(optimizer_state=True),
    "frozen": OffloadPolicy(compute_shards=True),
    "frozen and optimizer state": OffloadPolicy(compute_shards=True, optimizer_state=True),
}

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Layer(nn.Module):
    """A product that is trained, beside one that may be frozen, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7, bias=False), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.base(x)) + self.down(self.up(x))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Case:
    """What to train, apart from where shards are."""

    policy: MixedPrecisionPolicy | None = None
    is_frozen: bool = False
    micro_batches: int = 1
    strategy: str = "FULL_SHARD"
    shard_size: int | None = None
    dtype: torch.dtype = torch.float32
    optimizer: str = "AdamW"

    def model(self, offload: OffloadPolicy | None, **arguments: Any) -> nn.Module:
        torch.manual_seed(3)
        model = Model().to(self.dtype)
        if self.is_frozen:
            for layer in model.layers:
                layer.base.requires_grad_(False)
        arguments = {"strategy": self.strategy, "shard_size": self.shard_size, **arguments}
        return shard_model(
            model, unit_modules=list(model.layers), mp_policy=self.policy, offload_policy=offload, **arguments
        )

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "SGD":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(trained, lr=0.01, fused=self.optimizer == "fused")

    def backward(self, model: nn.Module, step: int) -> torch.Tensor:
        loss = torch.zeros(())
        for micro_batch in range(self.micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + 1)
            x = torch.randn(4, WIDTH, generator=generator, dtype=self.dtype)
            loss = model(x).float().square().mean()
            loss.backward()
        return loss.detach()


def allowed(case: Case) -> list[str]:
    """What is refused is not trained: of trainable parameters there are no compute shards apart."""
    return [name for name in POLICIES if case.is_frozen or "frozen" not in name]


CASES = {
    "float32": Case(micro_batches=2),
    "bfloat16": Case(BFLOAT16, optimizer="fused"),
    "frozen": Case(BFLOAT16, is_frozen=True, micro_batches=2),
}
SLOW_CASES = {
    "hybrid": Case(BFLOAT16, strategy="HYBRID_SHARD", shard_size=2, micro_batches=2),
    "kept": Case(strategy="SHARD_GRAD_OP", micro_batches=2),
    "stored in bfloat16": Case(dtype=torch.bfloat16, is_frozen=True),
    "momentum": Case(BFLOAT16, optimizer="SGD"),
    "packed": Case(MixedPrecisionPolicy(gather_as=torch.int8, reduce_as=torch.bfloat16), micro_batches=2),
    "one rank's dtype": Case(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)),
}


SCHEDULED = [name for name in (*CASES, *SLOW_CASES) if name not in ("frozen", "stored in bfloat16")]
"""Gradients and state of what is stored in half precision the planner takes for float32, wherever they are."""


STREAM = torch.Stream


class Log:
    """Stands in for an accelerator's streams, of which it keeps what they are told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.computing = self.stream("computing")
        self.names = iter(("to device", "to host"))

    def stream(self, name: str) -> Any:
        stream = create_autospec(STREAM, instance=True)
        stream.label = name
        stream.wait_stream.side_effect = lambda other: self.said.append(f"{name} waits for {other.label}")
        stream.wait_event.side_effect = lambda event: self.said.append(f"{name} waits for {event.label}")
        stream.synchronize.side_effect = lambda: self.said.append(f"the host waits for {name}")
        stream.__enter__ = lambda _: self.said.append(f"onto {name}")
        stream.__exit__ = lambda *_: self.said.append(f"off {name}")

        def record() -> Any:
            self.said.append(f"{name} records")
            event = create_autospec(torch.Event, instance=True)
            event.label = f"the event of {name}"
            event.synchronize.side_effect = lambda: self.said.append(f"the host waits for the event of {name}")
            return event

        stream.record_event.side_effect = record
        return stream
