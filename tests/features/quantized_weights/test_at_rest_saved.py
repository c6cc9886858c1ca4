"""Checkpoints of weights that are codes at rest: codes are saved as codes, and everybody else reads values.

pytest tests/features/quantized_weights/test_at_rest_saved.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard import quantize
from fullshard.checkpoint import full_state_dict, load_checkpoint, save_checkpoint, verify_checkpoint
from fullshard.checkpoint.format import read_manifest
from fullshard.checkpoint.offline.native import open_native
from fullshard.engine.lookup import units_of
from fullshard.features import shard_model
from fullshard.features.quantized_weights.at_rest import CodedBucket
from tests.distributed import run_ranks
from tests.features.quantized_weights.test_at_rest import adapted, is_coded, layers, loss_of, round_trip

pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")


def made(form: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The adapted mixture, coded unless `form` is empty; another `seed`, other weights."""
    model = adapted("experts")
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
        loss = loss_of(model, step, 0)  # the same on every rank, so the world size does not matter
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
    reference = adapted("experts")
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
