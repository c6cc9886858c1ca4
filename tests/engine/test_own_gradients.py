"""What each rank computes of a whole parameter past forward counts: gradients are the mean over the ranks.

pytest tests/engine/test_own_gradients.py
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fullshard import FSDPModule, fully_shard, unsharded
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    Stack,
    assert_same_gradients,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    rank_and_size,
    reference_step,
    sharded_step,
)

NAMES = ("embed.weight", "blocks.1.up.weight")


def replicated(p: Any) -> Any:
    return p.redistribute(placements=[Replicate()] * p.device_mesh.ndim)


def beside_torchs(p: Any) -> torch.Tensor:
    both: Any = p.flip(0) + replicated(torch.zeros_like(p))
    return both.to_local().flip(0)  # type: ignore[no-any-return]


PLAIN: dict[str, Callable[[Any], torch.Tensor]] = {
    "full_tensor": lambda p: p.full_tensor(),
    "redistribute": lambda p: replicated(p).to_local(),
    "a copy in place of a view": lambda p: p.T.full_tensor().T,
    "of what is computed by interval": lambda p: (2 * p).full_tensor() / 2,
    "of what is computed whole": lambda p: p.flip(0).to_local().flip(0),
    "redistributed after it was computed": lambda p: replicated(p.flip(0)).to_local().flip(0),
    "through torch's own class": beside_torchs,
    "what is said of gradients": lambda p: p.full_tensor(grad_placements=[Partial("avg")] * p.device_mesh.ndim),
}
"""Ways to a plain tensor of a parameter's values, which each rank computes with on its own."""
REPLICAS: dict[str, Callable[[Any], torch.Tensor]] = {
    **{name: PLAIN[name] for name in ("full_tensor", "redistribute")},
    "to_local": lambda p: p.to_local(),
}


def run_beside(
    model: nn.Module, step: int, rank: int, *, way: Callable[[Any], torch.Tensor], scale: float = 1.0
) -> torch.Tensor:
    """A loss of the model's output, and of weights that are taken past forward."""
    inputs = batch(step, rank)
    loss: torch.Tensor = model(inputs).square().mean()
    for name in NAMES:
        weight = model.get_parameter(name)
        plain = way(weight) if isinstance(weight, DTensor) else weight
        loss = loss + (inputs @ plain.T).tanh().mean()
    (loss * scale).backward()
    return loss.detach()


def check(kind: str, strategy: str, shard_size: int | None = None) -> None:
    for name, way in (PLAIN if kind == "plain" else REPLICAS).items():
        if name == "to_local" and strategy != "NO_SHARD":
            continue
        model = build_sharded(Stack, BLOCKS, strategy=strategy, shard_size=shard_size)
        try:
            assert_trains_alike(model, build(Stack), functools.partial(run_beside, way=way), steps=2)
        except AssertionError as error:
            error.add_note(name)
            raise


def test_each_ranks_gradient_counts() -> None:
    run_ranks(check, 2, "plain", "FULL_SHARD")


def test_each_replicas_gradient_counts() -> None:
    run_ranks(check, 2, "replicas", "NO_SHARD")


@pytest.mark.full
def test_with_replicas_of_what_is_sharded() -> None:
    run_ranks(check, 4, "plain", "HYBRID_SHARD", 2)


