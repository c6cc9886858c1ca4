"""ZeRO's first two stages: parameters whole from step to step, the optimizer's state sharded, and gradients or not.

pytest tests/engine/test_zero_stages.py
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.core.errors import LifecycleError
from fullshard.core.events import Event, EventKind
from fullshard.engine.unit_parameters import UnitState
from fullshard.features import FSDPModule, describe, no_sync, units_of
from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from tests.differential import check, compare, ddp, gradients, parameters
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    Stack,
    adamw,
    assert_same_parameters,
    batch,
    build,
    build_sharded,
    rank_and_size,
    sharded_parameters,
)

STAGES = ("SHARD_OPTIMIZER", "SHARD_GRAD_OPTIMIZER")
MICRO_BATCHES = 3


def train(model: nn.Module, events: list[Event], *, steps: int = 3, waits: bool = False) -> dict[str, dict[Any, Any]]:
    """Losses, gradients and weights; `events` of the last step. `waits`: with `no_sync`, as DDP knows it."""
    optimizer = adamw(model.parameters())
    record: dict[str, dict[Any, Any]] = {"losses": {}, "gradients": {}}
    for step in range(steps):
        events.clear()
        for number in range(MICRO_BATCHES):
            is_last = number == MICRO_BATCHES - 1
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(is_last)
                silent: Any = no_sync(model) if waits and not is_last else contextlib.nullcontext()
            else:
                silent = contextlib.nullcontext() if is_last else cast(Any, model).no_sync()
            with silent:
                loss = model(batch(MICRO_BATCHES * step + number, rank_and_size()[0])).square().mean()
                loss.backward()
            record["losses"][step, number] = loss.detach()
        record["gradients"] |= {f"{step} {name}": grad for name, grad in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    record["parameters"] = parameters(model)
    return record


def apart() -> None:
    """Ranks that share memory have parameters whole at no cost: nothing is kept there, and gathers send nothing."""
    os.environ["FULLSHARD_COMM"] = "gloo"


def check_stage(strategy: str) -> tuple[dict[str, float], dict[str, float], Counter[EventKind], str]:
    apart()
    events: list[Event] = []
    model = build_sharded(Stack, BLOCKS, strategy=strategy, events=events)
    found = train(model, events)
    waiting = train(build_sharded(Stack, BLOCKS, strategy="FULL_SHARD"), [], waits=strategy == "SHARD_OPTIMIZER")
    like_ddp = compare(found, train(ddp(build(Stack)), []))
    return like_ddp, compare(found, waiting), Counter(event.kind for event in events), str(describe(model))


@pytest.mark.parametrize(("strategy", "reductions"), [("SHARD_OPTIMIZER", 1), ("SHARD_GRAD_OPTIMIZER", MICRO_BATCHES)])
def test_one_gather_per_step_and_the_numbers_of_ddp(strategy: str, reductions: int) -> None:
    units = 1 + len(BLOCKS)
    results = run_ranks(check_stage, 2, strategy)
    # Gradients that are summed over micro-batches first are DDP's, bit for bit; reduced first they round elsewhere.
    check([result[0] for result in results], exact=strategy == "SHARD_OPTIMIZER")
    check([result[1] for result in results], exact=True)
    for _, _, counts, line in results:
        assert counts[EventKind.UNSHARD_ISSUED] == counts[EventKind.RESHARDED] == units
        assert counts[EventKind.REDUCE_ISSUED] == units * reductions
        assert f"({strategy}, 1 x 2)" in line


def check_what_changes(strategy: str, comm: str) -> None:
    """Whatever changes main weights between steps, the next forward computes with the new ones."""
    os.environ["FULLSHARD_COMM"] = comm
    model, reference = build_sharded(Stack, BLOCKS, strategy=strategy), build(Stack)

    def same() -> None:
        for rows in range(2):  # the second finds what the first has left
            with torch.no_grad():
                assert torch.allclose(model(batch(rows, 0)), reference(batch(rows, 0)))

    same()
    with torch.no_grad():
        for parameter, other in zip(sharded_parameters(model).values(), reference.parameters(), strict=True):
            parameter.mul_(0.5)
            other.mul_(0.5)
    same()
    model.load_state_dict({name: value + 0.25 for name, value in reference.state_dict().items()})
    reference.load_state_dict({name: value + 0.25 for name, value in reference.state_dict().items()})
    same()
    for optimizer, one in ((adamw(model.parameters()), model), (adamw(reference.parameters()), reference)):
        one(batch(5, 0)).square().mean().backward()
        # Where ranks share memory, the next line changes what the others read: they must have been done with it.
        states = {unit.state for unit in units_of(one)}
        assert states <= {UnitState.SHARDED if comm == "auto" else UnitState.GATHERED}
        optimizer.step()
    same()
    assert_same_parameters(model, reference)


@pytest.mark.parametrize(("strategy", "comm"), [*((s, "gloo") for s in STAGES), ("SHARD_GRAD_OPTIMIZER", "auto")])
def test_no_weights_of_before_are_computed_with(strategy: str, comm: str) -> None:
    run_ranks(check_what_changes, 2, strategy, comm)


def check_step_too_early() -> None:
    model = build_sharded(Stack, BLOCKS, strategy="SHARD_OPTIMIZER")
    optimizer = adamw(model.parameters())
    cast(FSDPModule, model).set_is_last_backward(False)
    model(batch(0, 0)).square().mean().backward()
    with pytest.raises(LifecycleError, match="applied to the last backward, so its gradients are not reduced"):
        optimizer.step()


def test_a_step_without_its_last_micro_batch_is_refused() -> None:
    run_ranks(check_step_too_early, 2)


def check_evaluation(strategy: str) -> tuple[list[EventKind], set[UnitState]]:
    apart()
    events: list[Event] = []
    model = build_sharded(Stack, BLOCKS, strategy=strategy, events=events)
    with torch.no_grad():
        model(batch(0, dist.get_rank()))
        events.clear()
        model(batch(1, dist.get_rank()))
    return [event.kind for event in events], {unit.state for unit in units_of(model)}


def test_an_evaluation_leaves_them_whole() -> None:
    for kinds, states in run_ranks(check_evaluation, 2, "SHARD_GRAD_OPTIMIZER"):
        assert EventKind.UNSHARD_ISSUED not in kinds and EventKind.RESHARDED not in kinds
        assert states == {UnitState.GATHERED}


def test_ranks_that_share_memory_keep_nothing() -> None:
    shape, _ = load_model("GPT-2")
    plans = [
        evaluate(shape, Job.of({"strategy": strategy, "seq_len": 64}), parse_cluster("2xCPU"))
        for strategy in ("SHARD_GRAD_OP", "SHARD_GRAD_OPTIMIZER")
    ]
    assert plans[0].events == plans[1].events
    assert plans[0].memory.peak == plans[1].memory.peak


def test_what_a_stage_costs() -> None:
    """ZeRO's table (arXiv 1910.02054, section 5), for a step of several micro-batches."""
    shape, _ = load_model("GPT-2")
    plans = {
        strategy: evaluate(
            shape, Job.of({"strategy": strategy, "accumulation": 4, "seq_len": 128}), parse_cluster("8xA100-40")
        )
        for strategy in ("NO_SHARD", *STAGES, "SHARD_GRAD_OP", "FULL_SHARD")
    }
    traffic = {name: plan.traffic for name, plan in plans.items()}
    once = traffic["SHARD_OPTIMIZER"]
    whole = 2 * once.gather_nbytes  # float32 gradients, bf16 weights
    assert once.reduce_nbytes == whole
    assert (traffic["SHARD_GRAD_OPTIMIZER"].gather_nbytes, traffic["SHARD_GRAD_OPTIMIZER"].reduce_nbytes) == (
        once.gather_nbytes,
        4 * whole,
    )
    assert traffic["SHARD_GRAD_OP"].gather_nbytes == 4 * once.gather_nbytes
    assert traffic["FULL_SHARD"].gather_nbytes > traffic["SHARD_GRAD_OP"].gather_nbytes
    state = {name: plan.memory.phases["load"]["optimizer state"] for name, plan in plans.items()}
    assert state["SHARD_OPTIMIZER"] == state["SHARD_GRAD_OPTIMIZER"] == state["FULL_SHARD"] == state["NO_SHARD"] // 8
    peaks = {name: plan.memory.peak for name, plan in plans.items()}
    assert peaks["FULL_SHARD"] < peaks["SHARD_GRAD_OP"] <= peaks["SHARD_GRAD_OPTIMIZER"] < peaks["SHARD_OPTIMIZER"]
    assert peaks["SHARD_OPTIMIZER"] < peaks["NO_SHARD"]
