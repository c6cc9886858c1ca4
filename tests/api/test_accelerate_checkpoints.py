"""Accelerate's own functions that save a sharded model, and models that save themselves.

pytest tests/api/test_accelerate_checkpoints.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import fsdp_utils
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from torch.distributed.fsdp import StateDictType
from typer.testing import CliRunner

from fullshard import checkpoint
from fullshard.api import Accelerator, FullyShardedDataParallelPlugin
from fullshard.checkpoint import full_state
from fullshard.cli.ckpt import app
from fullshard.core.errors import CheckpointError, LifecycleError
from tests.distributed import run_ranks


def build(seed: int, kind: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type=kind))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.rand(3, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


def _moments(optimizer: Any) -> list[torch.Tensor]:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [getattr(value, "full_tensor", lambda v=value: v)() for state in states for value in state.values()]


def _round(directory: str, kind: str, index: int) -> tuple[Any, ...]:
    accelerator, model, optimizer = build(1, StateDictType[kind])
    plugin = accelerator.fsdp_plugin
    _, other, its = build(2, kind)
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, directory, index)
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, directory, index)
    fsdp_utils.load_fsdp_model(plugin, accelerator, other, directory, index)
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, its, other, directory, index)
    return (
        checkpoint.full_state_dict(model),
        checkpoint.full_state_dict(other),
        _moments(optimizer),
        _moments(its),
    )


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_accelerates_own_functions_save_and_load_all_of_it(tmp_path: Path, kind: str, index: int) -> None:
    (saved, loaded, moments, others), _ = run_ranks(_round, 2, str(tmp_path), kind, index)
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert len(moments) == len(others) > 0 and all(map(torch.equal, moments, others))


def test_a_type_of_state_dict_is_torchs_and_its_name() -> None:
    plugin = FullyShardedDataParallelPlugin(state_dict_type="FULL_STATE_DICT")
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT == plugin.state_dict_type
    assert plugin.state_dict_type == "FULL_STATE_DICT" and plugin.state_dict_type != StateDictType.LOCAL_STATE_DICT
    plugin.set_state_dict_type(StateDictType.SHARDED_STATE_DICT)
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT and f"{plugin.state_dict_type}"[:7] == "SHARDED"


class Diffusing(nn.Module):
    """Saves itself as diffusers' models do: what it is given besides is of no account, and every process writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)

    def save_pretrained(self, directory: str, is_main_process: bool = True, **_unused: object) -> None:
        if is_main_process:
            Path(directory).mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, f"{directory}/weights")


class Stating(nn.Linear):
    """Takes a state dict, as Transformers' models do."""

    def save_pretrained(self, directory: str, is_main_process: bool = True, state_dict: Any = None) -> Any:
        return directory, is_main_process, state_dict


def test_what_save_pretrained_is_given_by_place_is_what_it_gets() -> None:
    model: Any = Accelerator(cpu=True).prepare(Stating(2, 2))
    assert model.save_pretrained("a", False)[:2] == ("a", False)
    own = {"weight": torch.ones(1)}
    assert model.save_pretrained("a", True, own) == ("a", True, own)
    assert model.save_pretrained("a")[2].keys() == {"weight", "bias"}
    with pytest.raises(TypeError, match="too many positional"):
        model.save_pretrained("a", True, own, 1)


def _saved_by_itself(directory: str, strategy: str) -> Any:
    accelerator = Accelerator(cpu=True, fsdp_plugin={"strategy": strategy})
    torch.manual_seed(1)
    model = accelerator.prepare(Diffusing())
    is_main = accelerator.is_main_process
    model.save_pretrained(f"{directory}/gathered", is_main_process=is_main)
    if strategy != "NO_SHARD":  # of which every rank would write
        model.save_pretrained(f"{directory}/all")
        model.save_pretrained(f"{directory}/placed", is_main)
    state = accelerator.get_state_dict(model)
    model.save_pretrained(f"{directory}/given", is_main_process=is_main, state_dict=state)
    if is_main and (strategy == "NO_SHARD" or accelerator.num_processes == 1):
        model.save_pretrained(f"{directory}/alone")
    elif is_main:
        full_state.ALONE_SECONDS = 0.1
        with pytest.raises(LifecycleError, match="would save this rank's intervals"):
            model.save_pretrained(f"{directory}/alone")
    weights = checkpoint.full_state_dict(model)
    if strategy == "FULL_SHARD" and accelerator.num_processes > 1:
        accelerator.end_training()
        with pytest.raises(LifecycleError, match="would save this rank's intervals"):
            model.save_pretrained(f"{directory}/ended")
        with pytest.raises(CheckpointError, match="sharded over 2 ranks, but this process has destroyed"):
            checkpoint.full_state_dict(model)
    return weights


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "FULL_SHARD"), (2, "NO_SHARD"), (1, "FULL_SHARD")])
def test_a_model_that_takes_no_state_dict_saves_whole_weights(tmp_path: Path, world_size: int, strategy: str) -> None:
    weights = run_ranks(_saved_by_itself, world_size, str(tmp_path), strategy)[0]
    saved = {path.parent.name: load_file(path) for path in tmp_path.glob("*/weights")}
    has_all = strategy == "NO_SHARD" or world_size == 1
    of_all = {"gathered", "given"} if strategy == "NO_SHARD" else {"gathered", "given", "all", "placed"}
    assert saved.keys() == of_all | ({"alone"} if has_all else set())
    for each in saved.values():
        assert all(torch.equal(each[name], weights[name]) for name in weights)


