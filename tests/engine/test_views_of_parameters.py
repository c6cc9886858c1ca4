"""A unit may return views of its own parameters, whose memory goes when it is resharded.

pytest tests/engine/test_views_of_parameters.py
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.config.switches import COMM
from fullshard.core.errors import LifecycleError
from fullshard.features import CPUOffloadPolicy, unsharded
from fullshard.features.kept_views import _Freed
from tests.distributed import run_ranks
from tests.traps import WIDTH, Block, assert_trains_alike, batch, build, build_sharded, run_squared


@dataclass
class Held:
    queries: torch.Tensor


VIEWS: dict[str, Callable[[nn.Parameter, torch.Tensor], Any]] = {
    "expanded": lambda q, x: q.expand(len(x), -1, -1),
    "rows": lambda q, x: q[:3],
    "itself": lambda q, x: q,
    "transposed twice, in a dict": lambda q, x: {"queries": q.T.unsqueeze(0).mT},
    "in a tuple in a list": lambda q, x: [(x.sum(), q[1:])],
    "in a dataclass": lambda q, x: Held(q.view(1, 5, WIDTH)),
    "without autograd": lambda q, x: q.detach()[:2],
}


class Queries(nn.Module):
    """Learned queries, and a weight that is computed with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.q, self.scale = kind, nn.Parameter(torch.randn(5, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self.scale(x), VIEWS[self.kind](self.q, x)


def tensor_in(value: Any) -> torch.Tensor:
    if isinstance(value, Held):
        return value.queries
    if isinstance(value, dict):
        return value["queries"]  # type: ignore[no-any-return]
    return value[0][1] if isinstance(value, list) else value  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.queries, self.body = Queries(kind), Block()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled, q = self.queries(x)
        q = tensor_in(q)
        out = self.body(torch.tanh(scaled).mean(0) + 2 * q)
        return (out * q).mean(), q


def run(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    with torch.no_grad():
        _, kept = model(batch(step, rank))
    loss, q = model(batch(step, rank))
    loss.backward()
    return torch.cat([loss.detach()[None], kept.flatten(), q.detach().flatten()])


def check(comm: str, **options: Any) -> None:
    os.environ[COMM.name] = comm
    try:
        for kind in VIEWS:
            make = functools.partial(Net, kind)
            try:
                assert_trains_alike(build_sharded(make, ("queries", "body"), **options), build(make), run, steps=2)
            except AssertionError as error:
                error.add_note(kind)
                raise
    finally:
        del os.environ[COMM.name]


def check_freed(**options: Any) -> None:
    check("gloo", **options)


def test_views_are_right_where_memory_is_freed() -> None:
    run_ranks(check_freed, 2)


def test_views_are_right_where_memory_is_shared() -> None:
    run_ranks(functools.partial(check, "auto"), 2)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD"])
def test_views_under_other_strategies(strategy: str) -> None:
    run_ranks(functools.partial(check_freed, strategy=strategy), 2)


@pytest.mark.full
def test_views_of_what_is_offloaded() -> None:
    run_ranks(functools.partial(check_freed, offload_policy=CPUOffloadPolicy()), 2)


class Caching(nn.Module):
    """Keeps views for its own next forward, from which scripts may read them, too."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.lstm = nn.Parameter(torch.randn(5, WIDTH)), nn.LSTM(WIDTH, WIDTH)
        self.rows: Any = None
        self.table: dict[str, torch.Tensor] = {}
        self.register_buffer("turned", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            self.rows, self.table["first"], self.turned = self.q[:3], self.q[0], self.q.detach().T
        out: torch.Tensor = self.lstm(x[None])[0][0] * self.rows.sum() + self.table["first"] + self.turned.sum()
        return out


def check_attributes(comm: str) -> None:
    os.environ[COMM.name] = comm
    try:
        model: Any = build_sharded(lambda: nn.Sequential(Caching(), Block()), ("0", "1"))
        reads: list[Callable[[], Any]] = [
            lambda: model[0].rows + 1,
            lambda: model[0].table["first"].tolist(),
            lambda: torch.cat([model[0].turned]),
            lambda: model[0].rows.shape,
        ]
        for grad in (False, True):  # views are made without gradients
            with torch.set_grad_enabled(grad):
                model(batch(0, 0))
            for read in reads:
                with pytest.raises(LifecycleError, match=r"unit '0': Caching\..* is a view of one of its parameters"):
                    read()
        with unsharded(model):
            assert torch.equal(model[0].rows, model[0].q[:3])
        model[0].rows = None
        assert_trains_alike(model, build(lambda: nn.Sequential(Caching(), Block())), run_caching, steps=2)
    finally:
        del os.environ[COMM.name]


def run_caching(model: Any, step: int, rank: int) -> torch.Tensor:
    model[0].rows = None  # one process, too, has a graph for one backward
    return run_squared(model, step, rank)


def test_attributes_that_are_views_are_not_read_while_their_memory_is_gone() -> None:
    run_ranks(check_attributes, 2, "gloo")


@pytest.mark.full
def test_attributes_that_are_views_where_memory_is_shared() -> None:
    run_ranks(check_attributes, 2, "auto")


def test_what_stands_in_for_a_freed_view_has_no_memory() -> None:
    stand_in = _Freed.of("why")
    with torch._C.DisableTorchFunctionSubclass():
        assert stand_in.untyped_storage().nbytes() == 0
    with pytest.raises(LifecycleError, match="why"):
        stand_in.sum()
