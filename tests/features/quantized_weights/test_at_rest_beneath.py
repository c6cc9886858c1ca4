"""Weights that are codes at rest above tensor and expert parallelism: each rank codes its local part.

pytest tests/features/quantized_weights/test_at_rest_beneath.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.core.errors import CheckpointError, WrapError
from fullshard.features.quantized_weights.marks import Mark
from fullshard.features.quantized_weights.quantize import mark
from tests.distributed import run_ranks
from tests.features.quantized_weights.test_at_rest import coded_buckets, round_trip
from tests.features.tensor_parallel.test_tensor_parallel import Mixture, data

pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")


def mixture(how: Mark | None, seed: int = 2) -> Any:
    """Frozen experts, the rest to be trained."""
    torch.manual_seed(seed)
    model = Mixture()
    model.experts.requires_grad_(False)
    if how:
        mark(model.experts, "weight", how)
    return model


def expert_parallel(sizes: tuple[int, int], how: Mark | None, seed: int = 2) -> Any:
    ranks = init_device_mesh("cpu", (sizes[0] * sizes[1],), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "ep"))
    model = mixture(how, seed)
    model.experts.group = mesh["ep"].get_group()
    weight = distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(0)])
    model.experts.weight = nn.Parameter(weight, requires_grad=False)
    fullshard.fully_shard(model.experts, mesh=mesh["copies"])
    fullshard.fully_shard(model, mesh=ranks)
    return model


def loss_of(model: Any, step: int, part: int, parts: int) -> torch.Tensor:
    tokens = data(step, part, parts)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def check_experts(directory: str, is_transposed: bool) -> None:
    how = Mark("nf4", is_transposed)
    plain, model = mixture(None), expert_parallel((2, 2), how)
    for part in plain.experts.weight.data.chunk(2):
        in_blocks = part.mT.contiguous() if is_transposed else part
        round_trip(in_blocks, "nf4")
        part.copy_(in_blocks.mT if is_transposed else in_blocks)
    assert len(coded_buckets(model)) == 1
    assert torch.equal(model.experts.weight.full_tensor(), plain.experts.weight)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (plain, model)]
    for step in range(3):
        expected = torch.stack([loss_of(plain, step, part, 4) for part in range(4)]).mean()
        loss = loss_of(model, step, dist.get_rank(), 4)
        expected.backward()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / 4, expected.detach(), rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), plain.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
    save_checkpoint(directory, model=model)
    other = expert_parallel((2, 2), how, seed=3)
    load_checkpoint(directory, model=other)
    assert torch.equal(other.experts.weight.full_tensor(), plain.experts.weight)
    numbers = expert_parallel((1, 4), None, seed=3)
    load_checkpoint(directory, model=numbers)
    assert torch.equal(numbers.experts.weight.full_tensor(), plain.experts.weight)


@pytest.mark.parametrize("is_transposed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_experts_of_expert_parallelism(is_transposed: bool, tmp_path: Path) -> None:
    run_ranks(check_experts, 4, str(tmp_path / "saved"), is_transposed)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 192, bias=False), nn.Linear(192, 64, bias=False)
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(x)))
        out: torch.Tensor = self.head(hidden)
        return out


def split(form: str, size: int) -> Any:
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    model = Pair()
    for layer in (model.up, model.down):
        layer.requires_grad_(False)
        mark(layer, "weight", Mark(form))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fullshard.fully_shard(model, mesh=mesh["dp"])


def check_layers(directory: str) -> None:
    model, plain = split("nf4", 2), Pair()
    for weight, dim in ((plain.up.weight, 0), (plain.down.weight, 1)):
        parts = [part.contiguous() for part in weight.data.chunk(2, dim)]
        for part in parts:
            round_trip(part, "nf4")
        weight.data = torch.cat(parts, dim)
    assert len(coded_buckets(model)) == 1
    assert all(
        torch.equal(p.full_tensor(), plain.get_parameter(n)) for n, p in model.named_parameters() if "head" not in n
    )
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    given = [torch.autograd.grad(each(x).sum(), x)[0] for each in (model, plain)]
    torch.testing.assert_close(*given, rtol=1e-5, atol=1e-6)
    assert isinstance(model.up.weight, DTensor)
    save_checkpoint(directory, model=model)
    load_checkpoint(directory, model=split("nf4", 2))
    whole: Any = Pair()
    for layer in (whole.up, whole.down):
        layer.requires_grad_(False)
        mark(layer, "weight", Mark("nf4"))
    fullshard.fully_shard(whole)
    with pytest.raises(
        CheckpointError, match=r"'down.weight' was encoded in blocks that do not match this tensor parallelism"
    ):
        load_checkpoint(directory, model=whole)


def test_layers_of_tensor_parallelism(tmp_path: Path) -> None:
    run_ranks(check_layers, 2, str(tmp_path / "saved"))


def check_turned() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "ep"))
    model = mixture(Mark("nf4", is_transposed=True))
    weight = distribute_tensor(model.experts.weight.detach(), mesh["ep"], [Shard(1)])
    model.experts.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(WrapError, match="the blocks should run along the second-to-last dim") as error:
        fullshard.fully_shard(model.experts, mesh=mesh["copies"])
    assert "is_transposed" in str(error.value.hint)


def test_a_part_in_another_order_is_refused() -> None:
    run_ranks(check_turned, 2)
