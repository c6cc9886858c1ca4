"""Evaluation between training steps, whole parameters, generation, and ranks that go different ways.

pytest tests/engine/test_traps_modes.py
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.core.errors import CommunicationError, LifecycleError
from fullshard.engine.unit_parameters import UnitState
from fullshard.features import MixedPrecisionPolicy, units_of, unsharded
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    WIDTH,
    Block,
    Stack,
    adamw,
    assert_at_rest,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    rank_and_size,
    reference_step,
    run_squared,
    sharded_parameters,
    sharded_step,
    train_beside_reference,
)

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def check_evaluation(mode: str, strategy: str) -> None:
    """Evaluate before the first step, between forward and backward, and between steps."""
    reference, model = build(Stack), build_sharded(Stack, BLOCKS, strategy=strategy)
    rank, _ = rank_and_size()

    def evaluate(step: int) -> None:
        for each in (model, reference):
            each.eval()
        with MODES[mode]():
            torch.testing.assert_close(model(batch(step, rank)), reference(batch(step, rank)), rtol=1e-9, atol=1e-9)
        for each in (model, reference):
            each.train()

    def run(module: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss: torch.Tensor = module(batch(step, rank)).square().mean()
        if module is model:
            evaluate(step + 40)
        loss.backward()
        return loss.detach()

    evaluate(90)
    assert_at_rest(model)
    for step in range(3):
        assert_trains_alike(model, reference, run, steps=1, first=step)
        evaluate(91 + step)
        assert_at_rest(model)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize(
    "strategy",
    ["FULL_SHARD", *(pytest.param(name, marks=pytest.mark.full) for name in ("SHARD_GRAD_OP", "NO_SHARD"))],
)
def test_evaluation_between_everything(mode: str, strategy: str) -> None:
    run_ranks(check_evaluation, 2, mode, strategy)


class Hiding(Stack):
    """Returns its result in an object nothing can look into."""

    def forward(self, x: torch.Tensor) -> Any:
        return Result(super().forward(x))


class Result:
    """That object."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out


def check_hidden_output_and_evaluation() -> None:
    reference, model = build(Hiding), build_sharded(Hiding, BLOCKS)

    def run(module: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss: torch.Tensor = module(batch(step, rank)).out.square().mean()
        with torch.no_grad():
            module(batch(step + 30, rank))
        module.state_dict()
        loss.backward()
        return loss.detach()

    assert_trains_alike(model, reference, run)


def test_hidden_output_survives_an_evaluation() -> None:
    run_ranks(check_hidden_output_and_evaluation, 2)


# -- whole parameters -------------------------------------------------------------------------------------------


def check_unsharded(strategy: str) -> None:
    reference, model = build(Stack), build_sharded(Stack, BLOCKS, strategy=strategy)
    assert_trains_alike(model, reference, run_squared, steps=1)
    with unsharded(model):
        expected = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name].detach(), rtol=1e-9, atol=1e-9)
            assert parameter.shape == expected[name].shape
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    assert_same_parameters(model, reference)  # no writeback: the change is gone
    check_written_back(model, reference)


def check_written_back(model: nn.Module, reference: nn.Module) -> None:
    with unsharded(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(2.0)
    assert_same_parameters(model, reference)
    assert_trains_alike(model, reference, run_squared, first=1)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_unsharded_with_and_without_writeback(strategy: str) -> None:
    run_ranks(check_unsharded, 2, strategy)


def check_unsharded_where_owned(strategy: str) -> None:
    """Where a rank owns the parameters whole a change takes effect at once, so without writeback it is an error."""
    reference, model = build(Stack), build_sharded(Stack, BLOCKS, strategy=strategy)
    assert_trains_alike(model, reference, run_squared, steps=1)
    with pytest.raises(LifecycleError, match="without writeback"), unsharded(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0)
    check_written_back(model, reference)


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "NO_SHARD"), (1, "FULL_SHARD")])
def test_unsharded_where_a_rank_owns_everything(world_size: int, strategy: str) -> None:
    run_ranks(check_unsharded_where_owned, world_size, strategy)


