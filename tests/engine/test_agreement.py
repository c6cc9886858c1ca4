"""Ranks that were given different models find out before they compute anything.

pytest tests/engine/test_agreement.py
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.core.errors import CommunicationError
from fullshard.features import MixedPrecisionPolicy, fully_shard, shard_model
from tests.distributed import run_ranks
from tests.traps import WIDTH, batch, rank_and_size


class Layers(nn.Module):
    """Two named layers in a chosen order."""

    def __init__(self, names: tuple[str, ...] = ("first", "second"), width: int = WIDTH) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum(-1) for layer in self.children()])


def make(kind: str, odd: bool) -> tuple[nn.Module, list[str], dict[str, Any]]:
    """A model, its units and the options of `shard_model`; something is different if `odd`."""
    model, units, options = Layers(), ["first", "second"], dict[str, Any]()
    if odd:
        if kind == "shape":
            model = Layers(width=WIDTH + 1)
        elif kind == "name":
            model, units = Layers(("first", "other")), ["first", "other"]
        elif kind == "order":
            model = Layers(("second", "first"))
        elif kind == "requires_grad":
            model.second.weight.requires_grad_(False)  # type: ignore[union-attr]
        elif kind == "dtype":
            model.second.double()
        elif kind == "units":
            units = ["first"]
        elif kind == "tied":
            model.second.weight = model.first.weight  # type: ignore[union-attr]
        elif kind == "reduce":
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        elif kind == "missing":
            del model.second
            units = ["first"]
    return model, units, options


EXPECTED = {
    "shape": ("unit 'first'", "(6, 6)", "(7, 6)"),
    "name": ("unit 'other'", "second.weight", "other.weight"),
    "order": ("unit 'first'", "unit 'second'"),
    "requires_grad": ("unit 'second'", "second.weight"),
    "dtype": ("unit 'second'", "torch.float32", "torch.float64"),
    "units": ("the outermost unit", "unit 'first'"),
    "tied": ("unit 'first'", "first.weight", "first.weight=second.weight"),
    "reduce": ("unit", "torch.bfloat16"),
    "missing": ("second.weight",),
}


def check_disagreement(kind: str, odd_rank: int, sync: bool) -> tuple[list[str], float]:
    rank, _ = rank_and_size()
    start = time.monotonic()
    messages = []
    model = None
    for _ in range(2):  # asking again gives the same answer, not a hang or a step with wrong numbers
        try:
            if model is None:
                shape, units, options = make(kind, rank == odd_rank)
                model = shard_model(
                    shape,
                    unit_modules=[shape.get_submodule(name) for name in units],
                    sync_module_states=sync,
                    **options,
                )
            model(batch(0, rank).float())
        except CommunicationError as error:
            messages.append(str(error))
    return messages, time.monotonic() - start


@pytest.mark.parametrize("kind", list(EXPECTED))
def test_different_models(kind: str) -> None:
    for messages, seconds in run_ranks(check_disagreement, 2, kind, 1, False):
        assert seconds < 40
        assert len(messages) == 2
        for message in messages:
            assert "rank 1" in message
            for part in EXPECTED[kind]:
                assert part in message


@pytest.mark.parametrize("odd_rank", [0, 2])
def test_any_rank_may_be_the_odd_one(odd_rank: int) -> None:
    for messages, _ in run_ranks(check_disagreement, 3, "shape", odd_rank, False):
        assert len(messages) == 2
        assert ("2 of 3 ranks differ" if odd_rank == 0 else "1 of 3 ranks differ") in messages[0]
        assert f"rank {odd_rank or 1}" in messages[0]


@pytest.mark.parametrize("kind", ["shape", "missing", "dtype"])
def test_different_models_when_states_are_synchronized(kind: str) -> None:
    """Rank 0's values must not be sent into tensors of another shape."""
    for messages, seconds in run_ranks(check_disagreement, 2, kind, 1, True):
        assert seconds < 40
        assert messages and "rank 1" in messages[0]


def check_meta(odd: bool) -> str:
    rank, _ = rank_and_size()
    with torch.device("meta"):
        model = Layers(width=WIDTH + (1 if odd and rank == 1 else 0))
    try:
        shard_model(model, unit_modules=list(model.children()))
        model(batch(0, rank).float())
    except CommunicationError as error:
        return str(error)
    return ""


def test_different_models_on_the_meta_device() -> None:
    for message in run_ranks(check_meta, 2, True):
        assert "rank 1" in message


def test_equal_models_agree() -> None:
    assert run_ranks(check_meta, 2, False) == ["", ""]


def check_order(odd_step: int) -> list[str]:
    """The units run in another order on rank 1, in the first forward or a later one."""
    rank, _ = rank_and_size()
    model: Any = Ordered()
    model = shard_model(model, unit_modules=[model.a, model.b], strategy="NO_SHARD")
    messages = []
    for step in range(odd_step + 1):
        try:
            model(batch(step, rank).float(), swap=step == odd_step and rank == 1)
        except CommunicationError as error:
            messages.append(str(error))
    return messages


class Ordered(nn.Module):
    """Two layers that run in the order the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, swap: bool) -> torch.Tensor:
        layers = (self.b, self.a) if swap else (self.a, self.b)
        for layer in layers:
            x = layer(x)
        return x


def test_different_order_in_the_first_forward() -> None:
    for messages in run_ranks(check_order, 2, 0):
        assert len(messages) == 1
        assert "unit 'a'" in messages[0] and "unit 'b'" in messages[0] and "rank 1" in messages[0]


def check_failed_sharding() -> str:
    """Rank 0 could not shard a model, the others could; all of them try again with another one."""
    for fails in (rank_and_size()[0] == 0, False):
        model = Layers()
        fully_shard(model.get_submodule("first"))
        if not fails:
            fully_shard(model)
    try:
        model(batch(0, 0).float())
    except CommunicationError as error:
        return str(error)
    return ""


def test_a_model_after_one_that_a_rank_could_not_shard() -> None:
    for text in run_ranks(check_failed_sharding, 2, timeout=40):
        for rank in (0, 1):
            assert f"rank {rank} has [the outermost unit has its buckets at [{2 + rank}]" in text, text