def _job(has_two_groups: bool) -> tuple[nn.Module, Any, Any]:
    """Return a model, an optimizer with the groups of a script or of Trainer, and a schedule."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    weights, biases = [*model.parameters()][::2], [*model.parameters()][1::2]
    groups: Any = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups if has_two_groups else model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def _load_unsharded(directory: str, has_two_groups: bool) -> tuple[dict[str, Any], list[torch.Tensor], list[float]]:
    """Load as docs/migration.md shows. Return weights, moments, and the learning rate of optimizer and schedule."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule = _job(has_two_groups)
    load_model(model, f"{directory}/model.safetensors")
    optimizer.load_state_dict(torch.load(f"{directory}/optimizer.bin"))
    schedule.load_state_dict(torch.load(f"{directory}/scheduler.bin"))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = [optimizer.param_groups[0]["lr"], schedule.get_last_lr()[0]]
    return checkpoint.full_state_dict(model, rank0_only=False), _moments(optimizer), rates


@pytest.mark.parametrize("has_two_groups", [False, True], ids=["accelerate", "trainer"])
def test_unsharded_training_state_is_loaded_before_prepare(tmp_path: Path, has_two_groups: bool) -> None:
    model, optimizer, schedule = _job(has_two_groups)
    model(torch.rand(3, 5)).sum().backward()
    optimizer.step()
    schedule.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    torch.save(schedule.state_dict(), tmp_path / "scheduler.bin")
    for weights, moments, rates in run_ranks(_load_unsharded, 2, str(tmp_path), has_two_groups):
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
        assert all(map(torch.equal, moments, _moments(optimizer)))
        assert rates == [optimizer.param_groups[0]["lr"]] * 2 == [pytest.approx(1e-4)] * 2


def test_load_state_reads_what_an_import_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An import has neither schedules nor positions of loaders: a line says that they stay as they are."""
    accelerator, model, optimizer = build(1, "SHARDED_STATE_DICT")
    checkpoint.save_checkpoint(tmp_path / "import", model=model, optimizer=optimizer.optimizer)
    weights, moments = checkpoint.full_state_dict(model), _moments(optimizer)
    accelerator, model, optimizer = build(2, "SHARDED_STATE_DICT")
    rows: Any = list(range(6))
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    loader, schedule = accelerator.prepare(loader, schedule)
    accelerator.load_state(tmp_path / "import")
    assert (
        "was not saved by save_state: schedulers, a scaler, registered objects, data loaders and"
        in capsys.readouterr().err
    )
    assert all(torch.equal(value, weights[name]) for name, value in checkpoint.full_state_dict(model).items())
    assert all(map(torch.equal, _moments(optimizer), moments))
    accelerator.save_state(tmp_path / "own")
    accelerator.load_state(tmp_path / "own")
    assert "was not saved" not in capsys.readouterr().err
    optimizer.step()
    schedule.scheduler.step()
    places = {"model": model, "optimizer": optimizer.optimizer, "scheduler": schedule.scheduler}
    checkpoint.save_checkpoint(tmp_path / "scheduled", **places)
    schedule.scheduler.step()
    accelerator.load_state(tmp_path / "scheduled")
    assert schedule.scheduler.last_epoch == 1, "what it holds is loaded"


def test_load_state_of_an_import_without_an_optimizer_loads_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = build(1, "SHARDED_STATE_DICT")[1]
    weights = checkpoint.full_state_dict(source)
    (tmp_path / "theirs").mkdir()
    save_file(weights, tmp_path / "theirs" / "model.safetensors")
    done = CliRunner().invoke(app, ["import", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    assert done.exit_code == 0, done.output
    accelerator, model, optimizer = build(2, "SHARDED_STATE_DICT")
    moments = _moments(optimizer)
    accelerator.load_state(tmp_path / "ours")
    assert "ours was imported without an optimizer: only weights are loaded" in capsys.readouterr().err
    assert all(torch.equal(value, weights[name]) for name, value in checkpoint.full_state_dict(model).items())
    assert moments and all(map(torch.equal, _moments(optimizer), moments))
    accelerator, model, _ = build(3, "SHARDED_STATE_DICT")
    checkpoint.load_checkpoint(tmp_path / "ours", model=model)
    assert all(torch.equal(value, weights[name]) for name, value in checkpoint.full_state_dict(model).items())
    checkpoint.save_checkpoint(tmp_path / "weights", model=model)
    with pytest.raises(CheckpointError, match="the optimizer was not saved") as refused:
        accelerator.load_state(tmp_path / "weights")
    assert str(refused.value.hint).endswith(f"load_checkpoint({str(tmp_path / 'weights')!r}, model=model)")


def test_a_folder_of_checkpoints_is_answered_with_the_newest(tmp_path: Path) -> None:
    accelerator, model, _ = build(1, "SHARDED_STATE_DICT")
    for name in ("step-2", "step-1"):
        checkpoint.save_checkpoint(tmp_path / name, model=model)
    os.utime(tmp_path / "step-1" / "manifest.json", (2e9, 2e9))
    with pytest.raises(CheckpointError, match="does not hold a complete checkpoint") as refused:
        accelerator.load_state(tmp_path)
    assert refused.value.hint == f"it contains a checkpoint: {tmp_path / 'step-1'}"
    (tmp_path / "theirs").mkdir()
    with pytest.raises(CheckpointError, match="does not hold a complete checkpoint") as refused:
        accelerator.load_state(tmp_path / "theirs")
    assert f"`fullshard ckpt import {tmp_path / 'theirs'} OUT` converts" in str(refused.value.hint)
