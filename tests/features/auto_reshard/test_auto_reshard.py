"""`reshard_after_forward: auto`: which units are kept, what it costs, and that no number changes.

pytest tests/features/auto_reshard/test_auto_reshard.py
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.api.planning import model_shape
from fullshard.core.dtypes import Dtypes
from fullshard.core.errors import ConfigError, LifecycleError
from fullshard.core.events import Event, EventKind
from fullshard.features import MixedPrecisionPolicy, auto_reshard, keep_unsharded, units_of
from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.layout import lay_out
from fullshard.plan.library import load_model
from fullshard.plan.schedule import ScheduleOptions, predict_step
from tests.distributed import run_ranks
from tests.traps import BLOCKS, Stack, adamw, batch, build, build_sharded, rank_and_size, sharded_parameters

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
"""With it unsharded parameters are memory of their own even on one rank."""


def run(model: nn.Module, events: list[Event], steps: int = 4) -> list[torch.Tensor]:
    """Losses and the weights at the end; `events` of the last step."""
    optimizer = adamw(model.parameters())
    seen = []
    for step in range(steps):
        events.clear()
        loss = model(batch(step, rank_and_size()[0])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [*seen, *(p.full_tensor() for p in sharded_parameters(model).values())]


def sharded(events: list[Event], **options: Any) -> nn.Module:
    return build_sharded(Stack, BLOCKS, events=events, mp_policy=HALF, **options)


def freed_after_forward(events: list[Event]) -> list[str]:
    """Units that were freed right after their forward."""
    pairs = itertools.pairwise(events)
    return [b.unit for a, b in pairs if (a.kind, b.kind) == (EventKind.FORWARD_END, EventKind.RESHARDED)]


def unit_nbytes(model: nn.Module) -> int:
    return units_of(model)[0].full_nbytes


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_last_units_are_kept_and_nothing_else_changes(count: int) -> None:
    plain_events: list[Event] = []
    events: list[Event] = []
    expected = run(sharded(plain_events), plain_events)
    said: list[str] = []
    model = sharded(events)
    keep_unsharded(model, budget_nbytes=count * unit_nbytes(model) + 7, ranks_on_host=1, say=said.append)
    found = run(model, events)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert freed_after_forward(plain_events) == list(BLOCKS)
    assert freed_after_forward(events) == list(BLOCKS[: 3 - count])
    gathers = [sum(e.kind is EventKind.UNSHARD_ISSUED for e in each) for each in (plain_events, events)]
    assert gathers[0] - gathers[1] == count
    [line] = said
    assert f"{count} of 3 units stay unsharded" in line
    assert "the budget that was given" in line
    with torch.device("meta"):
        shape = model_shape(build(Stack))
    strategy = Job.of({}).row
    layout = lay_out(shape, strategy=strategy, world_size=1, dtypes=Dtypes("bfloat16")).keeping(count)
    assert predict_step(layout, ScheduleOptions()) == events


def test_what_is_there_anyway_is_kept_for_nothing() -> None:
    events: list[Event] = []
    said: list[str] = []
    model = build_sharded(Stack, BLOCKS, events=events)  # one rank, one dtype: unsharding is nothing
    keep_unsharded(model, budget_nbytes=None, ranks_on_host=1, say=said.append)
    assert "3 of 3 units" in said[0]
    assert "costs nothing" in said[0]
    run(model, events)
    assert freed_after_forward(events) == []


def test_memory_is_measured_after_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    said: list[str] = []
    model = sharded(events)
    room = 2.5 * unit_nbytes(model) / 0.9
    monkeypatch.setattr(auto_reshard, "headroom_nbytes", lambda device, *, ranks_on_host: int(room))
    keep_unsharded(model, budget_nbytes=None, ranks_on_host=1, say=said.append)
    run(model, events, steps=2)
    assert len(said) == 1
    assert freed_after_forward(events) == list(BLOCKS)
    with torch.no_grad():
        model(batch(0, 0))  # an evaluation decides nothing
    assert len(said) == 1
    run(model, events, steps=2)
    assert "2 of 3 units" in said[1]
    assert "90% of what was free after 2 steps" in said[1]
    assert freed_after_forward(events) == ["blocks.0"]


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="reads memory figures of Linux")
def test_what_is_free(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    alone = auto_reshard.headroom_nbytes(cpu, ranks_on_host=1)
    assert 0 < alone < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert auto_reshard.headroom_nbytes(cpu, ranks_on_host=4) < alone / 3
    root = tmp_path / "groups"
    root.mkdir()
    for limit, folder in ((1000, root), (910, tmp_path)):  # what lies above the groups is none
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("900\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 250\n")
    assert auto_reshard._available_in_group(root) == [350]


def check_ranks(comm: str) -> tuple[str, list[str]]:
    os.environ["FULLSHARD_COMM"] = comm
    events: list[Event] = []
    said: list[str] = []
    model = build_sharded(Stack, BLOCKS, events=events)
    budget = (2 - rank_and_size()[0]) * unit_nbytes(model)
    keep_unsharded(model, budget_nbytes=budget, ranks_on_host=2, say=said.append)
    expected = run(build_sharded(Stack, BLOCKS), [])
    assert all(torch.equal(a, b) for a, b in zip(run(model, events), expected, strict=True))
    return said[0], freed_after_forward(events)


@pytest.mark.full
def test_ranks_agree_on_the_smallest_budget() -> None:
    for line, freed in run_ranks(check_ranks, 2, "gloo"):
        assert "1 of 3 units" in line
        assert freed == ["blocks.0", "blocks.1"]


@pytest.mark.full
def test_shared_memory_makes_keeping_free() -> None:
    for line, freed in run_ranks(check_ranks, 2, "auto"):
        assert "3 of 3 units" in line
        assert "costs nothing" in line
        assert freed == []


def test_the_plan_keeps_as_many() -> None:
    shape, _ = load_model("Llama-3.1-8B")
    cluster = parse_cluster("8xH100")
    job = Job.of({"seq_len": 4096})
    base = evaluate(shape, job, cluster)
    auto = job.model_copy(update={"reshard_after_forward": "auto"})
    plans = [evaluate(shape, auto.model_copy(update={"unsharded_memory_gib": g}), cluster) for g in (0.0, 3.0, None)]
    assert [plan.kept for plan in plans] == [0, 7, 32]
    assert all(plan.fits for plan in plans)
    assert plans[0].memory.peak == base.memory.peak < plans[1].memory.peak < plans[2].memory.peak
    assert base.traffic.gather_nbytes > plans[1].traffic.gather_nbytes > plans[2].traffic.gather_nbytes
    near = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory=base.memory.needed + 2**30))
    tight = evaluate(shape, auto, near)
    assert 0 < tight.kept < 7
    assert tight.fits


def test_what_means_nothing_is_refused() -> None:
    from fullshard.config.schema import ShardingConfig
    from fullshard.recipes.arguments import TrainArguments

    for kind in (ShardingConfig.of, TrainArguments.of, Job.of):
        with pytest.raises(ConfigError, match="which is not set"):
            kind({"unsharded_memory_gib": 1.0})
        with pytest.raises(ConfigError, match="keeps all"):
            kind({"reshard_after_forward": "auto", "strategy": "SHARD_GRAD_OP"})
    with pytest.raises(LifecycleError, match="is not sharded"):
        keep_unsharded(nn.Linear(2, 2), budget_nbytes=1, ranks_on_host=1, say=print)