def check_writeback_keeps_precision() -> None:
    """Writing back what nobody changed must not round the main weights to the compute dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = build_sharded(Stack, BLOCKS, mp_policy=policy)
    before = {name: p.full_tensor().clone() for name, p in sharded_parameters(model).items()}
    with unsharded(model, writeback=True):
        pass
    for name, parameter in sharded_parameters(model).items():
        assert torch.equal(parameter.full_tensor(), before[name]), name


def test_writeback_keeps_main_weight_precision() -> None:
    run_ranks(check_writeback_keeps_precision, 2)


def check_unsharded_between_forward_and_backward() -> None:
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)

    def run(module: nn.Module, step: int, rank: int) -> torch.Tensor:
        loss: torch.Tensor = module(batch(step, rank)).square().mean()
        if module is model:
            with unsharded(model):
                pass
        loss.backward()
        return loss.detach()

    assert_trains_alike(model, reference, run)


def test_unsharded_between_forward_and_backward() -> None:
    run_ranks(check_unsharded_between_forward_and_backward, 2)


def check_training_inside_unsharded() -> None:
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    optimizer, expected = adamw(model.parameters()), adamw(reference.parameters())
    reference_step(reference, run_squared, 0)
    with unsharded(model):
        sharded_step(model, run_squared, 0)
        with pytest.raises(LifecycleError, match="the optimizer cannot step while"):
            optimizer.step()
    assert_same_gradients(model, reference)
    optimizer.step()
    expected.step()
    assert_same_parameters(model, reference)


def test_step_inside_unsharded_is_refused() -> None:
    run_ranks(check_training_inside_unsharded, 2)


class OpensInside(Stack):
    """Calls `unsharded` on itself in the middle of its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with unsharded(self):
            pass
        return super().forward(x)


def check_unsharded_inside_forward() -> None:
    model = build_sharded(OpensInside, BLOCKS)
    with pytest.raises(LifecycleError, match="unsharded"):
        model(batch(0, 0))
    with pytest.raises(LifecycleError, match="unsharded"):
        model(batch(0, 0))


def test_unsharded_inside_forward_is_refused() -> None:
    run_ranks(check_unsharded_inside_forward, 2)


def check_generation() -> None:
    """Each rank calls the model a different number of times inside, as `generate` does; then training goes on."""
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    rank, _ = rank_and_size()
    for round_number in range(2):
        with unsharded(model), torch.inference_mode():
            for count in range(2 + 3 * rank):
                x = batch(count, rank, count + 1, WIDTH)
                torch.testing.assert_close(model(x), reference(x), rtol=1e-9, atol=1e-9)
        assert_at_rest(model)
        assert_trains_alike(model, reference, run_squared, steps=1, first=round_number)


def test_generation_of_different_lengths() -> None:
    run_ranks(check_generation, 2)


def check_nested_unsharded() -> None:
    model = build_sharded(Stack, BLOCKS)
    with unsharded(model):
        with unsharded(model.get_submodule("blocks.1")):
            pass
        assert all(parameter.dim() == len(parameter.shape) for parameter in model.parameters())
        assert model.get_parameter("blocks.1.up.weight").shape == (2 * WIDTH + 1, WIDTH)
    sharded_parameters(model)
    assert_at_rest(model)


def test_nested_unsharded() -> None:
    run_ranks(check_nested_unsharded, 2)


def check_unsharded_of_what_is_kept_whole() -> None:
    model = build_sharded(Stack, BLOCKS)
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    model(batch(0, 0)).sum().backward()
    with unsharded(model):
        assert all(parameter.dim() == len(parameter.shape) for parameter in model.parameters())
    # whole in memory still, but what the script sees is what the optimizer updates
    assert len(sharded_parameters(model)) == len(list(model.parameters()))
    assert {unit.state for unit in units_of(model)} == {UnitState.GATHERED}


def test_unsharded_of_what_is_kept_whole() -> None:
    run_ranks(check_unsharded_of_what_is_kept_whole, 2)


def check_unsharded_body_raises() -> None:
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    with pytest.raises(ArithmeticError), unsharded(model, writeback=True):
        raise ArithmeticError
    assert_at_rest(model)
    assert_trains_alike(model, reference, run_squared, steps=2)


