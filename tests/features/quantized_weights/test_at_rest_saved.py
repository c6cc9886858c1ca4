"""Checkpoints of weights that are codes at rest: codes are saved as codes, and everybody else reads values.

pytest tests/features/quantized_weights/test_at_rest_saved.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from fullshard import quantize
from fullshard.checkpoint import export_hf, full_state_dict, load_checkpoint, save_checkpoint, verify_checkpoint
from fullshard.checkpoint.format import read_manifest
from fullshard.checkpoint.offline.source import open_native
from fullshard.core.errors import CheckpointError, LifecycleError
from fullshard.engine.lookup import units_of
from fullshard.features import shard_model
from fullshard.features.quantized_weights.at_rest import CodedBucket
from fullshard.features.quantized_weights.marks import Mark
from fullshard.features.quantized_weights.quantize import mark
from tests.distributed import run_ranks
from tests.features.quantized_weights.test_at_rest import Stacked, is_coded, layers, round_trip
from tests.features.quantized_weights.test_at_rest_families import ON_EXPERTS, adapted, loss_of

pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")


def made(form: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The adapted mixture, coded unless `form` is empty; another `seed`, other weights."""
    model = adapted("qwen3_moe", ON_EXPERTS)
    if seed:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter.data, std=0.1)
    if form:
        quantize(model, form)
    shard_model(model, unit_modules=layers(model), device=torch.device("cpu"))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def coded(model: nn.Module) -> list[CodedBucket]:
    return [b for unit in units_of(model) for b in unit.buckets if isinstance(b, CodedBucket)]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        loss = loss_of("qwen3_moe", model, step, 0)  # the same on every rank, so the world size does not matter
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(path: Path, form: str) -> list[float]:
    model, optimizer = made(form)
    steps(model, optimizer, range(2))
    save_checkpoint(path, model=model, optimizer=optimizer)
    return steps(model, optimizer, range(2, 4))


def load(path: Path, form: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = made(form, seed=1)
    assert all(bucket.main.any() for bucket in coded(model)) or not form
    load_checkpoint(path, model=model, optimizer=optimizer)
    values = full_state_dict(model, rank0_only=False)
    return steps(model, optimizer, range(2, 4)), {
        name: value for name, value in values.items() if is_coded(name, value)
    }


def check_loads_at(path: Path, form: str, sizes: tuple[int, ...]) -> None:
    expected = run_ranks(save, 2, path, form)[0]
    assert verify_checkpoint(path).is_valid
    manifest = read_manifest(path)
    names = [name for name in manifest.parameters if is_coded(name, torch.empty(0))]
    assert names and manifest.format_version == 4 and all(manifest.parameters[name].form for name in names)
    reference = adapted("qwen3_moe", ON_EXPERTS)
    for name in names:
        round_trip(reference.get_parameter(name), form)
    with open_native(path) as source:  # what merge, convert and the like see
        assert all(torch.equal(source.whole(name), reference.get_parameter(name)) for name in names)
    numel = sum(manifest.parameters[name].numel for name in names)
    at_rest = sum(record.nbytes for name, record in manifest.files.items() if name.startswith("model"))
    others = sum(record.numel * 4 for name, record in manifest.parameters.items() if name not in names)
    assert at_rest < others + 0.6 * numel + 40_000  # headers
    for size in sizes:
        losses, values = run_ranks(load, size, path, form)[0]
        assert all(torch.equal(value, reference.get_parameter(name)) for name, value in values.items())
        assert losses == pytest.approx(expected, rel=1e-6)
    _, values = run_ranks(load, 2, path, "")[0]  # into weights that are numbers: the values
    assert all(torch.equal(value, reference.get_parameter(name)) for name, value in values.items())


def test_codes_are_saved_as_codes_and_load_at_other_world_sizes(tmp_path: Path) -> None:
    check_loads_at(tmp_path / "saved", "nf4", (1, 3))


def check_values_leave(directory: str) -> None:
    """Exports, torch's checkpoints and state dicts have values; the same values may come back."""
    model, _ = made("nf4")
    plain = adapted("qwen3_moe", ON_EXPERTS)
    for name, parameter in plain.named_parameters():
        if is_coded(name, parameter):
            round_trip(parameter, "nf4")
    prompt = torch.ones(1, 3, dtype=torch.long)
    written: Any = model
    texts = [each.generate(prompt, max_new_tokens=4, do_sample=False) for each in (written, plain)]
    assert torch.equal(*texts)
    dcp.save(model.state_dict(), checkpoint_id=f"{directory}/torch")
    numbers, _ = made("")
    for other, is_same in ((model, True), (numbers, False), (made("nf4", seed=1)[0], None)):
        state = other.state_dict()
        if is_same is None:
            with pytest.raises(CheckpointException, match="would change a weight that is stored as codes"):
                dcp.load(state, checkpoint_id=f"{directory}/torch")
            continue
        dcp.load(state, checkpoint_id=f"{directory}/torch")
        other.load_state_dict(state)
        values: Any = {name: p.full_tensor() for name, p in cast(Any, other.named_parameters())}
        assert all(torch.equal(values[name], p) for name, p in plain.named_parameters() if is_coded(name, p))
    with pytest.raises(LifecycleError, match="would change a weight that is stored as codes") as error:
        written.merge_adapter()
    assert "export_hf" in str(error.value.hint)
    export_hf(f"{directory}/exported", model=model)
    merged = cast(Any, plain).merge_and_unload()
    exported = type(merged).from_pretrained(f"{directory}/exported")
    assert all(torch.equal(p, merged.get_parameter(name)) for name, p in exported.named_parameters())


def test_values_leave_a_model_by_every_door(tmp_path: Path) -> None:
    run_ranks(check_values_leave, 2, str(tmp_path))


def save_stacked(path: Path) -> None:
    save_checkpoint(path, model=turned(0))


def load_stacked(path: Path) -> None:
    expected = turned(0)
    coded_model, numbers = turned(1), turned(1, form="")
    for other in (coded_model, numbers):
        load_checkpoint(path, model=other)
        assert torch.equal(other.up.full_tensor(), expected.up.full_tensor())
    with pytest.raises(CheckpointError, match="'up' is stored as nf4, but was saved as nf4-double, transposed"):
        load_checkpoint(path, model=turned(1, form="nf4", is_transposed=False))


def turned(seed: int, *, form: str = "nf4-double", is_transposed: bool = True) -> Any:
    torch.manual_seed(seed)
    model = Stacked().requires_grad_(False)
    if form:
        mark(model, "up", Mark(form, is_transposed))
    return shard_model(model, unit_modules=[], device=torch.device("cpu"))


def test_a_weight_in_another_order_is_saved_and_read(tmp_path: Path) -> None:
    run_ranks(save_stacked, 2, tmp_path / "saved")
    run_ranks(load_stacked, 3, tmp_path / "saved")
