"""Optimizers of the package pytorch_optimizer on whole matrices of a sharded model, against one process.

pytest tests/others/test_pytorch_optimizer.py
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.features import shard_model
from fullshard.optim import OnOwners
from tests.differential import check, compare, parameters
from tests.distributed import run_ranks
from tests.optimizers import step_with

pytestmark = pytest.mark.full
pytest.importorskip("pytorch_optimizer", reason="pip install pytorch_optimizer")

STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "SOAP": {"precondition_frequency": 2, "max_precondition_dim": 20},
    "Shampoo": {"preconditioning_compute_steps": 2, "weight_decay": 0.1, "weight_decouple": True},
    "Lamb": {"weight_decay": 0.1},
}


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((12, 24), (24, 24), (24, 6)))).double()


def class_of(name: str) -> Any:
    return getattr(importlib.import_module("pytorch_optimizer"), name)


def optimizer_of(model: nn.Module, name: str) -> OnOwners:
    return OnOwners(model.parameters(), class_of(name), lr=0.01, **CASES[name])


def expected(name: str) -> dict[str, Any]:
    """An optimizer for each matrix, as its authors wrote it, in one process."""
    model, cls = model_of(), class_of(name)
    apart: list[optim.Optimizer] = [cls([p], lr=0.01, **CASES[name]) for p in model.parameters()]

    class Together:
        def step(self) -> None:
            for optimizer in apart:
                optimizer.step()

        def zero_grad(self) -> None:
            model.zero_grad()

    step_with(model, Together(), steps=STEPS)
    return {"parameters": parameters(model)}


def begin(directory: str, name: str) -> None:
    model = model_of()
    shard_model(model, unit_modules=list(model))
    optimizer = optimizer_of(model, name)
    step_with(model, optimizer, steps=STEPS - 3)
    save_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)


def go_on(directory: str, name: str) -> dict[str, float]:
    model = model_of()
    shard_model(model, unit_modules=[model[1]])
    optimizer = optimizer_of(model, name)
    load_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)
    step_with(model, optimizer, first=STEPS - 3, steps=STEPS)
    return compare({"parameters": parameters(model)}, expected(name))


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_one_process(name: str, tmp_path: Path) -> None:
    """On two ranks, saved, and on three."""
    run_ranks(begin, 2, str(tmp_path), name)
    check(run_ranks(go_on, 3, str(tmp_path), name), exact=True, tolerance=1e-12)
