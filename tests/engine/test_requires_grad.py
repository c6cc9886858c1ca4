"""`requires_grad` changed at any time: it counts when forward reads it and when a gradient appears, as in one process.

Adapters are switched off for a forward (PEFT's `disable_adapter`, which TRL takes as reference model) by freezing them.

pytest tests/engine/test_requires_grad.py
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.core.events import Event, EventKind
from fullshard.engine.lookup import units_of
from fullshard.features import fully_shard, no_sync, unsharded
from tests.differential import products_are_exact
from tests.distributed import run_ranks
from tests.traps import (
    BLOCKS,
    WIDTH,
    Block,
    Stack,
    assert_at_rest,
    assert_same_gradients,
    assert_trains_alike,
    batch,
    build,
    build_sharded,
    reference_step,
    run_squared,
    sharded_step,
    whole_gradient,
)

Loss = Callable[["Adapted", int, int], torch.Tensor]


class AdaptedBlock(Block):
    """A frozen block with two adapters, of which one is active; `is_recomputed` puts its forward into a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("one", "two")})
        self.adapters["two"].requires_grad_(False)
        self.active, self.is_enabled, self.is_recomputed = "one", True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_recomputed:
            return checkpoint(self.compute, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + self.adapters[self.active](x) if self.is_enabled else y


class Adapted(Stack):
    """A frozen model with adapters in its blocks."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.requires_grad_(False)
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(3))

    def adapted(self) -> list[AdaptedBlock]:
        return list(self.blocks)  # type: ignore[arg-type]

    def set_adapter(self, active: str) -> None:
        """Train one of them, as PEFT's method does."""
        for block in self.adapted():
            block.active = active
            for name, adapter in block.adapters.items():
                adapter.requires_grad_(name == active)

    def enable(self, is_enabled: bool) -> None:
        for block in self.adapted():
            block.is_enabled = is_enabled
            block.adapters[block.active].requires_grad_(is_enabled)

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self.enable(False)
        try:
            yield
        finally:
            self.enable(True)


def reference(model: Adapted, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), model.disable_adapter():
        return model(x)  # type: ignore[no-any-return]


def policy_first(model: Adapted, step: int, rank: int) -> torch.Tensor:
    x = batch(step, rank)
    policy: torch.Tensor = model(x)
    return (policy - reference(model, x)).square().mean()


def reference_first(model: Adapted, step: int, rank: int) -> torch.Tensor:
    x = batch(step, rank)
    base = reference(model, x)
    policy: torch.Tensor = model(x)
    return -(base - policy).square().mean()


def policy_on_both_sides(model: Adapted, step: int, rank: int) -> torch.Tensor:
    """Two forwards with a graph around one without."""
    x, y = batch(step, rank), batch(step + 50, rank)
    chosen: torch.Tensor = model(x)
    base = reference(model, x)
    rejected: torch.Tensor = model(y)
    return ((chosen - base) * (rejected - reference(model, y))).mean()


def reference_with_a_graph(model: Adapted, step: int, rank: int) -> torch.Tensor:
    """Nobody turned gradients off; the reference's graph is there for its input."""
    x = batch(step, rank).requires_grad_()
    policy: torch.Tensor = model(x)
    with model.disable_adapter():
        base: torch.Tensor = model(x)
    return (policy - base).square().mean()


def recomputed(model: Adapted, step: int, rank: int) -> torch.Tensor:
    for block in model.adapted():
        block.is_recomputed = True
    return policy_first(model, step, rank)


def frozen_before_backward(model: Adapted, step: int, rank: int) -> torch.Tensor:
    """What is frozen when its gradient appears gets none, though forward has seen it trainable."""
    model.set_adapter("one")
    loss = model(batch(step, rank)).square().mean()
    model.adapted()[1].adapters["one"].requires_grad_(step == 1)
    return loss  # type: ignore[no-any-return]


def unfrozen_before_backward(model: Adapted, step: int, rank: int) -> torch.Tensor:
    """The graph has no place for what forward has seen frozen."""
    model.adapted()[1].adapters.requires_grad_(False)
    loss = model(batch(step, rank)).square().mean()
    model.adapted()[1].adapters["one"].requires_grad_(True)
    return loss  # type: ignore[no-any-return]


def another_adapter_each_forward(model: Adapted, step: int, rank: int) -> torch.Tensor:
    losses = []
    for active in ("one", "two", "one"):
        model.set_adapter(active)
        losses.append(model(batch(step, rank)).square().mean())
    for block in model.adapted():
        block.adapters.requires_grad_(True)
    return torch.stack(losses).sum()


def last_adapter_counts(model: Adapted, step: int, rank: int) -> torch.Tensor:
    model.set_adapter("one")
    first = model(batch(step, rank)).square().mean()
    model.set_adapter("two" if step % 2 else "one")
    return first + model(batch(step + 50, rank)).square().mean()  # type: ignore[no-any-return]


def frozen_in_forward(model: Adapted, step: int, rank: int) -> torch.Tensor:
    """A module that changes what it holds, which is the original parameter then."""
    weight = "blocks.1.adapters.one"
    hook = model.get_submodule(weight).register_forward_pre_hook(lambda m, _: m.requires_grad_(step == 1) and None)
    loss = model(batch(step, rank)).square().mean()
    hook.remove()
    return loss  # type: ignore[no-any-return]


def unfrozen_in_forward(model: Adapted, step: int, rank: int) -> torch.Tensor:
    """Of a bucket that has never had a gradient."""
    hook = model.get_submodule("blocks.1.up").register_forward_pre_hook(lambda m, _: m.requires_grad_() and None)
    loss = model(batch(step, rank)).square().mean()
    hook.remove()
    return loss  # type: ignore[no-any-return]


LOSSES = [
    policy_first,
    reference_first,
    policy_on_both_sides,
    reference_with_a_graph,
    recomputed,
    frozen_before_backward,
    unfrozen_before_backward,
    another_adapter_each_forward,
    last_adapter_counts,
    frozen_in_forward,
    unfrozen_in_forward,
]
EXACT = 0.0 if products_are_exact() else 1e-9


def train(loss: Loss, strategy: str) -> None:
    def run(model: Any, step: int, rank: int) -> torch.Tensor:
        value = loss(model, step, rank)
        value.backward()
        return value.detach()

    model, plain = build_sharded(Adapted, BLOCKS, strategy=strategy), build(Adapted)
    assert_trains_alike(model, plain, run, tolerance=EXACT)
    moved = [not torch.equal(a, b) for a, b in zip(plain.parameters(), build(Adapted).parameters(), strict=True)]
    assert any(moved)
    assert_at_rest(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("SHARD_GRAD_OP", marks=pytest.mark.full)])
