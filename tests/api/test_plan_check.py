"""An Accelerator's and a Trainer's jobs compared with their plans: events, bytes sent, bytes held.

pytest tests/api/test_plan_check.py            # -m full for all
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from fullshard import Accelerator
from fullshard.api.planning import planned_optimizer
from fullshard.optim import Muon, OnOwners
from fullshard.plan.job import Job
from tests import trainers
from tests.distributed import run_ranks
from tests.plan_check import PlanCheck

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "Muon": lambda model: Muon(model, lr=1e-3),
    "Adafactor": lambda model: OnOwners(model, torch.optim.Adafactor, lr=1e-3),
}


def watch(accelerator: Any, model: Any, optimizer: torch.optim.Optimizer) -> PlanCheck:
    job = Job.from_run(accelerator._config, accumulation=accelerator.gradient_accumulation_steps)
    return PlanCheck(model, optimizer, job.model_copy(update={"optimizer": planned_optimizer(optimizer) or "none"}))


def differences(check: PlanCheck) -> list[str]:
    """Return what differs. The planner has no formula for the state of some optimizers."""
    unknown = {"optimizer state"} if check.job.optimizer == "none" else set[str]()
    return [str(found) for found in check.report() if not found.is_as_planned and found.category not in unknown]


def train(kind: str, strategy: str, precision: str, accumulation: int, *, cpu: bool = True) -> list[list[str]]:
    """Train two models in turn, and return what differs from the plan of each."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "mixed_precision": precision}
    accelerator = Accelerator(cpu=cpu, fsdp_plugin={"strategy": strategy}, **settings)
    models = [trainers.build("llama"), trainers.build("tied")]
    pairs = [accelerator.prepare(model, OPTIMIZERS[kind](model)) for model in models]
    checks = [watch(accelerator, model, optimizer.optimizer) for model, optimizer in pairs]
    for number in range(3 * accumulation):
        ids = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(number)).to(accelerator.device)
        with accelerator.accumulate(*(model for model, _ in pairs)):
            for model, optimizer in pairs:
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
    return [differences(check) for check in checks]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "strategy", "precision", "accumulation"),
    [
        ("AdamW", "SHARD_GRAD_OP", "no", 2),
        ("AdamW", "NO_SHARD", "no", 1),
        ("SGD", "FULL_SHARD", "bf16", 1),
        ("Muon", "FULL_SHARD", "no", 1),
        ("Adafactor", "FULL_SHARD", "no", 1),
    ],
)
def test_an_accelerator_keeps_to_its_plan(kind: str, strategy: str, precision: str, accumulation: int) -> None:
    for found in run_ranks(train, 2, kind, strategy, precision, accumulation):
        assert found == [[], []]


@pytest.mark.gpu
def test_an_accelerator_on_a_gpu_keeps_to_its_plan() -> None:
    on_gpu = functools.partial(train, cpu=False)
    assert run_ranks(on_gpu, 1, "AdamW", "FULL_SHARD", "bf16", 2, kind="cuda") == [[[], []]]


class Watching(TrainerCallback):
    """Begins the comparison when a Trainer has prepared its model."""

    check: PlanCheck
    trainer: Any

    def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
        self.check = watch(self.trainer.accelerator, model, optimizer.optimizer)


def train_by_trainer(output: str) -> list[str]:
    watching = Watching()
    made = trainers.trainer(trainers.build("llama"), trainers.arguments(output), callbacks=[watching])
    watching.trainer = made
    made.train()
    return differences(watching.check)


@pytest.mark.full
def test_a_trainer_keeps_to_its_plan(tmp_path: Path) -> None:
    assert run_ranks(train_by_trainer, 2, str(tmp_path)) == [[], []]
