"""Learning rates, step by step, are those that Accelerate gives the same script.

pytest tests/api/test_accelerate_schedules.py
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from fullshard import Accelerator
from tests.distributed import preload, run_ranks

preload("accelerate")

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "split batches": {"split_batches": True},
    "accumulated": {"steps": 2},
    "accumulated, not adjusted": {"steps": 2, "adjust_scheduler": False},
    "on its own": {"with_optimizer": False, "steps": 2},
    "one cycle": {"schedule": "OneCycleLR"},
    "one cycle, accumulated": {"schedule": "OneCycleLR", "steps": 2},
    "one cycle, as long as there are optimizer steps": {"schedule": "OneCycleLR", "steps": 2, "total": 8},
    "one cycle, split batches": {"schedule": "OneCycleLR", "split_batches": True},
}


def _rates(library: str, case: dict[str, Any], **options: Any) -> list[float]:
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

    accelerator_class = importlib.import_module(library).Accelerator
    accelerator = accelerator_class(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=case.get("split_batches", False)),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=case.get("steps", 1), adjust_scheduler=case.get("adjust_scheduler", True)
        ),
        step_scheduler_with_optimizer=case.get("with_optimizer", True),
        **options,
    )
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.randn(28, 4)), batch_size=4)  # 7 batches, which 2 ranks cannot share evenly
    scheduler: Any
    if case.get("schedule") == "OneCycleLR":
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=case.get("total", 2 * len(loader)))
    else:
        total = 2 * len(loader)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (total - step) / total))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


def _compared(name: str) -> tuple[list[float], list[float]]:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    theirs = _rates("accelerate", CASES[name])
    return theirs, _rates("fullshard", CASES[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_rates_are_accelerates(name: str) -> None:
    for theirs, ours in run_ranks(_compared, 2, name):
        assert ours == pytest.approx(theirs, abs=1e-9)
        assert len({round(rate, 6) for rate in ours}) > 3, "a schedule that stands still would prove nothing"


def _once() -> list[float]:
    return _rates("fullshard", {}, step_scheduler_once=True)


def test_a_schedule_may_step_once_per_optimizer_step() -> None:
    for world_size, steps in ((2, 8), (1, 14)):  # of 14
        for rates in run_ranks(_once, world_size):
            assert rates == pytest.approx([1 - step / 14 for step in range(1, steps + 1)])


def _resumed(directory: str, is_saved: bool) -> str:
    """Save on some ranks or load on others, and return what is printed."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, _ = accelerator.prepare(model, optimizer, lr_scheduler.StepLR(optimizer, 1))
    said: list[str] = []
    vars(accelerator)["_say"] = said.append
    (accelerator.save_state if is_saved else accelerator.load_state)(directory)
    return "\n".join(said)


def test_another_number_of_ranks_is_another_schedule(tmp_path: Path) -> None:
    """As in Accelerate, which does not say so."""
    assert run_ranks(_resumed, 2, str(tmp_path / "saved"), True) == ["", ""]
    assert run_ranks(_resumed, 2, str(tmp_path / "saved"), False) == ["", ""]
    [said] = run_ranks(_resumed, 1, str(tmp_path / "saved"), False)
    assert "schedules advance by 1 per optimizer step, but by 2 in the run that saved" in said
    assert "Accelerator(step_scheduler_once=True)" in said
