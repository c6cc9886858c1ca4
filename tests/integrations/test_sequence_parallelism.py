"""Sequence parallelism in Accelerate's documented loop, in Trainer and in TRL, against one process.

pytest tests/integrations/test_sequence_parallelism.py -m full
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch.utils.data import DataLoader

import fullshard
from fullshard.core.errors import ConfigError, DataError
from tests import trainers, trl_runs
from tests.distributed import run_ranks

pytestmark = pytest.mark.full
TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
LENGTHS = (9, 12, 11)
BACKENDS = ["fullshard", *(["deepspeed"] if find_spec("deepspeed") else [])]


def config(backend: str, sp: int = 2, **handler: Any) -> Any:
    """Return a config with `sp` ranks per sequence, or None with one."""
    if sp == 1 or dist.get_world_size() == 1:
        return None
    options = DeepSpeedSequenceParallelConfig(**handler)
    shards = dist.get_world_size() // sp
    return fullshard.ParallelismConfig(dp_shard_size=shards, sp_size=sp, sp_backend=backend, sp_handler=options)


def batch_size(sp: int = 2) -> int:
    """Return how many samples each batch has, so that a step has four."""
    return 4 // max(1, dist.get_world_size() // sp)


def data() -> list[dict[str, torch.Tensor]]:
    """Return samples of which some have no label in the part of the first rank."""
    rows = trainers.samples(lengths=LENGTHS)
    for number, row in enumerate(rows):
        row["labels"] = row["labels"].clone()
        row["labels"][: 7 if number % 3 else 2] = -100
    return rows


def loader_of(rows: Any, size: int, **options: Any) -> Any:
    return DataLoader(rows, batch_size=size, collate_fn=trainers.pad, **options)


def loop(backend: str, accumulation: int, sp: int, directory: str | None = None) -> dict[str, Any]:
    """Train as Accelerate's guide to sequence parallelism does."""
    config_of_ranks = config(backend, sp, sp_attn_implementation="sdpa")
    accelerator = fullshard.Accelerator(
        cpu=True, parallelism_config=config_of_ranks, gradient_accumulation_steps=accumulation
    )
    model = trainers.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = loader_of(data(), batch_size(sp), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, model) is loader
    losses, norms, words = [], [], []
    model.train()
    mesh: Any = accelerator.torch_device_mesh
    for batch in loader:
        words.append(int(accelerator.reduce((batch["labels"] != -100).sum(), "sum")))
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            if config_of_ranks is not None:
                loss = weighted(loss, batch["shift_labels"], mesh["sp"].get_group())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    if directory is not None:
        accelerator.save_state(directory)
    weights = accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "words": words, "weights": weights}


def weighted(loss: torch.Tensor, shift_labels: torch.Tensor, group: Any) -> Any:
    """Return the loss of whole sequences as the guide does, if torch can do so on CPUs: in a group of all ranks."""
    from torch.distributed.nn import functional

    count = (shift_labels != -100).sum()
    if dist.get_world_size(group) < dist.get_world_size():
        total = count.clone()
        dist.all_reduce(total, group=group)
        return torch.where(count > 0, loss * count, 0.0) * dist.get_world_size(group) / total
    losses = functional.all_gather(loss, group=group)
    counts = functional.all_gather(count, group=group)
    total = sum(one * count for one, count in zip(losses, counts, strict=True) if count > 0)
    return total / max(sum(counts), 1)