@pytest.mark.parametrize("loss", LOSSES)
def test_it_counts_when_it_is_read(loss: Loss, strategy: str) -> None:
    run_ranks(train, 2, loss, strategy)


def frozen_with_a_gradient_left() -> None:
    """What was collected under `no_sync` is reduced with the others, though its parameters are frozen by then."""
    model, plain = build_sharded(Adapted, BLOCKS), build(Adapted)

    def run(one: Any, step: int, rank: int) -> torch.Tensor:
        one.set_adapter("one")
        with no_sync(one) if units_of(one) else contextlib.nullcontext():
            one(batch(step, rank)).square().mean().backward()
        one.adapted()[1].requires_grad_(False)
        loss: torch.Tensor = one(batch(step + 50, rank)).square().mean()
        loss.backward()
        return loss.detach()

    assert_trains_alike(model, plain, run, tolerance=EXACT, steps=1)
    assert_at_rest(model)


def test_frozen_after_its_gradient() -> None:
    run_ranks(frozen_with_a_gradient_left, 2)


def through_part(model: Any, step: int, rank: int) -> torch.Tensor:
    """A part of the outermost unit, called past it."""
    loss: torch.Tensor = model.embed(batch(step, rank)).square().mean()
    loss.backward()
    return loss.detach()


def unfrozen_late() -> None:
    """However a frozen parameter is reached: it trains from the next forward on, as its unit was told before."""
    model: Any = build_sharded(frozen, BLOCKS)
    plain: Any = build(Stack)
    model.set_gradient_divide_factor(4.0)
    root = units_of(model)[-1]
    for slot in root.buckets[0].slots[:2]:  # the originals, held since before the model was sharded, say
        slot.parameter.requires_grad = True
    sharded_step(model, through_part, 0)
    reference_step(plain, through_part, 0)
    torch.testing.assert_close(whole_gradient(model.embed.weight), plain.embed.weight.grad / 2, rtol=0, atol=EXACT)
    with unsharded(model):
        model.head.requires_grad_(True)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["embed.weight", "embed.bias", "head.weight", "head.bias"]


