"""Weights that a forward changes in place: as in one process where that is what it is, refused by name elsewhere.

pytest tests/engine/test_weights_changed_in_forward.py
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.core.errors import LifecycleError
from fullshard.features import no_sync, shard_model, unsharded
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    WIDTH,
    Block,
    Stack,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    run_squared,
)


class Clamped(Block):
    """As the critic of a Wasserstein GAN."""

    is_clamped, is_recomputed = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_recomputed:
            return checkpoint(self.compute, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_clamped:
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamping(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Clamped()


class Renormed(Stack):
    """An embedding that shortens the rows it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(torch.tensor([0, 3, 3, 1]))
        return super().forward(x + rows)


MODELS = {
    "clamp": (Clamping, r"'blocks\.1': blocks\.1\.up\.weight"),
    "max_norm": (Renormed, r"the outermost unit: table\.weight"),
}


def refuse(case: str, options: dict[str, Any], mode: str) -> None:
    make, names = MODELS[case]
    model: Any = build_sharded(make, BLOCKS, **options)
    without = torch.no_grad() if mode == "evaluation" else contextlib.nullcontext()
    with pytest.raises(LifecycleError, match=names + r" changed in place while unsharded"), without:
        run_squared(model, 0, 0) if mode == "training" else model(batch(0, 0))
    if case == "clamp":  # the model can be trained on without what was refused
        model.blocks[1].is_clamped = False
        run_squared(model, 1, 0)


@pytest.mark.parametrize("mode", ["training", pytest.param("evaluation", marks=pytest.mark.full)])
@pytest.mark.parametrize("options", [{}, {"strategy": "SHARD_GRAD_OP"}, {"strategy": "NO_SHARD"}], ids=str)
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_it_is_refused_by_name(
    case: str, options: dict[str, Any], mode: str, comm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    run_ranks(refuse, 2, case, options, mode)


def recompute() -> None:
    model: Any = build_sharded(Clamping, BLOCKS)
    model.blocks[1].is_recomputed = True
    with pytest.raises(LifecycleError, match=r"blocks\.1\.up\.weight changed in place"):
        run_squared(model, 0, 0)


def test_it_is_refused_in_a_checkpoint() -> None:
    run_ranks(recompute, 2)


@pytest.mark.parametrize("make", [Clamping, Renormed])
def test_one_rank_keeps_it(make: Any) -> None:
    model, plain = build_sharded(make, BLOCKS), build(make)
    assert_trains_alike(model, plain, run_squared)


def between_steps() -> None:
    model, plain = build_sharded(Stack, BLOCKS), build(Stack)
    for step in range(2):
        assert_trains_alike(model, plain, run_squared, steps=1, first=step)
        with unsharded(model, writeback=True), torch.no_grad():
            model.get_parameter("blocks.1.up.weight").clamp_(-0.1, 0.1)
        with torch.no_grad():
            plain.get_parameter("blocks.1.up.weight").clamp_(-0.1, 0.1)
        assert_same_parameters(model, plain)


def test_the_way_out() -> None:
    run_ranks(between_steps, 2)


class Replacing(nn.Linear):
    """Gives its weight other data, of so many rows."""

    rows = WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data[: self.rows].clone()
        return nn.functional.linear(x, self.weight)


def replaced(rows: int, is_kept: bool, is_tied: bool = False) -> str:
    layer = Replacing(WIDTH, WIDTH, bias=False)
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), layer)
    if is_tied:  # what each use gives is taken by itself
        model[0].weight = layer.weight
    shard_model(model, unit_modules=[], device=torch.device("cpu"))
    layer.rows = rows
    with pytest.raises(LifecycleError) as caught, no_sync(model) if is_kept else contextlib.nullcontext():
        model(torch.ones(1, 2, dtype=torch.int64)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(("rows", "is_kept", "is_tied"), [(WIDTH, True, False), (1, False, False)])
def test_other_data_is_refused_in_the_backward_that_would_lose_it(rows: int, is_kept: bool, is_tied: bool) -> None:
    """Under `no_sync`, too, after which a script may put the data back; and where the gradient has another shape."""
    for message in run_ranks(replaced, 2, rows, is_kept, is_tied):
        assert "weight: forward assigned other data (torch.float32)" in message
