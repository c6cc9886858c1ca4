"""Modules that are one unit and are not called together: a head that computes a loss in chunks after the forward.

pytest tests/wrap/test_modules_of_one_unit.py
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import FSDPModule, MixedPrecisionPolicy, fully_shard
from tests.distributed import run_ranks
from tests.traps import WIDTH, assert_trains_alike, batch, build

VOCABULARY, CHUNKS = 21, 3
DOUBLE = MixedPrecisionPolicy(param_dtype=torch.float64)
ROUNDED = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)


class Chunked(nn.Module):
    """Its head may be left to the script."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, skip_head: bool = False) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.body(self.embed(tokens)))
        return hidden if skip_head else self.head(hidden)


def run(model: Any, step: int, rank: int, *, micro_batches: int) -> torch.Tensor:
    """A step whose loss is computed chunk by chunk, each with a backward of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for micro in range(micro_batches):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            model.set_is_last_backward(micro == micro_batches - 1)
        tokens = (batch(10 * step + micro, rank, 2, 6).abs() * 7).long() % VOCABULARY
        hidden = model(tokens, skip_head=True)
        gradients = []
        for chunk in hidden.detach().double().chunk(CHUNKS, dim=1):
            own = chunk.clone().requires_grad_()
            loss = model.head(own).double().square().mean()
            loss.backward()
            total += loss.detach()
            gradients.append(own.grad)
        hidden.backward(torch.cat(gradients, dim=1).to(hidden.dtype))
    return total


def check(*, grouped: bool, tied: bool, reshard: bool = True, micro_batches: int = 1, rounds: bool = False) -> None:
    make = functools.partial(Chunked, tied=tied)
    model: Any = build(make)
    units = [[model.norm, model.head, *([model.embed] if tied else [])]] if grouped else [model.norm, model.head]
    outer: Any = {"mp_policy": DOUBLE} if rounds else {}
    inner: Any = {"mp_policy": ROUNDED} if rounds else {}
    fully_shard(model.body, reshard_after_forward=reshard, **outer)
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard, **inner)
    fully_shard(model, reshard_after_forward=reshard, **outer)
    chunked = functools.partial(run, micro_batches=micro_batches)
    assert_trains_alike(model, build(make), chunked, steps=2, tolerance=1e-5 if rounds else 1e-9)


CASES: tuple[dict[str, Any], ...] = (
    {"grouped": True, "tied": False},
    {"grouped": True, "tied": True},
    {"grouped": True, "tied": False, "reshard": False, "micro_batches": 3},
    {"grouped": True, "tied": True, "reshard": True, "micro_batches": 3},
    {"grouped": False, "tied": False, "micro_batches": 3},
    {"grouped": True, "tied": False, "rounds": True},
    {"grouped": True, "tied": True, "reshard": False, "rounds": True},
)


def check_all() -> None:
    for case in CASES:
        try:
            check(**case)
        except Exception as error:
            error.add_note(str(case))
            raise


@pytest.mark.parametrize("comm", [pytest.param("auto", marks=pytest.mark.full), "gloo"])
def test_a_head_of_a_group_computes_a_loss_in_chunks(comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    run_ranks(check_all, 2)