def frozen() -> nn.Module:
    return Stack().requires_grad_(False)


def test_unfrozen_late() -> None:
    run_ranks(unfrozen_late, 2)


def told_while_frozen() -> None:
    """What was said about reductions holds for a bucket that is unfrozen later."""
    model: Any = build_sharded(frozen, BLOCKS, strategy="NO_SHARD")
    plain = build(Stack)
    model.set_requires_all_reduce(False)
    model.requires_grad_(True)
    sharded_step(model, run_squared, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_requires_all_reduce(True)
    sharded_step(model, run_squared, 0)
    for _ in range(2):
        reference_step(plain, run_squared, 0)
    for parameter in plain.parameters():
        assert parameter.grad is not None
        parameter.grad *= 4 / 3  # twice halved by `reference_step`, the first pass both times
    assert_same_gradients(model, plain, 1e-9)


def test_told_while_frozen() -> None:
    run_ranks(told_while_frozen, 2)


def reductions_of_frozen() -> None:
    events: list[Event] = []
    model = build_sharded(Stack, BLOCKS, events=events)
    model.get_submodule("blocks.1").requires_grad_(False)
    sharded_step(model, run_squared, 0)
    reduced = {event.unit for event in events if event.kind is EventKind.REDUCE_ISSUED}
    assert reduced == {"", "blocks.0", "blocks.2"}


def test_frozen_is_not_reduced() -> None:
    run_ranks(reductions_of_frozen, 2)


def reshard_of_partly_frozen() -> None:
    events: list[Event] = []
    model = build_sharded(Stack, ("embed", *BLOCKS), events=events)
    model.get_parameter("embed.bias").requires_grad_(False)
    sharded_step(model, run_squared, 0)
    freed = [i for i, event in enumerate(events) if event.kind is EventKind.RESHARDED and event.unit == "embed"]
    published = [i for i, event in enumerate(events) if event.kind is EventKind.REDUCE_DONE]
    assert freed[-1] < published[0]


def test_a_unit_that_is_partly_frozen_is_freed_with_the_last_gradient_that_comes() -> None:
    """Not at the end of backward: of the first unit no input tells that backward has left it."""
    run_ranks(reshard_of_partly_frozen, 2)


class TwoDtypes(nn.Module):
    """Two buckets. The gradient of one is there while parameters of the other are still read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.tanh(self.first(x)))
        return self.third(hidden.float()).double()  # type: ignore[no-any-return]


def first_unit_of_two_buckets() -> None:
    os.environ["FULLSHARD_COMM"] = "gloo"  # in memory of its own, which is freed
    plain = build(lambda: nn.Sequential(TwoDtypes(), nn.Linear(WIDTH, 3)))
    first = plain.get_submodule("0.third").float()
    assert first.weight.dtype == torch.float32
    model = copy.deepcopy(plain)
    fully_shard(model.get_submodule("0"))
    fully_shard(model)
    assert len(units_of(model)[0].buckets) == 2
    for each in (plain, model):
        each(batch(0, 0)).square().mean().backward()
    assert_same_gradients(model, plain, tolerance=1e-5)


def test_a_unit_is_freed_once_the_gradients_of_all_its_buckets_are_there() -> None:
    run_ranks(first_unit_of_two_buckets, 2)
