"""Scalars, single elements and nothing at all, anywhere among larger parameters: saved, loaded, cut anew, exported.

pytest tests/checkpoint/test_checkpoint_shapes.py
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fullshard.api import Accelerator
from fullshard.checkpoint import export_hf, full_state_dict, load_checkpoint, save_checkpoint, verify_checkpoint
from fullshard.checkpoint.offline import compare, open_source, write_native, write_weights
from fullshard.features import shard_model
from tests.distributed import run_ranks
from tests.traps import rank_and_size

SHAPES: list[tuple[int, ...]] = [(), (1,), (1, 1), (0,), (3, 0), (2,), (5, 3), (64, 9)]


class Holder(nn.Module):
    """A parameter of each shape, of one dtype or another, all of them used; and buffers as small."""

    def __init__(self, shapes: list[tuple[int, ...]], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for number, shape in enumerate(shapes):
            dtype = (torch.float32, torch.bfloat16)[(seed + number) % 2]
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("nothing", torch.zeros(0, 2))
        self.register_buffer("table", torch.randn(3, 3, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.stack([p.float().square().sum() for p in self._parameters.values() if p is not None]).sum()


def cases(count: int) -> list[list[tuple[int, ...]]]:
    """Each small shape last, first and alone; then some drawn at random."""
    draw = random.Random(5)
    fixed = [[(5, 3), small] for small in SHAPES[:5]] + [[(), (64, 9), (1,), (5, 3), (0,), (1, 1)], [()], [(1,), (2,)]]
    return fixed + [draw.choices(SHAPES, k=draw.randint(1, 7)) for _ in range(count)]


def made(shapes: list[tuple[int, ...]], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model, half of its parameters in a unit of its own, and its optimizer."""
    model = nn.Sequential(Holder(shapes[: len(shapes) // 2] or [(1,)], seed), Holder(shapes, seed + 1))
    shard_model(model, unit_modules=[model[0]])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def check_shapes(directory: str, count: int) -> None:
    rank, size = rank_and_size()
    for number, shapes in enumerate(cases(count)):
        path = Path(directory) / str(number)
        model, optimizer = made(shapes, 0)
        model(torch.ones(())).backward()
        optimizer.step()
        expected = full_state_dict(model, rank0_only=False)
        save_checkpoint(path / "saved", model=model, optimizer=optimizer)
        export_hf(path / "exported", model=model)
        Accelerator().save_model(model, str(path / "model"))
        other, other_optimizer = made(shapes, 8)
        load_checkpoint(path / "saved", model=other, optimizer=other_optimizer)
        loaded = full_state_dict(other, rank0_only=False)
        assert all(torch.equal(loaded[name], value) for name, value in expected.items()), shapes
        for mine, theirs in zip(
            optimizer.param_groups[0]["params"], other_optimizer.param_groups[0]["params"], strict=True
        ):
            for key, value in optimizer.state[mine].items() if mine.shape.numel() else ():
                assert torch.equal(value, other_optimizer.state[theirs][key]), (shapes, key)
        if rank == 0:
            check_offline(path, expected, size, shapes)


def check_offline(path: Path, expected: dict[str, Any], size: int, shapes: list[tuple[int, ...]]) -> None:
    with open_source(path / "saved") as source:
        write_native(source, path / "cut", world_size=size % 4 + 1)
        write_weights(source, path / "whole", needs_config=False)
    verify_checkpoint(path / "cut").raise_if_damaged()
    with open_source(path / "saved") as one, open_source(path / "cut") as other:
        assert [str(difference) for difference in compare(one, other)] == [], shapes
    for name in ("exported", "model", "whole"):
        [file] = (path / name).glob("*.safetensors")
        tensors = load_file(file)
        assert tensors.keys() == expected.keys(), (name, shapes)
        assert all(torch.equal(tensors[key], value) for key, value in expected.items()), (name, shapes)


@pytest.mark.parametrize(
    "world_size", [1, 2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
def test_small_and_empty_parameters(tmp_path: Path, world_size: int) -> None:
    run_ranks(check_shapes, world_size, str(tmp_path), 4 if world_size < 3 else 25)
