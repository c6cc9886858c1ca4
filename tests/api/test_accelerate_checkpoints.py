"""`accelerate.utils.save_fsdp_model` and its companions with a model that is sharded here.

pytest tests/api/test_accelerate_checkpoints.py
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import accelerate.utils
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import StateDictType

from fullshard import checkpoint
from fullshard.api import Accelerator, FullyShardedDataParallelPlugin
from fullshard.checkpoint import full_state
from fullshard.core.errors import CheckpointError, ConfigError, LifecycleError
from fullshard.features import unsharded
from tests.distributed import run_ranks


def build(seed: int, kind: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type=kind))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
    model[0].register_buffer("turned", torch.rand(3, 2).t())  # whose memory is in another order
    return accelerator, accelerator.prepare(model)


def _round(directory: str, kind: str, index: int) -> tuple[Any, Any]:
    accelerator, model = build(1, StateDictType[kind])
    plugin = accelerator.fsdp_plugin
    accelerate.utils.save_fsdp_model(plugin, accelerator, model, directory, index)
    _, other = build(2, kind)
    accelerator.wait_for_everyone()
    before = {path: path.stat().st_mtime_ns for path in [Path(directory), *Path(directory).iterdir()]}
    accelerate.utils.load_fsdp_model(plugin, accelerator, other, directory, model_index=index)
    accelerator.wait_for_everyone()
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())  # it may be for reading only
    accelerator.wait_for_everyone()
    if kind == "SHARDED_STATE_DICT":
        accelerate.utils.merge_fsdp_weights(f"{directory}/pytorch_model_fsdp_{index}", f"{directory}/merged")
    return checkpoint.full_state_dict(model), checkpoint.full_state_dict(other)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_weights_are_saved_and_loaded(tmp_path: Path, kind: str, index: int) -> None:
    (saved, loaded), _ = run_ranks(_round, 2, str(tmp_path), kind, index)
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
    if kind == "SHARDED_STATE_DICT":
        merged = load_file(tmp_path / "merged" / "model.safetensors")
        assert {path.name for path in tmp_path.iterdir()} == {f"pytorch_model_fsdp_{index}", "merged"}
    else:
        name = "pytorch_model_fsdp.bin" if index == 0 else "pytorch_model_fsdp_1.bin"
        assert [path.name for path in tmp_path.iterdir()] == [name]
        merged = torch.load(tmp_path / name, weights_only=True)
    assert all(torch.equal(saved[name], merged[name]) for name in saved)


def _refused(directory: str) -> None:
    accelerator, model = build(1, "SHARDED_STATE_DICT")
    plugin, optimizer = accelerator.fsdp_plugin, torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match="files per rank"):
        accelerate.utils.save_fsdp_model(plugin, accelerator, model, directory, use_dcp=False)
    with pytest.raises(ConfigError, match="optimizer state is saved with its model"):
        accelerate.utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, directory)
    with pytest.raises(CheckpointError, match="there are no weights at"):
        accelerate.utils.load_fsdp_model(plugin, accelerator, model, directory)
    accelerate.utils.save_fsdp_model(plugin, accelerator, model, directory)
    wider = accelerator.prepare(nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 1)))
    with pytest.raises(CheckpointError, match=r"'0.weight' has shape \(9, 5\), got \(7, 5\)"):
        accelerate.utils.load_fsdp_model(plugin, accelerator, wider, directory)
    accelerator, model = build(1, "FULL_STATE_DICT")
    file = Path(directory) / "pytorch_model_fsdp.bin"
    file.write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match=rf"{file} is no file of torch\.save"):
        accelerate.utils.load_fsdp_model(accelerator.fsdp_plugin, accelerator, model, directory)


def test_what_cannot_be_is_an_error(tmp_path: Path) -> None:
    run_ranks(_refused, 2, str(tmp_path))


def _bound_early(directory: str) -> tuple[Any, Any]:
    """By Accelerate's own functions, as a script has them that bound their names before anything was replaced."""
    accelerator, model = build(1, "SHARDED_STATE_DICT")
    plugin = accelerator.fsdp_plugin
    inspect.unwrap(accelerate.utils.save_fsdp_model)(plugin, accelerator, model, directory)
    _, other = build(2, "SHARDED_STATE_DICT")
    inspect.unwrap(accelerate.utils.load_fsdp_model)(plugin, accelerator, other, directory)
    return checkpoint.full_state_dict(model), checkpoint.full_state_dict(other)