def test_unsharded_body_raises() -> None:
    run_ranks(check_unsharded_body_raises, 2)


# -- ranks that go different ways -------------------------------------------------------------------------------


class Forking(nn.Module):
    """Runs the unit it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, *, branch: str) -> torch.Tensor:
        x = self.left(x) if branch == "left" else self.right(x) if branch == "right" else x
        out: torch.Tensor = self.head(x)
        return out


def with_short_timeout(seconds: int) -> None:
    """Replace the process group by one that gives up after a few seconds."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = rank_and_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("short", store), rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )


def check_branches(strategy: str, at_step: int, other: str) -> tuple[str, float]:
    with_short_timeout(3)
    model = build_sharded(Forking, ("left", "right"), strategy=strategy)
    optimizer = adamw(model.parameters())
    rank, _ = rank_and_size()
    start = time.monotonic()
    try:
        for step in range(at_step + 2):
            branch = other if step == at_step and rank == 1 else "left"
            start = time.monotonic()
            model(batch(step, rank), branch=branch).square().mean().backward()
            optimizer.step()
    except CommunicationError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


@pytest.mark.parametrize(
    ("other", "at_step"),
    [
        ("neither", 2),
        pytest.param("right", 0, marks=pytest.mark.full),
        pytest.param("right", 2, marks=pytest.mark.full),
        pytest.param("neither", 0, marks=pytest.mark.full),
    ],
)
def test_different_branches_are_an_error(at_step: int, other: str) -> None:
    """Every rank gets a typed error that names the unit, within the time-out, and nobody hangs."""
    results = run_ranks(check_branches, 2, "FULL_SHARD", at_step, other, timeout=60)
    for message, seconds in results:
        assert seconds < 25
        # Notes are compared before the first forward waits for anybody.
        assert message.startswith("ranks disagree about the order" if at_step == 0 else "rank ")
    # Only a rank that waits for a unit can name it; one that is past them waits for the others' notes.
    assert any("unit 'left'" in message or "unit 'right'" in message for message, _ in results)


def check_branches_without_gathers() -> None:
    with_short_timeout(3)
    with contextlib.suppress(CommunicationError):
        train_beside_reference(Forking, run_own_branch, ("left", "right"), strategy="NO_SHARD")


def run_own_branch(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank), branch=("left", "right")[(step + rank) % 2]).square().mean()
    loss.backward()
    return loss.detach()


def test_different_branches_without_gathers() -> None:
    """With nothing to gather the ranks meet in the reductions: right numbers or a typed error, never mixed-up sums."""
    run_ranks(check_branches_without_gathers, 2, timeout=60)


def check_local_exception() -> float:
    """Rank 1 alone fails in its first forward: it must raise its own error at once, not wait for the others."""
    with_short_timeout(5)
    model = build_sharded(Stack, BLOCKS)
    rank, _ = rank_and_size()
    start = time.monotonic()
    if rank == 1:
        model.get_submodule("blocks.1.up").register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            model(batch(0, rank))
        return time.monotonic() - start
    with pytest.raises(CommunicationError):
        model(batch(0, rank)).sum().backward()
    return 0.0


def fail(*_: object) -> None:
    raise ArithmeticError("on this rank only")


@pytest.mark.full
def test_error_on_one_rank_is_raised_at_once() -> None:
    seconds = max(run_ranks(check_local_exception, 2, timeout=60))
    assert seconds < 2.5


def check_manual_unshard() -> None:
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)

    def run(module: nn.Module, step: int, rank: int) -> torch.Tensor:
        for unit in units_of(module):
            for inner in unit.modules:
                inner.unshard()  # type: ignore[operator]
        return run_squared(module, step, rank)

    assert_trains_alike(model, reference, run, steps=2)
    model.unshard()  # type: ignore[operator]
    assert model.get_parameter("embed.weight").shape == (WIDTH, WIDTH)
    model.reshard()  # type: ignore[operator]
    assert_at_rest(model)


def test_manual_unshard() -> None:
    run_ranks(check_manual_unshard, 2)
