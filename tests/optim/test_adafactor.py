"""Adafactor by the owners of whole parameters against torch's and Transformers' own in one process.

pytest tests/optim/test_adafactor.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.optimization
from torch import nn

from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.core.errors import OptimizerError
from fullshard.features import ShardedParameter, shard_model
from fullshard.optim import Muon, OnOwners
from tests import optimizers, trainers
from tests.differential import check, compare, parameters
from tests.distributed import run_ranks
from tests.optim.test_muon import ROUNDED, Model

STEPS = 3
KINDS: dict[str, Any] = {"torch": torch.optim.Adafactor, "transformers": transformers.optimization.Adafactor}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "torch": [
        {},
        {"lr": 0.3, "beta2_decay": -0.5, "eps": (1e-4, 1e-2), "d": 1.5, "weight_decay": 0.1, "maximize": True},
    ],
    "transformers": [
        {},
        {"lr": 1e-2, "scale_parameter": False, "relative_step": False},  # Trainer's
        {"warmup_init": True, "beta1": 0.8, "weight_decay": 0.1, "clip_threshold": 0.5, "decay_rate": -0.5},
    ],
}


def model_of() -> Model:
    torch.manual_seed(1)
    model = Model()
    model.column = nn.Parameter(torch.randn(9, 1))  # a matrix of one column
    model.stack = nn.Parameter(torch.randn(2, 3, 4, 5))
    return model


def sharded(strategy: str = "FULL_SHARD", **options: Any) -> Model:
    model = model_of()
    shard_model(model, strategy=strategy, unit_modules=list(model.blocks), **options)
    return model


def _change(name: str, grad: torch.Tensor) -> None:
    """Leave a row and a column without any."""
    if "tokens" in name:
        grad[3], grad[:, 2] = 0.0, 0.0


def _left_out(name: str, step: int) -> bool:
    return step == 1 and "unused" in name


step_with = partial(optimizers.step_with, leaves_out=_left_out, change=_change)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def check_numbers(sharding: dict[str, Any]) -> dict[str, float]:
    """All options, of both."""
    found: dict[str, float] = {}
    for kind, theirs in KINDS.items():
        for number, options in enumerate(OPTIONS[kind]):
            reference, model = model_of(), sharded(**sharding)
            step_with(reference, theirs(trainable(reference), **options))
            step_with(model, OnOwners(model, theirs, whole_parameters=True, **options))
            record = compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})
            found |= {f"{kind} {number} {name}": value for name, value in record.items()}
    return found


@pytest.mark.parametrize(
    ("world_size", "sharding"),
    [
        (1, {}),
        (3, {}),
        pytest.param(2, {"strategy": "NO_SHARD"}, marks=pytest.mark.full),
        pytest.param(4, {"strategy": "HYBRID_SHARD", "shard_size": 2}, marks=pytest.mark.full),
    ],
)
def test_the_numbers_are_theirs(world_size: int, sharding: dict[str, Any]) -> None:
    """Each parameter is computed whole: vectors, embeddings and batches of matrices, too."""
    check(run_ranks(check_numbers, world_size, sharding), exact=True, tolerance=ROUNDED)


def save(directory: str) -> None:
    model = sharded()
    optimizer = OnOwners(model, torch.optim.Adafactor, whole_parameters=True, lr=0.1)
    step_with(model, optimizer, steps=STEPS - 1)
    save_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)


def resume(directory: str) -> dict[str, float]:
    """The last step, on another number of ranks, against torch's in one piece."""
    reference, model = model_of(), model_of()
    step_with(reference, torch.optim.Adafactor(trainable(reference), lr=0.1))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    shard_model(model, unit_modules=[model.blocks[0]])
    optimizer = OnOwners(model, torch.optim.Adafactor, whole_parameters=True, lr=0.5)
    load_checkpoint(Path(directory) / "here", model=model, optimizer=optimizer)
    step_with(model, optimizer, first=STEPS - 1)
    return compare({"parameters": parameters(model)}, {"parameters": parameters(reference)})


def test_saved_on_two_ranks_resumed_on_others(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path))
    for world_size in (3, 1):
        check(run_ranks(resume, world_size, str(tmp_path)), exact=True, tolerance=ROUNDED)


def train(output: str, *, stock: bool) -> dict[str, Any]:
    settings = {"optim": "adafactor", "weight_decay": 0.1}
    made = trainers.trainer(trainers.build("tied"), trainers.arguments(output, stock=stock, **settings), stock=stock)
    made.train()
    optimizer = getattr(made.optimizer, "optimizer", made.optimizer)
    assert type(optimizer) is (transformers.optimization.Adafactor if stock else OnOwners)
    return trainers.result(made)


def test_trainer(tmp_path: Path) -> None:
    """`optim="adafactor"`: the losses of Transformers' own Trainer in one process."""
    [expected] = run_ranks(partial(train, stock=True), 1, str(tmp_path / "one"))
    two = run_ranks(partial(train, stock=False), 2, str(tmp_path / "two"))[0]
    assert two["own"] < two["total"]
    assert trainers.close(two["losses"], expected["losses"], 1e-4)


@pytest.mark.parametrize("kind", [Muon, partial(OnOwners, optimizer=torch.optim.Adafactor)])
def test_a_closure_computes_what_is_stepped_with(kind: Any) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer, before = kind(model.parameters()), model.weight.detach().clone()

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert not torch.equal(model.weight, before)


def check_refused() -> None:
    model = sharded()
    for theirs in KINDS.values():
        optimizer = theirs(trainable(model))
        for parameter, grad in optimizers.given_gradients(model, 0, leaves_out=_left_out, change=_change):
            assert isinstance(parameter, ShardedParameter)
            parameter.grad = parameter.wrap(parameter.spec.cut(grad))
        with pytest.raises(OptimizerError, match=r"write fullshard\.optim\.OnOwners\(model, Adafactor, whole_param"):
            optimizer.step()


def test_theirs_are_refused_with_the_line_to_write() -> None:
    run_ranks(check_refused, 2)