def resumed(directory: str) -> Any:
    accelerator = fullshard.Accelerator(cpu=True)
    model = trainers.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = loader_of(data(), 4)
    model, *_ = accelerator.prepare(model, optimizer, loader)
    accelerator.load_state(directory)
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:.*all_gather is deprecated:FutureWarning")
def test_accelerates_loop(backend: str, tmp_path: Path) -> None:
    for ranks, accumulation in ((2, 1), (4, 2)):
        alone = run_ranks(loop, ranks // 2, backend, accumulation, 1)[0]
        together = run_ranks(loop, ranks, backend, accumulation, 2, str(tmp_path / f"{ranks}"))[0]
        torch.testing.assert_close(together, alone, **TOLERANCE)
        later = run_ranks(resumed, 1, str(tmp_path / f"{ranks}"))[0]
        assert all(torch.equal(later[name], value) for name, value in together["weights"].items())


def shifting(output: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return a loss that shifts labels itself, so that it needs the logits of whole sequences."""
    logits, shifted = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, shifted, reduction="sum") / num_items_in_batch


LOSSES = {"shifting": shifting}


def train(output: str, backend: str, settings: dict[str, Any]) -> Any:
    options: dict[str, Any] = {
        **{"per_device_train_batch_size": batch_size(), "per_device_eval_batch_size": batch_size()},
        **{"parallelism_config": config(backend), "optim": "sgd", "learning_rate": 0.1, "max_steps": -1},
        **{"num_train_epochs": 1, "eval_strategy": "epoch"},
    }
    family, loss = settings.pop("family", "llama"), LOSSES.get(settings.pop("loss", None))
    made = trainers.trainer(
        trainers.build(family),
        trainers.arguments(output, **options | settings),
        train_dataset=data(),
        eval_dataset=data()[:8],
        compute_loss_func=loss,
    )
    made.train()
    evaluated = [line["eval_loss"] for line in made.state.log_history if "eval_loss" in line]
    return trainers.result(made) | {"evaluated": evaluated, "steps": made.state.max_steps}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {}),
        (2, {"gradient_accumulation_steps": 2, "family": "experts"}),
        (4, {"gradient_accumulation_steps": 2}),
        (4, {"loss": "shifting"}),
        (2, {"label_smoothing_factor": 0.1}),
    ],
)
def test_trainer(tmp_path: Path, backend: str, ranks: int, settings: dict[str, Any]) -> None:
    alone = run_ranks(train, 1, str(tmp_path), backend, settings)[0]
    together = run_ranks(train, ranks, str(tmp_path), backend, settings)[0]
    assert together["steps"] == 6 // settings.get("gradient_accumulation_steps", 1)
    for name in ("losses", "norms", "weights", "evaluated"):
        torch.testing.assert_close(together[name], alone[name], **TOLERANCE)


def by_trl(place: str, output: str, name: str, lora: bool, settings: dict[str, Any]) -> Any:
    size = batch_size()
    more = {"per_device_train_batch_size": size, "parallelism_config": config("fullshard"), "optim": "sgd"}
    more |= {"per_device_eval_batch_size": size, "eval_strategy": "epoch", "_eval_rows": 4, "max_steps": 4}
    made = trl_runs.build(place, name, lora, False, output, more | settings)
    made.train()
    lines = [line for line in made.state.log_history if "num_tokens" in line or "eval_loss" in line]
    return trainers.result(made) | {"counts": [line.get("num_tokens", line.get("eval_loss")) for line in lines]}


@pytest.mark.parametrize(
    ("name", "lora", "settings"),
    [
        ("SFT", False, {}),
        ("SFT", False, {"loss_type": "dft", "gradient_accumulation_steps": 2}),
        ("DPO", False, {"gradient_accumulation_steps": 2}),
        ("DPO", True, {}),
        ("OnlineDPO", False, {"eval_strategy": "no"}),
        *((name, False, {}) for name in ("KTO", "Reward", "CPO", "ORPO", "TPO", "GKD", "GOLD")),
    ],
    ids=str,
)
def test_trainers_of_trl(tmp_path: Path, name: str, lora: bool, settings: dict[str, Any]) -> None:
    trl_runs.write_model(tmp_path)
    for ranks in ("1", "2"):
        (tmp_path / ranks).mkdir()
    alone, together = (
        run_ranks(by_trl, ranks, str(tmp_path), str(tmp_path / str(ranks)), name, lora, settings)[0] for ranks in (1, 2)
    )
    assert alone["counts"] or name == "OnlineDPO"
    for key in ("losses", "norms", "weights", "counts"):
        torch.testing.assert_close(together[key], alone[key], **TOLERANCE)


def check_refused(place: str, output: str) -> None:
    with pytest.raises(ConfigError, match="SDFTTrainer generates its batches"):
        by_trl(place, output, "SDFT", False, {"eval_strategy": "no"})
    made = trainers.trainer(trainers.build(), trainers.arguments(output, parallelism_config=config("fullshard")))
    with pytest.raises(ConfigError, match="predictions are not gathered"):
        made.predict(data()[:4])
    accelerator = fullshard.Accelerator(
        cpu=True, parallelism_config=config("fullshard", sp_seq_length=16, sp_seq_length_is_variable=False)
    )
    loader = accelerator.prepare(loader_of(data(), 2))
    with pytest.raises(DataError, match="12 tokens per sequence, but sp_seq_length is 16"):
        next(iter(loader))
    with pytest.raises(ConfigError, match="got a loader that is not prepared"):
        accelerator.deepspeed_ulysses_dl_adapter(loader.base_dataloader, torch.nn.Identity())


def test_what_is_refused(tmp_path: Path) -> None:
    trl_runs.write_model(tmp_path)
    run_ranks(check_refused, 2, str(tmp_path), str(tmp_path))