def check_intervals() -> None:
    """Replicas agree on the gradient of what both have; torch's rows of them, too."""
    rank, _ = rank_and_size()
    model = build_sharded(Stack, BLOCKS, strategy="HYBRID_SHARD", shard_size=2)
    weight: Any = model.get_parameter("embed.weight")
    (weight.to_local().sum() * (rank // 2 + 1)).backward()
    torch.testing.assert_close(weight.grad.full_tensor(), torch.full_like(weight.full_tensor(), 1.5))
    weight.grad = None
    rows = weight.redistribute(placements=[Replicate(), Shard(0)])
    (rows.to_local().sum() * (rank // 2 + 1)).backward()
    torch.testing.assert_close(weight.grad.full_tensor(), torch.full_like(weight.full_tensor(), 1.5))


@pytest.mark.full
def test_replicas_agree_on_intervals() -> None:
    run_ranks(check_intervals, 4)


def accumulate(model: Any, step: int, rank: int) -> torch.Tensor:
    way = PLAIN["full_tensor"]
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        first = run_beside(model, 2 * step, rank, way=way)
    return first + run_beside(model, 2 * step + 1, rank, way=way)


def check_settings() -> None:
    """Micro-batches add up; what the sum is divided by is what the unit says; explicit placements stay as said."""
    _, size = rank_and_size()
    assert_trains_alike(build_sharded(Stack, BLOCKS), build(Stack), accumulate, steps=2)
    for way in (PLAIN["full_tensor"], PLAIN["of what is computed whole"]):
        model, reference = build_sharded(Stack, BLOCKS), build(Stack)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
        sharded_step(model, functools.partial(run_beside, way=way), 0)
        reference_step(reference, functools.partial(run_beside, way=way, scale=size), 0)
        assert_same_gradients(model, reference)
    model = build_sharded(Stack, BLOCKS)
    weight: Any = model.get_parameter("embed.weight")
    for placement, expected in ((Partial(), 3.0), (Replicate(), None)):
        weight.grad = None
        (weight.full_tensor(grad_placements=[placement]).sum() * (1 + rank_and_size()[0])).backward()
        want = float(1 + rank_and_size()[0]) if expected is None else expected
        torch.testing.assert_close(weight.grad.to_local(), torch.full_like(weight.grad.to_local(), want))
    weight.grad = None
    (weight.to_local() ** 2).sum().backward()  # of elements that no other rank has
    torch.testing.assert_close(weight.grad.to_local(), 2 * weight.detach().to_local())


def test_micro_batches_divisors_and_explicit_placements() -> None:
    run_ranks(check_settings, 2)


def call_with_wholes(model: nn.Module, step: int, rank: int, *, other: nn.Module | None = None) -> torch.Tensor:
    """The model's own function of whole tensors, each rank on its own data."""
    given: Any = dict(model.named_parameters())
    wholes = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in given.items()}
    with unsharded(model) if other is None and model is not other else contextlib.nullcontext():
        out = torch.func.functional_call(other or model, wholes, (batch(step, rank),))
        loss: torch.Tensor = out.square().mean()
        loss.backward()
    return loss.detach()


def check_functional_call() -> None:
    for other in (None, build(Stack)):
        model, reference = build_sharded(Stack, BLOCKS), build(Stack)
        rank, _ = rank_and_size()
        loss = call_with_wholes(model, 0, rank, other=other)
        losses = reference_step(reference, functools.partial(call_with_wholes, other=build(Stack)), 0)
        torch.testing.assert_close(loss, losses[rank])
        assert_same_gradients(model, reference)


def test_functional_call_with_whole_tensors() -> None:
    run_ranks(check_functional_call, 2)


def check_half() -> None:
    """Gradients in half precision are added up in float32, as those of the reduction are."""
    model: Any = fully_shard(nn.Linear(4, 4, bias=False, dtype=torch.bfloat16))
    scales = (1.0, 1.0 / 256)  # whose sum bfloat16 does not have, and half of it neither
    (model.weight.full_tensor() * scales[rank_and_size()[0]]).sum().backward()
    expected = torch.full((4, 4), sum(scales) / 2).bfloat16()
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected, rtol=0, atol=0)


def test_half_precision() -> None:
    run_ranks(check_half, 2)


def check_tiles(ways: Iterable[str]) -> None:
    """Above tensor parallelism, whose ranks have the same data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ways:
        model: Any = parallelize_module(
            build(Stack), mesh["tp"], {"embed": ColwiseParallel(output_layouts=Replicate())}
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        run = functools.partial(run_beside, way=PLAIN[name])
        run(model, 0, mesh.get_local_rank("dp"))
        reference = build(Stack)
        for rank in range(2):
            run(reference, 0, rank)
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert expected.grad is not None
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad / 2, msg=name)


@pytest.mark.full
def test_above_tensor_parallelism() -> None:
    run_ranks(check_tiles, 4, ["full_tensor", "redistribute", "a copy in place of a view"])