def test_accelerates_own_functions_save_and_load_all_of_it(tmp_path: Path) -> None:
    (saved, loaded), _ = run_ranks(_bound_early, 2, str(tmp_path))
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)


def _cannot_be_written(directory: str) -> None:
    accelerator, model = build(1, "SHARDED_STATE_DICT")
    with unsharded(model), pytest.raises(CheckpointError, match="is held unsharded"):
        accelerate.utils.save_fsdp_model(accelerator.fsdp_plugin, accelerator, model, directory)
    assert not Path(directory, ".fullshard-staged").exists()
    with pytest.raises(CheckpointError, match="pytorch_model_fsdp_0 is a file" if accelerator.is_main_process else ""):
        accelerate.utils.save_fsdp_model(accelerator.fsdp_plugin, accelerator, model, directory)


def test_a_save_that_fails_leaves_no_copy(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model_fsdp_0").write_text("notes")  # where a directory is wanted
    run_ranks(_cannot_be_written, 2, str(tmp_path))
    assert (tmp_path / "pytorch_model_fsdp_0").read_text() == "notes"
    assert not (tmp_path / ".fullshard-staged").exists()


def _whole_fails(directory: str) -> None:
    accelerator, model = build(1, "FULL_STATE_DICT")
    plugin = accelerator.fsdp_plugin
    with pytest.raises(IsADirectoryError):
        accelerate.utils.save_fsdp_model(plugin, accelerator, model, directory)
    with pytest.raises(CheckpointError, match=r"pytorch_model_fsdp_1\.bin is no file of torch\.save"):
        accelerate.utils.load_fsdp_model(plugin, accelerator, model, directory, model_index=1)


def test_what_fails_on_the_main_process_fails_on_all(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model_fsdp.bin").mkdir()  # where a file is wanted
    (tmp_path / "pytorch_model_fsdp_1.bin").write_text("no weights")
    run_ranks(_whole_fails, 2, str(tmp_path))


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

    def save_lora_adapter(self, directory: str) -> None:
        self.save_pretrained(directory)


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
        model.save_lora_adapter(f"{directory}/adapter")
    elif is_main:
        with pytest.raises(LifecycleError, match=r"has a part of the adapter\nhint: on every rank: whole = acc"):
            model.save_lora_adapter(f"{directory}/adapter")
        full_state.ALONE_SECONDS = 0.1
        with pytest.raises(LifecycleError, match="would write this rank's intervals"):
            model.save_pretrained(f"{directory}/alone")
    weights = checkpoint.full_state_dict(model)
    if strategy == "FULL_SHARD" and accelerator.num_processes > 1:
        accelerator.end_training()
        with pytest.raises(LifecycleError, match="would write this rank's intervals"):
            model.save_pretrained(f"{directory}/ended")
        with pytest.raises(CheckpointError, match="sharded over 2 ranks, which this process has left"):
            checkpoint.full_state_dict(model)
    return weights


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "FULL_SHARD"), (2, "NO_SHARD"), (1, "FULL_SHARD")])
def test_a_model_that_takes_no_state_dict_saves_whole_weights(tmp_path: Path, world_size: int, strategy: str) -> None:
    weights = run_ranks(_saved_by_itself, world_size, str(tmp_path), strategy)[0]
    saved = {path.parent.name: load_file(path) for path in tmp_path.glob("*/weights")}
    has_all = strategy == "NO_SHARD" or world_size == 1
    of_all = {"gathered", "given"} if strategy == "NO_SHARD" else {"gathered", "given", "all", "placed"}
    assert saved.keys() == of_all | ({"alone", "adapter"} if has_all else set())
    for each in saved.values():
        assert all(torch.equal(each[name], weights[name]) for name in weights)
