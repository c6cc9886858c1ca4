"""Weights and gradients that are rounded for the way: how much, where, and what training makes of it.

pytest tests/engine/test_rounded_collectives.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fullshard.comm.base import Collectives, own_interval
from fullshard.comm.select import collectives_for
from fullshard.config.switches import COMM
from fullshard.core.errors import CommunicationError, ConfigError
from fullshard.features import MixedPrecisionPolicy, ShardedParameter, describe, fully_shard, unsharded
from fullshard.features.packed_messages import BLOCK_NUMEL, PACKINGS
from tests.differential import CLOSE
from tests.distributed import run_ranks
from tests.features.shared_memory.test_shared_memory import CPU, fill

INT8, BF16 = PACKINGS[torch.int8], PACKINGS[torch.bfloat16]
NUMELS = (0, 1, 16, 255, 256, 257, 5000, 300_016)


def sent(packing: object, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What arrives of `values`."""
    message = torch.empty(packing.nbytes(values.numel()), dtype=torch.uint8)  # type: ignore[attr-defined]
    packing.pack(values, message)  # type: ignore[attr-defined]
    into = torch.empty(values.numel(), dtype=dtype or values.dtype)
    packing.unpack(message, into)  # type: ignore[attr-defined]
    return into


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", NUMELS)
def test_int8_is_off_by_a_254th_of_its_block(numel: int, dtype: torch.dtype) -> None:
    # Blocks of very different magnitudes, which one scale for all would ruin.
    magnitudes = torch.logspace(-6, 3, max(1, numel), dtype=torch.float64)
    values = (fill(numel, torch.float64, 1) * magnitudes[:numel]).to(dtype)
    arrived = sent(INT8, values, torch.float64)
    for first in range(0, numel, BLOCK_NUMEL):
        block = values[first : first + BLOCK_NUMEL].double()
        error = (arrived[first : first + BLOCK_NUMEL] - block).abs().max()
        assert error <= block.abs().max() / 254 * (1 + 1e-4)


@pytest.mark.parametrize("numel", NUMELS)
def test_bfloat16_is_off_by_a_rounding(numel: int) -> None:
    values = fill(numel, torch.float32, 2) * 1e3
    assert torch.equal(sent(BF16, values), values.bfloat16().float())
    assert INT8.nbytes(256 * 1000) == 260_000 and BF16.nbytes(256 * 1000) == 512_000


@pytest.mark.parametrize("packing", [INT8, BF16])
def test_zeros_arrive_as_zeros_and_overflows_as_such(packing: object) -> None:
    values = torch.zeros(1024)
    values[300], values[600], values[1000] = torch.inf, torch.nan, 1e-44  # the last is as small as they get
    arrived = sent(packing, values)
    assert torch.equal(arrived[:256], values[:256]) and bool(arrived[768:].isfinite().all())
    assert not bool(arrived[256:512].isfinite().all()) and not bool(arrived[512:768].isfinite().all())


def check_collectives(make: Callable[[], Collectives]) -> None:
    """Every rank gets the same, what a message holds; a sum has this rank's own terms exactly."""
    collectives = make()
    rank, size, numel = collectives.rank, collectives.size, 50_000
    assert collectives.sends
    for dtype in (torch.float32, torch.bfloat16):
        buffer = collectives.full_buffer(size * numel, dtype, CPU, holds_main=True, packing=INT8)
        assert buffer.main is None
        for seed in range(3):
            mains = [fill(numel, torch.float32, 10 * seed + source) for source in range(size)]
            whole = buffer.gather(mains[rank], tag=1).wait().clone()
            buffer.free()
            assert torch.equal(whole, torch.cat([sent(INT8, main, dtype) for main in mains]))
            whole = buffer.gather(mains[rank], tag=1, exactly=True).wait().clone()
            buffer.free()
            assert torch.equal(whole, torch.cat(mains).to(dtype))
    for packing in (INT8, BF16):
        fulls = [fill(size * numel, torch.float32, source) for source in range(size)]
        total = collectives.reduce_scatter(fulls[rank].clone(), tag=2, divisor=2.0, packing=packing).wait()
        terms = [own_interval(full, rank, size) for full in fulls]
        arrived = [term if source == rank else sent(packing, term) for source, term in enumerate(terms)]
        expected = torch.stack(arrived).sum(0) / 2.0
        torch.testing.assert_close(total, expected, **CLOSE)


