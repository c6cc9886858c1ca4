"""Every division of ranks saves, exports, and resumes what every other one has saved.

pytest tests/integrations/test_resume_matrix.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fullshard import ParallelismConfig
from fullshard.api import Accelerator
from fullshard.checkpoint import export_hf, save_checkpoint
from fullshard.checkpoint.offline import compare, open_source
from fullshard.cli.main import app
from fullshard.features.sequence_parallel import cut_batch
from tests.api.test_context_parallel import split_layers
from tests.distributed import end_workers, run_ranks
from tests.integrations.test_expert_parallelism import EP, adam, batch, load, saved

Sizes = dict[str, Any]
MESHES: dict[str, tuple[int, Sizes]] = {
    "one": (1, {}),
    "fsdp2": (2, {"dp_shard_size": 2}),
    "cp2": (2, {"cp_size": 2}),
    "sp2": (2, {"sp_size": 2, "sp_backend": "fullshard"}),
    "cp2 x dp2": (4, {"cp_size": 2, "dp_shard_size": 2}),
    "tp2 x cp2": (4, {"tp_size": 2, "cp_size": 2}),
    "ep2": (2, EP[2]),
    "ep2 x fsdp2": (4, EP[4]),
    "ep2 x replicas": (4, {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}),
    "ep4, tp2": (4, {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}),
}
OF_FAMILY = {
    "llama": [name for name in MESHES if "ep" not in name],
    "qwen3_moe": [name for name in MESHES if name != "tp2 x cp2"],
}
STEPS = 2


def prepared(path: str, sizes: Sizes, how: str = "") -> tuple[Accelerator, Any, Any]:
    """Return an Accelerator with a model and an optimizer on the mesh of Accelerate's or Transformers' sizes."""
    is_loaded_sharded = "fsdp_size" in sizes
    named = {name: size for name, size in sizes.items() if name not in ("fsdp_size", "ep_size")}
    if is_loaded_sharded:
        named["dp_shard_size"] = sizes["fsdp_size"] // (sizes.get("cp_size", 1) * sizes.get("sp_size", 1))
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**named) if sizes else None)
    model = load(path, sizes if is_loaded_sharded else None)
    if sizes.get("tp_size", 1) > 1 and not is_loaded_sharded:
        split_layers(model, accelerator.torch_device_mesh["tp"])  # type: ignore[index]
    if how == "recomputed":
        model.train().gradient_checkpointing_enable()
    if how == "compiled":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    return accelerator, *accelerator.prepare(model, adam(model))


def train(accelerator: Accelerator, model: Any, optimizer: Any, sizes: Sizes, steps: range) -> list[float]:
    """Return the loss and the norm of the gradients of each step."""
    tiles, parts = (sizes.get(name, 1) for name in ("tp_size", "sp_size"))
    per_batch = tiles * parts * sizes.get("cp_size", 1)
    copies = accelerator.num_processes // tiles
    own = slice(accelerator.process_index // per_batch, None, accelerator.num_processes // per_batch)
    history = []
    for step in steps:
        tokens, labels = batch(step)
        count = int((labels[:, 1:] != -100).sum())
        inputs = {"input_ids": tokens[own].clone(), "labels": labels[own].clone()}
        if parts > 1:
            inputs = cut_batch(inputs, rank=accelerator.process_index % parts, size=parts)
        elif per_batch > tiles:
            inputs["shift_labels"] = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        buffers = list(inputs.values())
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
            loss = model(**inputs, num_items_in_batch=count).loss * copies
            accelerator.backward(loss)
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        history += [accelerator.reduce(loss.detach(), "mean").item(), float(norm)]
    return history


def train_alone(path: str) -> list[float]:
    return train(*prepared(path, {}), {}, range(STEPS + 1))


SPLIT: dict[str, Sizes] = {"cp": {"cp_size": 2}, "sp": {"sp_size": 2, "sp_backend": "fullshard"}}


def check_combined(path: str, sizes: Sizes, how: str) -> list[float]:
    accelerator, model, optimizer = prepared(path, sizes, how)
    return train(accelerator, model, optimizer, sizes, range(STEPS + 1))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("how", ["recomputed", "compiled", "cp", "sp"])
def test_expert_parallelism_with_another_technique(how: str, ranks: int, tmp_path: Path) -> None:
    path = saved("qwen3_moe", tmp_path)
    expected = run_ranks(train_alone, 1, path)[0]
    end_workers()
    found = run_ranks(check_combined, ranks, path, {**EP[ranks], **SPLIT.get(how, {})}, how)[0]
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


def check_saved(path: str, sizes: Sizes, directory: str) -> list[float]:
    accelerator, model, optimizer = prepared(path, sizes)
    history = train(accelerator, model, optimizer, sizes, range(STEPS))
    accelerator.save_state(directory)
    export_hf(f"{directory}-exported", model=model)
    model.save_pretrained(f"{directory}-pretrained", is_main_process=accelerator.is_main_process)
    return history


def check_resumed(path: str, sizes: Sizes, directory: str) -> list[float]:
    accelerator, model, optimizer = prepared(path, sizes)
    accelerator.load_state(directory)
    save_checkpoint(f"{directory}-again", model=model, optimizer=optimizer.optimizer, overwrite=True)
    return train(accelerator, model, optimizer, sizes, range(STEPS, STEPS + 1))


def on_mesh(name: str, check: Callable[[str, Sizes, str], list[float]], path: str, directory: str) -> list[float]:
    ranks, sizes = MESHES[name]
    end_workers()  # torch keeps meshes for their sizes, and with them the names of groups that are gone
    history: list[float] = run_ranks(check, ranks, path, sizes, directory)[0]
    return history


@pytest.mark.full
@pytest.mark.parametrize(("family", "saver"), [(family, name) for family, names in OF_FAMILY.items() for name in names])
def test_each_mesh_resumes_on_every_other(family: str, saver: str, tmp_path: Path) -> None:
    path = saved(family, tmp_path)
    directory = str(tmp_path / "saved")
    expected = run_ranks(train_alone, 1, path)[0]
    history = on_mesh(saver, check_saved, path, directory)
    torch.testing.assert_close(history, expected[: len(history)], rtol=2e-6, atol=0)
    command = ["ckpt", "export", directory, f"{directory}-offline", "--config-from", path]
    assert CliRunner().invoke(app, command).exit_code == 0
    found = [load(f"{directory}-{how}", None).state_dict() for how in ("exported", "pretrained", "offline")]
    for name, value in found[0].items():
        assert all(torch.equal(other[name], value) for other in found), name
    for name in OF_FAMILY[family]:
        resumed = on_mesh(name, check_resumed, path, directory)
        torch.testing.assert_close(resumed, expected[len(history) :], rtol=1e-6, atol=0, msg=name)
        with open_source(directory) as before, open_source(f"{directory}-again") as after:
            assert not list(compare(before, after)), f"weights and optimizer state, on {name}"
