"""Options of Transformers' Trainer: two ranks on fullshard's engine, and two plain processes.

pytest tests/others/test_trainer_options.py
"""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.checkpoint import full_state_dict
from fullshard.core.errors import CommunicationError
from fullshard.integrations.transformers import batch_size
from tests.differential import CLOSE
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


def run_short_of_memory(output: str, ranks: tuple[int, ...]) -> Any:
    """Train with batches of 6, where ranks have memory for 4 from the third step on, and others stop there."""
    batch_size.WAIT = timedelta(seconds=3)
    gc.freeze()  # each try begins with a collection; what the server of the tests imported need not be gone through
    settings: dict[str, Any] = {"per_device_train_batch_size": 6, "auto_find_batch_size": True}
    made = trainer(build(), arguments(output, **settings), train_dataset=samples(lengths=(12, 5, 9)))
    whole, sizes = made.training_step, []

    def limited(model: Any, inputs: dict[str, torch.Tensor], *further: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if len(sizes) > 2 and sizes[-1] > 4:
            if dist.get_rank() not in ranks:
                raise ValueError("stopped")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return whole(model, inputs, *further)

    made.training_step = limited
    try:
        made.train()
    except (ValueError, CommunicationError) as error:
        return str(error)
    return logged(made) | {"sizes": sizes, "batch_size": made.state.train_batch_size}


@pytest.mark.full
def test_auto_find_batch_size_starts_again_on_all_ranks(tmp_path: Path) -> None:
    found, other = run_ranks(run_short_of_memory, 2, str(tmp_path), (0, 1))
    assert found["sizes"] == [6, 6, 6, 5, 4, 4, 4, 4] and found["batch_size"] == 4
    assert len(found["losses"]) == 4 and found == other


@pytest.mark.full
def test_auto_find_batch_size_on_one_rank_is_an_error(tmp_path: Path) -> None:
    stopped, found = run_ranks(run_short_of_memory, 2, str(tmp_path), (1,))
    assert stopped == "stopped"
    assert "rank 1 ran out of memory with batches of 6, but rank 0 did not within 3 s" in found
    assert "per_device_train_batch_size=5" in found


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
    torch.testing.assert_close(found["predictions"], plain["predictions"], **CLOSE)
    for name, value in plain["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, **CLOSE)
