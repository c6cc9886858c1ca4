"""What has to be spelled out twice, because a type or a file of another kind says it, is the same in both places.

Which rules there are and who owns each: docs/decisions/0014-one-rule-one-owner.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import bitsandbytes
import pytest
from torch import optim

from fullshard.checkpoint.format import DTYPES
from fullshard.config import fsdp, schema, sharding
from fullshard.config.settings import About
from fullshard.core.dtypes import COMPUTE, ITEMSIZES
from fullshard.core.requirements import OLDEST_TORCH
from fullshard.core.schedule import SPENT, BackwardPrefetch, Reductions, count_kept, gathered_ahead
from fullshard.core.sizes import all_reduce_nbytes
from fullshard.core.strategy import STRATEGIES
from fullshard.engine.precision import dtype_name
from fullshard.engine.step.plain_tensors import ELEMENT_WISE
from fullshard.features.optimizer_checks import NEEDS_WHOLE_TENSORS
from fullshard.features.packed_messages import PACKINGS
from fullshard.features.steps_in_backward.stepper import STEPS_IN_PARTS
from fullshard.plan import job
from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import DEVICES, Cluster
from fullshard.plan.library import load_model
from fullshard.plan.optimizers import OPTIMIZERS
from fullshard.plan.route import Route

PROJECT = Path(__file__).parents[2]


def test_names_that_types_spell_out() -> None:
    assert get_args(sharding.BackwardPrefetch) == fsdp._PREFETCH == tuple(map(str, BackwardPrefetch))
    assert set(get_args(schema.PrecisionMode)) == set(COMPUTE)
    assert set(get_args(job.Optimizer)) == set(OPTIMIZERS)
    assert set(About.of(schema.SETTINGS["sharding.strategy"]).answers) == set(STRATEGIES)
    assert set(DTYPES) <= set(ITEMSIZES), "a checkpoint's dtype of unknown size"
    assert set(get_args(schema.Packing)) == {dtype_name(dtype) for dtype in PACKINGS}


def test_the_oldest_torch_is_that_of_the_package() -> None:
    [found] = re.findall(r'"torch>=([\d.]+)"', (PROJECT / "pyproject.toml").read_text())
    assert tuple(map(int, found.split("."))) == OLDEST_TORCH


def test_no_optimizer_is_refused_and_taken() -> None:
    refused = NEEDS_WHOLE_TENSORS["torch"]
    assert not refused & {cls.__name__ for cls in (*ELEMENT_WISE, *STEPS_IN_PARTS)}
    known = {name for name in vars(optim) if isinstance(getattr(optim, name), type) and name != "Optimizer"}
    assert known <= refused | {cls.__name__ for cls in STEPS_IN_PARTS}, "a new one of torch's"


def test_every_optimizer_of_bitsandbytes_that_scales_by_a_norm_is_refused() -> None:
    found = {
        name
        for name, value in vars(bitsandbytes.optim).items()
        if isinstance(value, type) and value.__module__.rpartition(".")[2] in ("lars", "lamb")
    }
    assert "PytorchLARS" in found and found <= NEEDS_WHOLE_TENSORS["bitsandbytes"]


def test_what_an_all_reduce_sends() -> None:
    """(R - 1)/R of the buffer in a reduce-scatter, and as much in the all-gather of the sum."""
    assert [all_reduce_nbytes(120, ranks) for ranks in (1, 2, 3, 4)] == [0, 120, 160, 180]


@pytest.mark.parametrize(
    ("ranks", "per_host", "expected"),
    [
        (1, 1, Route.NONE),
        (2, 2, Route.SHARED_MEMORY),
        (2, 8, Route.SHARED_MEMORY),
        (4, 2, Route.POINT_TO_POINT),
        (4, 1, Route.POINT_TO_POINT),
        (4, None, Route.POINT_TO_POINT),
    ],
)
def test_how_ranks_reach_one_another(ranks: int, per_host: int | None, expected: Route) -> None:
    assert Route.of(ranks, on_cpu=True, per_host=per_host) is expected
    assert Route.of(ranks, on_cpu=False, per_host=per_host) is (Route.NONE if ranks == 1 else Route.NATIVE)


def test_a_shard_group_inside_a_host_shares_memory_however_many_hosts_there_are() -> None:
    model = load_model("Llama-3.1-8B")[0]

    def route(shard_size: int | None, hosts: int) -> Route:
        strategy = "HYBRID_SHARD" if shard_size else "FULL_SHARD"
        cluster = Cluster(DEVICES["CPU"], 12, hosts)
        return evaluate(model, job.Job.of({"strategy": strategy, "shard_size": shard_size}), cluster).setting.route

    assert [route(2, 3), route(None, 1)] == [Route.SHARED_MEMORY] * 2
    assert [route(None, 3), route(6, 4), route(6, 3), route(None, 12)] == [Route.POINT_TO_POINT] * 4


def test_what_is_kept_of_free_memory() -> None:
    assert SPENT == 0.9
    assert [count_kept([3, 3, 3], budget) for budget in (0, 2, 3, 8, 9, 100)] == [0, 0, 1, 2, 3, 3]
    assert count_kept([0, 5, 0], 4) == 1, "one that does not fit ends it: those before it in forward are kept longer"


def test_what_is_gathered_ahead() -> None:
    order = ["root", "a", "b"]
    assert [gathered_ahead(order, begun, unit) for begun, unit in enumerate(order, 1)] == ["a", "b", None]
    assert gathered_ahead(order, 2, "b") is None, "another unit than last time: nobody knows what follows"
    assert gathered_ahead([], 1, "root") is None


def test_reductions_wait_for_their_turn() -> None:
    reductions: Reductions[str] = Reductions()
    reductions.expect(["c", "b"])
    reductions.expect(["a"])
    assert list(reductions.complete("b")) == []
    assert list(reductions.complete("c")) == ["c", "b"]
    assert list(reductions.complete("late")) == []
    assert list(reductions.remaining()) == ["a"]
    assert list(reductions.complete("a")) == []


@pytest.mark.parametrize(
    ("sizes", "over"), [((1, 1), ["a", "b", "c"]), ((2, 1), ["a", "b"]), ((1, 2), ["a"]), ((2, 2), ["a"])]
)
def test_when_a_reduction_is_over(sizes: tuple[int, int], over: list[str]) -> None:
    """Along the shard axis when the next one is launched, along the replicate axis one later; alone at once."""
    reductions: Reductions[str] = Reductions()
    assert [reductions.launch(name) for name in "abc"] == [None, "a", "b"]
    assert [name for name in reductions.waiting if reductions.is_over(name, *sizes)] == over
    reductions.launch("a")  # once more in the same backward
    assert not reductions.is_over("a", 2, 1)
    reductions.clear()
    assert (reductions.launched, reductions.waiting) == ([], {})
