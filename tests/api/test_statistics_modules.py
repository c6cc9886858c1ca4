"""Modules that keep statistics of what they see (batch norms and the like): counted once, in the precision they have.

pytest tests/api/test_statistics_modules.py
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import Accelerator
from fullshard.api.planning import model_shape
from fullshard.core.dtypes import Dtypes
from fullshard.core.strategy import parse_strategy
from fullshard.engine.lookup import units_of
from fullshard.features import MixedPrecisionPolicy, shard_model
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.unit_selection import unit_modules
from fullshard.plan.layout import lay_out
from tests.distributed import run_ranks

WIDTH = 6
Make = Callable[[], nn.Module]


class Block(nn.Module):
    """A residual block around a layer that has a state beside its parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.up, self.layer, self.down = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.layer(self.up(x))))
        return out


class Counter(nn.Module):
    """Replaces its buffer by another tensor and uses it."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen * 1.5
        out: torch.Tensor = x * self.weight * self.seen
        return out


class OverTime(nn.Module):
    """Instance norm over the rows of one instance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x.t().unsqueeze(0)).squeeze(0).t()
        return out


LAYERS: dict[str, Make] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "instance norm": OverTime,
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "counter": Counter,
}


def build(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(LAYERS[name]()) for _ in range(2)), nn.Linear(WIDTH, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


# -- activation checkpointing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [{}, {"reentrant": True}, {"selective": True}], ids=["plain", "reentrant", "selective"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_a_recomputation_changes_no_state(name: str, kind: dict[str, bool]) -> None:
    """Two forwards, then both backwards, one of them twice: buffers and gradients as without checkpointing."""
    plain = build(name)
    model = copy.deepcopy(plain)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    checkpoint_modules(model, blocks, **kind)
    for module in (plain, model):
        inputs = [batch(step, 0).requires_grad_() for step in range(2)]
        first, second = (module(x).square().sum() for x in inputs)
        second.backward(retain_graph=not kind.get("reentrant"))
        first.backward()
        if not kind:
            second.backward()
    for (key, expected), actual in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(actual, expected), key
    for (key, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert actual.grad is not None and expected.grad is not None, key
        assert torch.equal(actual.grad, expected.grad), key


def test_what_a_forward_leaves_as_it_is_is_not_kept_twice() -> None:
    """A mask or a table beside the parameters costs no memory until backward."""
    layer = Counter()
    layer.register_buffer("table", torch.zeros(3, WIDTH))
    model = nn.Sequential(Block(layer))
    checkpoint_modules(model, [model[0]])
    out = model(batch(0, 0).requires_grad_())
    shapes = [tuple(o.shape) for o in gc.get_objects() if type(o) is torch.Tensor and tuple(o.shape) == (3, WIDTH)]
    assert shapes == [(3, WIDTH)]
    out.sum().backward()


# -- half precision ---------------------------------------------------------------------------------------------


def half_precision(name: str, compute: torch.dtype, how: str) -> tuple[dict[str, torch.dtype], bool]:
    """Train some steps; returns what the layer's parameters computed in, and whether the planner knew the buckets."""
    seen: dict[str, torch.dtype] = {}
    model = build(name)
    if how == "stored":
        model = model.to(compute)
    for block in (model[0], model[1]):
        block.get_submodule("layer").register_forward_hook(
            lambda module, *_: seen.update((key, value.dtype) for key, value in module.named_parameters())
        )
    if how == "accelerator":
        accelerator = Accelerator(mixed_precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        planned = found = []
    else:
        buffers = compute if how == "buffers" else None
        policy = MixedPrecisionPolicy(param_dtype=compute, buffer_dtype=buffers)
        shape = model_shape(model)
        shard_model(model, unit_modules=unit_modules(model), mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        dtypes, row = Dtypes(compute_dtype="bfloat16"), parse_strategy("FULL_SHARD")
        planned = [bucket.compute_dtype for bucket in lay_out(shape, strategy=row, world_size=2, dtypes=dtypes).buckets]
        found = [
            str(bucket.compute_dtype).removeprefix("torch.") for unit in units_of(model) for bucket in unit.buckets
        ]
    for step in range(2):
        model(batch(step, dist.get_rank())).square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return seen, how == "buffers" or planned == found


@pytest.mark.parametrize("how", ["policy", "buffers", "stored", "accelerator"])
@pytest.mark.parametrize("name", ["batch norm", "instance norm"])
def test_a_batch_norm_computes_in_the_precision_of_its_statistics(name: str, how: str) -> None:
    half = how in ("buffers", "stored")
    for seen, is_planned in run_ranks(half_precision, 2, name, torch.bfloat16, how):
        assert is_planned
        assert set(seen.values()) == {torch.bfloat16 if half else torch.float32}, seen


# -- ranks ------------------------------------------------------------------------------------------------------


def statistics_of_ranks() -> tuple[Any, Any]:
    """The first layer's running mean, and what this rank alone would have."""
    model = build("batch norm")
    alone = copy.deepcopy(model)
    shard_model(model, unit_modules=unit_modules(model))
    for step in range(2):
        for each in (model, alone):
            each(batch(step, dist.get_rank()))
    return model[0].get_buffer("layer.running_mean"), alone[0].get_buffer("layer.running_mean")


def test_every_rank_keeps_statistics_of_its_own() -> None:
    """As with torch's `fully_shard`; DDP takes rank 0's before every forward."""
    (first, first_alone), (second, second_alone) = run_ranks(statistics_of_ranks, 2)
    assert torch.equal(first, first_alone)
    assert torch.equal(second, second_alone)
    assert not torch.equal(first, second)
