"""Options of Transformers' Trainer: two ranks on fullshard's engine, and two plain processes.

pytest tests/others/test_trainer_options.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.checkpoint import full_state_dict
from tests.distributed import run_ranks
from tests.trainers import OFFLINE, arguments, build, close, logged, samples, trainer


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes get this process's environment."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)


def run(output: str, stock: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Train on texts of different lengths, then evaluate and predict over numbers of them that do not divide."""
    made = trainer(
        build(),
        arguments(output, stock=stock, per_device_train_batch_size=2, **options),
        stock=stock,
        train_dataset=samples(lengths=(12, 5, 9)),
        eval_dataset=samples(7, lengths=(12, 5, 9)),
    )
    made.train()
    weights = made.model.state_dict() if stock else full_state_dict(made.model)
    return logged(made) | {
        "evaluation": [made.evaluate()["eval_loss"]],
        "predictions": torch.from_numpy(made.predict(samples(5, lengths=(4, 11, 7))).predictions),
        "weights": {name: value.detach().clone() for name, value in weights.items()},
    }


@pytest.mark.parametrize(
    "options",
    [
        {"average_tokens_across_devices": False},
        pytest.param({"average_tokens_across_devices": True}, marks=pytest.mark.full),
        pytest.param({"neftune_noise_alpha": 5.0}, marks=pytest.mark.full),
        pytest.param({"torch_empty_cache_steps": 1}, marks=pytest.mark.full),
    ],
    ids=lambda options: next(iter(options)),
)
def test_option(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = run_ranks(run, 2, str(tmp_path / "plain"), True, options)[0]
    found = run_ranks(run, 2, str(tmp_path / "sharded"), False, options)[0]
    for key in ("losses", "norms", "evaluation"):
        assert close(found[key], plain[key]), key
    torch.testing.assert_close(found["predictions"], plain["predictions"], rtol=1e-5, atol=1e-5)
    for name, value in plain["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-5, atol=1e-6)