def point_to_point() -> Collectives:
    os.environ[COMM.name] = "gloo"
    return collectives_for(dist.group.WORLD, CPU)


def test_point_to_point() -> None:
    run_ranks(check_collectives, 2, point_to_point)


STEPS = 60


def train(policy: MixedPrecisionPolicy) -> tuple[list[float], str]:
    """A small classifier from the same start and data; losses averaged over the ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 128), torch.nn.GELU())
    model.append(torch.nn.Linear(128, 10))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(7))
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(64, 32, generator=generator)
        loss = torch.nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses, str(describe(model))


PACKED = {
    "int8 weights": MixedPrecisionPolicy(gather_as=torch.int8),
    "bf16 gradients": MixedPrecisionPolicy(reduce_as=torch.bfloat16),
    "int8 gradients": MixedPrecisionPolicy(reduce_as=torch.int8),
    "int8 weights, bf16 gradients": MixedPrecisionPolicy(gather_as=torch.int8, reduce_as=torch.bfloat16),
}


def check_training(switch: str, names: tuple[str, ...]) -> None:
    os.environ[COMM.name] = switch
    exact, line = train(MixedPrecisionPolicy())
    assert "sent as" not in line
    assert exact[-1] < 0.6 * exact[0], "it learns something, or a difference could not show"
    for name in names:
        losses, line = train(PACKED[name])
        assert losses != exact, name
        assert "sent as" in line and "no " not in line and "the others as they are" not in line
        end, expected = (math.fsum(run[-10:]) / 10 for run in (losses, exact))
        assert abs(end - expected) < 0.02 * expected, (name, end, expected)


def test_training_comes_to_the_same_loss() -> None:
    run_ranks(check_training, 2, "gloo", ("int8 weights, bf16 gradients",))


@pytest.mark.full
def test_training_comes_to_the_same_loss_in_every_packing() -> None:
    run_ranks(check_training, 2, "gloo", tuple(PACKED))


def check_shared_memory() -> None:
    exact, _ = train(MixedPrecisionPolicy())
    losses, line = train(PACKED["int8 weights, bf16 gradients"])
    assert losses == exact
    assert "no weights sent as int8" in line and "no gradients sent as bfloat16" in line


def test_nothing_is_rounded_where_nothing_is_sent() -> None:
    run_ranks(check_shared_memory, 2)


def check_exact_parameters() -> None:
    """Main weights never go through a message, so neither does what is saved."""
    os.environ[COMM.name] = "gloo"
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 40)
    weight = model.weight.detach().clone()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(gather_as=torch.int8), reshard_after_forward=False)
    inputs = torch.eye(300)

    def sharded_weight() -> ShardedParameter:
        assert isinstance(model.weight, ShardedParameter)
        return model.weight

    with torch.no_grad():
        rounded = (model(inputs) - model(torch.zeros(1, 300))).T
    assert 0 < float((rounded - weight).abs().max()) < float(weight.abs().max()) / 250
    model(inputs).sum().backward()
    for _ in range(2):
        with unsharded(model, writeback=True):
            assert torch.equal(model.weight, weight)
    assert torch.equal(sharded_weight().full_tensor(), weight)
    with unsharded(model, writeback=True), torch.no_grad():
        model.weight.mul_(2)
    assert torch.equal(sharded_weight().full_tensor(), 2 * weight)


def test_main_weights_stay_exact() -> None:
    run_ranks(check_exact_parameters, 2)


def check_disagreement() -> None:
    os.environ[COMM.name] = "gloo"
    model = torch.nn.Linear(300, 40)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(gather_as=torch.int8 if dist.get_rank() else None))
    with pytest.raises(CommunicationError, match="gather as int8"):
        model(torch.ones(1, 300))


def test_ranks_that_send_differently_are_told() -> None:
    run_ranks(check_disagreement, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gather_as": torch.float16}, "gather_as = torch.float16 is not supported"),
        ({"reduce_as": torch.bfloat16, "reduce_dtype": torch.bfloat16}, "reduce_as = torch.bfloat16 saves no bytes"),
        ({"gather_as": torch.bfloat16, "param_dtype": torch.float16}, "gather_as = torch.bfloat16 saves no bytes"),
    ],
)
def test_what_cannot_be_sent_is_refused(fields: dict[str, torch.dtype], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MixedPrecisionPolicy(**fields)  # type: ignore[arg-type]
