"""How backward may come back to a unit: several losses, checkpointing, in-place changes, unused parts, failures.

pytest tests/engine/test_traps_backward.py
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.core.errors import LifecycleError
from fullshard.core.events import Event, EventKind
from fullshard.engine.lookup import units_of
from fullshard.engine.precision import MixedPrecisionPolicy
from fullshard.features import shard_model, unsharded
from fullshard.features.watchdog import DesyncDetection
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
    reference_step,
    run_squared,
    sharded_parameters,
    sharded_step,
    train_beside_reference,
    whole_gradient,
)

# -- several backwards ------------------------------------------------------------------------------------------


def run_retained(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def run_two_losses(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    out = model(batch(step, rank))
    first, second = out[:, 0].square().mean(), out[:, 1].abs().mean()
    first.backward(retain_graph=True)
    second.backward()
    return torch.stack([first, second]).detach()


def run_retained_siamese(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = (model(batch(step, rank)) * model(batch(step + 9, rank))).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def run_micro_batches(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    losses = []
    for micro in range(3):
        loss: torch.Tensor = model(batch(10 * step + micro, rank)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def run_gradient_of_input_only(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A saliency map by `autograd.grad` before the step; it must leave nothing behind."""
    x = batch(step, rank).requires_grad_()
    (saliency,) = torch.autograd.grad(model(x).sum(), x)
    loss: torch.Tensor = model(batch(step, rank)).square().mean()
    loss.backward()
    return torch.cat([loss.detach()[None], saliency.flatten()])


@pytest.mark.parametrize(
    "run", [run_retained, run_two_losses, run_retained_siamese, run_micro_batches, run_gradient_of_input_only]
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", pytest.param("SHARD_GRAD_OP", marks=pytest.mark.full)])
def test_several_backwards(run: Any, strategy: str) -> None:
    run_ranks(check, 2, Stack, run, BLOCKS, strategy)


def check(make: Any, run: Any, units: tuple[str, ...] = BLOCKS, strategy: str = "FULL_SHARD") -> None:
    train_beside_reference(make, run, units, strategy=strategy)


# -- unused parts -----------------------------------------------------------------------------------------------


class Partial(nn.Module):
    """Blocks of which some outputs are unused, some never run, and one holds an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.ignored_output, self.never = Block(), Block()
        self.unused = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.ignored_output(x)
        return x


class UsedByOne(Partial):
    """Rank 0 uses the extra parameter, the other ranks do not."""

    def forward(self, x: torch.Tensor, *, extra: bool = False) -> torch.Tensor:
        x = super().forward(x)
        return x @ self.unused.T if extra else x


def run_used_by_one(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank), extra=rank == 0).square().mean()
    loss.backward()
    return loss.detach()


def run_used_in_one_step(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Used in step 1 only: no gradient, and no movement, in the steps before and after."""
    loss: torch.Tensor = model(batch(step, rank), extra=step == 1).square().mean()
    loss.backward()
    return loss.detach()


PARTS = (*BLOCKS, "ignored_output", "never")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unused_parts_do_not_move(world_size: int) -> None:
    """The gradient stays None (weight decay would move the parameter otherwise), with numbers against the reference."""
    run_ranks(check, world_size, Partial, run_squared, PARTS)


@pytest.mark.parametrize("run", [run_used_by_one, run_used_in_one_step])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_parameter_used_by_one_rank_or_step(run: Any, strategy: str) -> None:
    run_ranks(check, 2, UsedByOne, run, PARTS, strategy)


class Branching(nn.Module):
    """Two experts; which one runs is the caller's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, *, expert: int) -> torch.Tensor:
        out: torch.Tensor = self.head(self.experts[expert](x))
        return out


def run_expert_per_step(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank), expert=(step // 2) % 2).square().mean()
    loss.backward()
    return loss.detach()


def test_other_unit_every_step() -> None:
    run_ranks(check, 2, Branching, run_expert_per_step, ("experts.0", "experts.1"))


def check_kept_graph() -> None:
    """Rank 0 keeps the graph of an earlier forward (a loss in a list), through a unit later steps do not run."""
    reference, model = build(Branching), build_sharded(Branching, ("experts.0", "experts.1"))
    kept = []

    def run(module: nn.Module, step: int, rank: int) -> torch.Tensor:
        out = module(batch(step, rank), expert=step % 2)
        if rank == 0:
            kept.append(out)
        loss: torch.Tensor = out.square().mean()
        if step != 1:  # the graph of step 1 waits for a backward that never comes
            loss.backward()
        else:
            out.mean().backward(retain_graph=True)
        return loss.detach()

    assert_trains_alike(model, reference, run, steps=4)


def test_graph_kept_on_one_rank() -> None:
    run_ranks(check_kept_graph, 2)


def check_evaluated_with_gradients() -> None:
    """Rank 0 keeps the outputs of an evaluation that forgot `no_grad`; the units then run in another order."""
    reference, model = build(Branching), build_sharded(Branching, ("experts.0", "experts.1"))
    kept = []

    def run(module: nn.Module, step: int, rank: int) -> torch.Tensor:
        outputs = [module(batch(step + 20, rank), expert=expert) for expert in (step % 2, 1 - step % 2)]
        if rank == 0:
            kept.append(outputs)
        del outputs
        return run_expert_per_step(module, step, rank)

    assert_trains_alike(model, reference, run, steps=4)


def test_evaluation_outputs_kept_on_one_rank() -> None:
    run_ranks(check_evaluated_with_gradients, 2)


class PartlyUsedStack(Stack):
    """Each block has a parameter that nothing uses, so that only leaving it tells that its gradients are there."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        for block in self.blocks:
            block.unused = nn.Parameter(torch.ones(5))


def check_evaluated_with_unused_parameters() -> None:
    """Rank 0 keeps the outputs of an evaluation that forgot `no_grad`: it must not wait for their backward."""
    reference, model = build(PartlyUsedStack), build_sharded(PartlyUsedStack, [f"blocks.{i}" for i in range(6)])
    kept = [model(batch(20, rank)) for rank in range(2)][: 1 - dist.get_rank()]
    assert_trains_alike(model, reference, run_squared, steps=2)
    assert len(kept) == 1 - dist.get_rank()


def test_evaluation_outputs_of_unused_parameters_kept_on_one_rank() -> None:
    run_ranks(check_evaluated_with_unused_parameters, 2, timeout=40)


class Tower(nn.Module):
    """A model of which a rank may use a part."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor, *, with_extra: bool) -> torch.Tensor:
        hidden = self.own(x) + self.extra(x) if with_extra else self.own(x)
        out: torch.Tensor = self.blocks(hidden)
        return out


class Towers(nn.Module):
    """Two models whose losses are added up: alike, so that the gradients of one would pass for the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()

    def forward(self, x: torch.Tensor, *, rank: int, again: bool) -> torch.Tensor:
        losses = [self.right(x[:1], with_extra=rank == 0).abs().mean()] * again
        losses += [self.left(x, with_extra=rank == 1).square().mean()]
        losses += [self.right(x + 1, with_extra=rank == 1).square().mean() * 3]
        return torch.stack(losses).sum()


def run_towers(model: nn.Module, step: int, rank: int, *, again: bool = False) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank), rank=rank, again=again)
    loss.backward()
    return loss.detach()


def check_two_models(strategy: str, has_units: bool) -> None:
    for run in (run_towers, partial(run_towers, again=True)):
        reference, model = build(Towers), build(Towers)
        for tower in model.children():
            shard_model(tower, unit_modules=[*tower.get_submodule("blocks").children()] * has_units, strategy=strategy)
        with torch.no_grad():
            model(batch(20, 0), rank=0, again=True)
        kept = [model(batch(20, 0), rank=0, again=True)][: 1 - dist.get_rank()]
        assert_trains_alike(model, reference, run)
        assert len(kept) == 1 - dist.get_rank()


@pytest.mark.parametrize("comm", ["auto", pytest.param("gloo", marks=pytest.mark.full)])
@pytest.mark.parametrize("has_units", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_two_models_in_one_backward(strategy: str, has_units: bool, comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    run_ranks(check_two_models, 2, strategy, has_units, timeout=30)


class Begun(nn.Module):
    """Blocks whose input wants a gradient only where something before them is used."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor, is_whole: bool) -> torch.Tensor:
        out: torch.Tensor = self.blocks(self.before(x) if is_whole else x)
        return out


def run_begun_twice(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    first = model(batch(step, rank), is_whole=rank > 0)
    loss = first.square().mean() + model(batch(step + 10, rank), is_whole=rank == 0 or step == 2).abs().mean()
    loss.backward()
    detached: torch.Tensor = loss.detach()
    return detached


@pytest.mark.parametrize("comm", ["auto", "gloo"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_inputs_that_want_gradients_on_some_ranks(strategy: str, comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    run_ranks(check, 2, Begun, run_begun_twice, BLOCKS[:2], strategy, timeout=30)


class Around(nn.Module):
    """Another block between two layers of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = [inner]  # not one of its own modules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.inner[0](self.first(torch.tanh(self.first(x)))))
        return out


class UsedBefore(nn.Module):
    """A unit that is called on its own, and then by one whose input wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()
        self.around = Around(self.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.shared(x) * self.around(x)
        return out


@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_a_unit_inside_that_ran_before_the_one_around_it(comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward comes to it before it has left the other."""
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    run_ranks(check, 2, UsedBefore, run_squared, ("shared", "around"))


class UnusedInput(Stack):
    """Every block is given what the first one is, which wants a gradient, and does not use it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(x)
        for block in self.blocks:
            x = block(x, first)
        out: torch.Tensor = self.head(x)
        return out


class OneOfTwo(Block):
    def forward(self, x: torch.Tensor, _unused: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


def unused_input() -> nn.Module:
    model = UnusedInput()
    model.blocks = nn.ModuleList(OneOfTwo() for _ in model.blocks)
    return model


def check_unused_input() -> None:
    events: list[Event] = []
    reference, model = build(unused_input), build_sharded(unused_input, BLOCKS, events=events)
    assert_trains_alike(model, reference, run_retained, steps=2)
    log = [(event.kind, event.unit) for event in events]
    begins = [index for index, each in enumerate(log) if each == (EventKind.BACKWARD_BEGIN, "blocks.0")]
    assert len(begins) == 4
    for before, begin in zip([0, *begins], begins, strict=False):
        inside = log.index((EventKind.BACKWARD_BEGIN, "blocks.2"), before)
        assert (EventKind.RESHARDED, "blocks.2") in log[inside:begin]


def test_an_unused_input_does_not_keep_a_unit_whole() -> None:
    run_ranks(check_unused_input, 2)


# -- activation checkpointing -----------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Blocks with dropout, checkpointed inside, around each, or in groups."""

    def __init__(self, place: str, reentrant: bool) -> None:
        super().__init__()
        self.place, self.reentrant = place, reentrant
        self.embed = nn.Linear(WIDTH, WIDTH)
        kind = InnerCheckpoint if place == "inside" else Block
        self.blocks = nn.ModuleList(kind(dropout=0.3) for _ in range(4))
        for block in self.blocks.children():
            vars(block)["reentrant"] = reentrant
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.place == "inside":
            for block in self.blocks:
                x = block(x)
        else:
            size = {"around": 1, "groups": 2, "all": 4}[self.place]
            for start in range(0, 4, size):
                x = checkpoint(self.run, start, start + size, x, use_reentrant=self.reentrant)
        out: torch.Tensor = self.head(x)
        return out

    def run(self, start: int, stop: int, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[start:stop]:
            x = block(x)
        return x


class InnerCheckpoint(Block):
    """A block that checkpoints its own body."""

    reentrant: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return out


CHECKPOINTED = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


def check_checkpoint(place: str, reentrant: bool, strategy: str, run: Any = run_squared) -> None:
    train_beside_reference(lambda: Checkpointed(place, reentrant), run, CHECKPOINTED, strategy=strategy)


@pytest.mark.parametrize("place", ["inside", "around", "groups", "all"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_activation_checkpointing(place: str, reentrant: bool) -> None:
    run_ranks(check_checkpoint, 2, place, reentrant, "FULL_SHARD")


@pytest.mark.parametrize("place", ["inside", "around"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.full
def test_activation_checkpointing_strategies(place: str, reentrant: bool, strategy: str) -> None:
    run_ranks(check_checkpoint, 2, place, reentrant, strategy)


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_checkpointing_and_micro_batches(reentrant: bool) -> None:
    run_ranks(check_checkpoint, 3, "around", reentrant, "FULL_SHARD", run_micro_batches)


class AgainInside(nn.Module):
    """A checkpoint runs units again after one that backward has left, on some ranks without a sign."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(), Tower())

    def forward(self, x: torch.Tensor, *, with_extra: bool) -> torch.Tensor:
        block, tower = self.blocks
        inner = partial(tower, with_extra=with_extra)
        hidden = checkpoint(lambda hidden: block(inner(hidden)), self.embed(x), use_reentrant=True)
        out: torch.Tensor = hidden * inner(x)
        return out


def run_again_inside(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank), with_extra=rank == 0).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("comm", ["auto", "gloo"])
def test_what_is_run_again_after_a_unit_that_was_left_without_a_sign(
    comm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that gather it again wait for those that have not freed it."""
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    run_ranks(check, 2, AgainInside, run_again_inside, BLOCKS[:2], timeout=30)


class SharedCheckpointed(nn.Module):
    """One parameter in two checkpointed segments: with reentrant checkpointing its gradient appears twice."""

    def __init__(self, reentrant: bool, order: tuple[str, ...] = ("block", "other", "block")) -> None:
        super().__init__()
        self.reentrant, self.order = reentrant, order
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.block, self.other = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for module in map(self.get_submodule, self.order):
            x = checkpoint(module, x, use_reentrant=self.reentrant)
        return x


def check_shared_checkpoint(reentrant: bool, units: tuple[str, ...]) -> None:
    train_beside_reference(lambda: SharedCheckpointed(reentrant), run_squared, units)


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("units", [("block", "other"), ()], ids=["units", "root"])
def test_shared_parameter_in_two_checkpoints(reentrant: bool, units: tuple[str, ...]) -> None:
    run_ranks(check_shared_checkpoint, 2, reentrant, units)


def check_shared_checkpoint_of_micro_batches(*order: str) -> None:
    """A bucket that is reduced twice in one backward, and added to what the micro-batches before left."""
    reference = build(lambda: SharedCheckpointed(True, order))
    model = build_sharded(lambda: SharedCheckpointed(True, order), ["block", "other"])
    total: dict[str, torch.Tensor] = {}
    for step in range(3):
        reference_step(reference, run_squared, step)
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros_like(parameter)) + parameter.grad
            parameter.grad = total[name].clone() if step == 2 else None
        sharded_step(model, run_squared, step)
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("order", ["block other block", "other block block"])
def test_shared_parameter_in_two_checkpoints_of_micro_batches(order: str) -> None:
    run_ranks(check_shared_checkpoint_of_micro_batches, 2, *order.split())


def check_used_by_a_later_micro_batch() -> None:
    reference, model = build(Branching), build_sharded(Branching, ())
    total: dict[str, torch.Tensor] = {}
    for step in range(2):
        expert = partial(run_expert, expert=step)
        reference_step(reference, expert, step)
        sharded_step(model, expert, step)
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                total[name] = parameter.grad + total.get(name, 0.0)
                parameter.grad = None
    for name, parameter in reference.named_parameters():
        parameter.grad = total[name]
    assert_same_gradients(model, reference)


def run_expert(model: nn.Module, step: int, rank: int, *, expert: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank), expert=expert).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_a_later_micro_batch_uses_first(world_size: int) -> None:
    run_ranks(check_used_by_a_later_micro_batch, world_size)


def check_changed_between_micro_batches() -> None:
    """A script scales what it has so far, in place and anew, takes one away, and goes on."""
    reference = build(Stack)
    model = build_sharded(Stack, BLOCKS)
    total = {name: torch.zeros_like(parameter) for name, parameter in reference.named_parameters()}
    for step in range(4):
        reference_step(reference, run_squared, step)
        sharded_step(model, run_squared, step)
        for (name, parameter), own in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None and own.grad is not None
            total[name] += parameter.grad
            parameter.grad = None
            if step == 0:
                own.grad.mul_(2)
                total[name] *= 2
            elif step == 1:
                own.grad = own.grad * 3
                total[name] *= 3
            elif step == 2 and name.startswith("blocks.2."):
                own.grad = None
                total[name].zero_()
    for name, parameter in reference.named_parameters():
        parameter.grad = total[name]
    assert_same_gradients(model, reference)


def test_gradients_that_a_script_changes_between_micro_batches() -> None:
    run_ranks(check_changed_between_micro_batches, 2)


# -- in-place changes -------------------------------------------------------------------------------------------


class InPlaceInput(nn.Module):
    """Units that overwrite their input first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class InPlaceOutput(nn.Module):
    """Outputs, and views of outputs, that are overwritten outside the unit."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(ViewOutput() if "view" in kind else Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x.mul_(1.5) if "mul" in self.kind else x[:, :2].add_(1.0)
        return x


class ViewOutput(Block):
    """A block whose output is a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).t().t()


def check_in_place(kind: str) -> None:
    make: Callable[[], nn.Module] = InPlaceInput if kind == "input" else lambda: InPlaceOutput(kind)
    train_beside_reference(make, run_squared, BLOCKS)


@pytest.mark.parametrize("kind", ["input", "mul", "slice", "mul view", "slice view"])
def test_in_place(kind: str) -> None:
    run_ranks(check_in_place, 2, kind)


def check_in_place_reshards() -> None:
    """A unit that changes its input in place takes the engine's mark off it, so it is resharded at the end only."""
    events: list[Event] = []
    model = build_sharded(InPlaceInput, BLOCKS, events=events)
    run_squared(model, 0, 0)
    events.clear()
    run_squared(model, 1, 0)
    log = [(event.kind, event.unit) for event in events]
    assert (EventKind.RESHARDED, "blocks.2") in log[log.index((EventKind.BACKWARD_BEGIN, "blocks.2")) :]


def test_in_place_input_is_resharded_in_the_end() -> None:
    run_ranks(check_in_place_reshards, 2)


# -- failures ---------------------------------------------------------------------------------------------------


class Failing(Stack):
    """Raises where and when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.fail_in == "between":
                raise ArithmeticError("between units")
            if index == {"backward": 1, "late in backward": 0}.get(self.fail_in):
                x.register_hook(fail)
        out: torch.Tensor = self.head(x)
        return out


def fail(*_: object) -> None:
    raise ArithmeticError("as asked")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def check_failure(place: str, first: bool) -> None:
    reference = build(Failing)
    model: Any = build_sharded(Failing, BLOCKS)
    optimizers = adamw(model.parameters()), adamw(reference.parameters())
    if not first:
        assert_trains_alike(model, reference, run_squared, steps=2, optimizers=optimizers)
    error: type[BaseException] = KeyboardInterrupt if place == "interrupt" else ArithmeticError
    unit_inside = model.get_submodule("blocks.1.up")
    handle = None
    if place in ("inside", "interrupt"):
        handle = unit_inside.register_forward_pre_hook(interrupt if place == "interrupt" else fail)
    else:
        model.fail_in = place
    for _ in range(2):
        with pytest.raises(error):
            run_squared(model, 7, 0)
    if handle is not None:
        handle.remove()
    model.fail_in = ""
    for parameter in model.parameters():
        assert parameter.grad is None
    assert_trains_alike(model, reference, run_squared, steps=2, first=2, optimizers=optimizers)
    schedule = units_of(model)[0].schedule
    # An order that is not agreed on would be one that ranks may see differently.
    assert DesyncDetection.of(schedule).is_order_verified
    # A forward that would be taken for one inside another would neither count nor begin a step.
    assert not schedule.forward.is_under_way
    assert schedule.steps == (1 if first else 3)
    assert_at_rest(model)


@pytest.mark.parametrize("place", ["inside", "between", "backward", "interrupt"])
@pytest.mark.parametrize(
    "first", [pytest.param(True, id="first step", marks=pytest.mark.full), pytest.param(False, id="later step")]
)
def test_failure_then_training_goes_on(place: str, first: bool) -> None:
    run_ranks(check_failure, 2, place, first)


def check_failure_then_another_loss() -> None:
    """Two losses of two forwards: the backward of the first fails, and the second one's counts all the same."""
    reference = build(Failing)
    model: Any = build_sharded(Failing, BLOCKS)
    rank = dist.get_rank()
    for place in ("backward", "late in backward"):
        model.fail_in = place
        first = model(batch(0, rank)).square().mean()
        model.fail_in = ""
        second = model(batch(1, rank)).square().mean()
        with pytest.raises(ArithmeticError):
            first.backward()
        second.backward()
        reference_step(reference, run_squared, 1)
        assert_same_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()
    assert_at_rest(model)


@pytest.mark.parametrize("comm", ["gloo", "auto"])
def test_failure_then_the_backward_of_another_loss(comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    run_ranks(check_failure_then_another_loss, 2)


def check_failure_frees_memory() -> None:
    model = build_sharded(Failing, BLOCKS)
    run_squared(model, 0, 0)
    model.get_submodule("blocks.1.up").register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        run_squared(model, 1, 0)
    assert_at_rest(model)


def test_failed_forward_leaves_nothing_unsharded() -> None:
    run_ranks(check_failure_frees_memory, 2)


def check_failure_then_new_weights() -> None:
    """Backward has gathered ahead when it fails; main weights are changed, and looked at."""
    model: Any = build_sharded(Failing, BLOCKS, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    at_rest = list(model.parameters())
    run_squared(model, 0, 0)
    model.fail_in = "backward"
    with pytest.raises(ArithmeticError):
        run_squared(model, 1, 0)
    with torch.no_grad():
        for parameter in at_rest:
            parameter.fill_(3)
    with unsharded(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, torch.full_like(parameter, 3)), name


@pytest.mark.parametrize("comm", ["gloo", "auto"])
def test_what_a_failed_backward_gathered_is_not_shown(comm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    run_ranks(check_failure_then_new_weights, 2)


def check_accumulated_gradient_survives() -> None:
    """Micro-batch 1 is reduced, micro-batch 2 fails, micro-batch 3 is added to the first."""
    reference = build(Failing)
    model: Any = build_sharded(Failing, BLOCKS)
    reference_step(reference, run_squared, 0)
    sharded_step(model, run_squared, 0)
    model.fail_in = "backward"
    with pytest.raises(ArithmeticError):
        run_squared(model, 5, 0)
    model.fail_in = ""
    expected = {name: p.grad.clone() for name, p in reference.named_parameters() if p.grad is not None}
    reference.zero_grad()
    reference_step(reference, run_squared, 1)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        parameter.grad += expected[name]
    sharded_step(model, run_squared, 1)
    assert_same_gradients(model, reference)


def test_failed_micro_batch_costs_only_itself() -> None:
    run_ranks(check_accumulated_gradient_survives, 2)


def check_kept_gradients_are_lost() -> None:
    """Micro-batch 1 is kept whole, micro-batch 2 fails: who goes on is told that the first one is gone, too."""
    model: Any = build_sharded(Failing, BLOCKS)
    for kept in (False, True):
        model.fail_in = ""
        with model.no_sync() if kept else contextlib.nullcontext():
            run_squared(model, 0, 0)
        model.fail_in = "backward"
        with pytest.raises(ArithmeticError):
            run_squared(model, 5, 0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            list(model.named_parameters())
        found = [str(each.message) for each in said if "no_sync" in str(each.message)]
        assert len(found) == kept, found


def test_kept_gradients_lost_with_a_failed_backward() -> None:
    run_ranks(check_kept_gradients_are_lost, 2)


def check_taken_away_in_backward() -> None:
    """After this micro-batch's part was added to it."""
    model: Any = build_sharded(Stack, BLOCKS)
    sharded_step(model, run_squared, 0)

    def take_away(*_: object) -> None:
        for parameter in model.get_submodule("blocks.2").parameters():
            parameter.grad = None

    model.embed.register_full_backward_hook(take_away)
    with pytest.raises(LifecycleError, match=r"blocks\.2\..*during backward"):
        sharded_step(model, run_squared, 1)


def test_a_gradient_that_is_taken_away_in_backward() -> None:
    run_ranks(check_taken_away_in_backward, 1)


def check_half_added() -> None:
    """Micro-batch 2 fails after some of its gradients have been added to micro-batch 1's."""
    reference = build(Failing)
    model: Any = build_sharded(Failing, BLOCKS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded_step(model, run_squared, 0)
    before = [parameter.to_local().clone() for parameter in sharded_parameters(model).values()]
    model.fail_in = "late in backward"
    with pytest.raises(ArithmeticError):
        run_squared(model, 5, 0)
    model.fail_in = ""
    for go_on in (optimizer.step, lambda: sharded_step(model, run_squared, 1), optimizer.step):
        with pytest.raises(LifecycleError, match="part of a failed backward"):
            go_on()
    assert all(map(torch.equal, [p.to_local() for p in sharded_parameters(model).values()], before))
    for set_to_none in (False, True):
        optimizer.zero_grad(set_to_none=set_to_none)
        reference.zero_grad()
        reference_step(reference, run_squared, 1)
        sharded_step(model, run_squared, 1)
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("world_size", [1, 2])
def test_half_a_micro_batch_is_never_stepped(world_size: int) -> None:
    run_ranks(check_half_added, world_size)


def check_cleared_after_failure() -> None:
    """Micro-batch 1 is reduced, micro-batch 2 fails, `model.zero_grad()` clears what the first has left."""
    reference = build(Failing)
    model: Any = build_sharded(Failing, BLOCKS)
    sharded_step(model, run_squared, 0)
    model.fail_in = "backward"
    with pytest.raises(ArithmeticError):
        run_squared(model, 5, 0)
    model.fail_in = ""
    model.zero_grad()
    assert all(parameter.grad is None for parameter in sharded_parameters(model).values())
    reference_step(reference, run_squared, 1)
    sharded_step(model, run_squared, 1)
    assert_same_gradients(model, reference)


def test_gradients_are_cleared_after_a_failed_backward() -> None:
    run_ranks(check_cleared_after_failure, 2)


def check_watched_backward() -> None:
    """A thread that lists parameters, and a callback at the end of backward that does, find no failed backward."""
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)

    def list_parameters() -> None:
        assert list(model.parameters())

    def look(*_: object) -> None:
        thread = threading.Thread(target=list_parameters)
        thread.start()
        thread.join()
        torch.autograd.Variable._execution_engine.queue_callback(list_parameters)

    for watched in (reference, model):
        watched.get_submodule("blocks.1").register_forward_hook(lambda _m, _a, out: (out.register_hook(look), None)[1])
    assert_trains_alike(model, reference, run_squared, steps=2)


def test_parameters_may_be_listed_in_backward() -> None:
    run_ranks(check_watched_backward, 2)


# -- frozen parts -----------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Frozen blocks with small trainable adapters in the same unit, or frozen units between trainable ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AdaptedBlock() if kind == "adapter" else Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        if kind == "between":
            self.blocks[1].requires_grad_(False)
        elif kind == "front":
            self.blocks[0].requires_grad_(False)
            self.blocks[1].requires_grad_(False)
        elif kind == "last":
            self.blocks[2].requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class AdaptedBlock(Block):
    """A frozen block and two small matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2) / 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


def check_frozen(kind: str) -> None:
    train_beside_reference(lambda: Adapted(kind), run_squared, BLOCKS)


@pytest.mark.parametrize("kind", ["adapter", "between", "front", "last"])
def test_frozen_parts(kind: str) -> None:
    run_ranks(check_frozen, 2, kind)


def check_frozen_reshards() -> None:
    events: list[Event] = []
    model = build_sharded(lambda: Adapted("between"), BLOCKS, events=events)
    run_squared(model, 0, 0)
    events.clear()
    run_squared(model, 1, 0)
    log = [(event.kind, event.unit) for event in events]
    begin = log.index((EventKind.BACKWARD_BEGIN, "blocks.1"))
    reshard = log.index((EventKind.RESHARDED, "blocks.1"), begin)
    assert reshard < log.index((EventKind.REDUCE_ISSUED, "blocks.0"))
    assert not any(kind is EventKind.REDUCE_ISSUED and unit == "blocks.1" for kind, unit in log)


def test_frozen_unit_reshards_before_backward_ends() -> None:
    run_ranks(check_frozen_reshards, 2)


def check_flips(start: str) -> None:
    """Freeze and unfreeze blocks between steps; the optimizer follows `.grad is None`."""
    reference, model = build(Stack), build_sharded(Stack, BLOCKS)
    if start == "frozen":
        reference = build(Stack)
        reference.get_submodule("blocks.1").requires_grad_(False)
        model = build_sharded(frozen_middle, BLOCKS)
    optimizer, expected_optimizer = adamw(list(model.parameters())), adamw(list(reference.parameters()))
    for step in range(5):
        trainable = step in (1, 2, 4) if start == "frozen" else step in (0, 2, 4)
        for each in (model, reference):
            each.get_submodule("blocks.1").requires_grad_(trainable)
        reference_step(reference, run_squared, step)
        sharded_step(model, run_squared, step)
        assert_same_gradients(model, reference)
        for one in (optimizer, expected_optimizer):
            one.step()
            one.zero_grad()
        assert_same_parameters(model, reference)


def frozen_middle() -> nn.Module:
    model = Stack()
    model.get_submodule("blocks.1").requires_grad_(False)
    return model


@pytest.mark.parametrize("start", ["trainable", "frozen"])
def test_requires_grad_flipped_after_sharding(start: str) -> None:
    run_ranks(check_flips, 2, start)


def check_unfrozen_in_mixed_unit() -> None:
    """Unfreezing one of several frozen parameters of one bucket."""
    reference, model = build(lambda: Adapted("adapter")), build_sharded(lambda: Adapted("adapter"), BLOCKS)
    for each in (model, reference):
        each.get_parameter("blocks.1.up.weight").requires_grad_(True)
    reference_step(reference, run_squared, 0)
    sharded_step(model, run_squared, 0)
    assert_same_gradients(model, reference)
    assert whole_gradient(sharded_parameters(model)["blocks.1.up.weight"]) is not None


def test_one_parameter_of_a_frozen_bucket_unfrozen() -> None:
    run_ranks(check_unfrozen_in_mixed_unit, 2)


def check_out_of_memory() -> None:
    model = build_sharded(Stack, BLOCKS)
    unit = units_of(model)[0]
    whole = unit.buckets[0].wait_unshard

    def exhausted() -> None:
        whole()
        raise torch.OutOfMemoryError("CUDA out of memory")

    unit.buckets[0].wait_unshard = exhausted  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        model(batch(0, 0))


def test_running_out_of_memory_is_no_error_of_communication() -> None:
    """Scripts catch it to try smaller batches."""
    run_ranks(check_out_of_memory, 1)


def failed_without_all_reduce() -> None:
    """What a failed backward has reduced along one axis alone is not added to the next."""
    model: Any = build_sharded(Stack, BLOCKS, strategy="NO_SHARD")
    plain = build(Stack)
    model.set_requires_all_reduce(False)

    def fail(_: object) -> None:
        raise ArithmeticError("made to fail")

    hook = model.embed.register_forward_hook(lambda *call: call[2].register_hook(fail) and None)
    with pytest.raises(ArithmeticError):
        sharded_step(model, run_squared, 0)
    hook.remove()
    model.set_requires_all_reduce(True)
    with pytest.warns(UserWarning, match="a backward has failed"):
        sharded_step(model, run_squared, 0)
    reference_step(plain, run_squared, 0)
    assert_same_gradients(model, plain, 1e-9)


def test_failed_without_all_reduce() -> None:
    run_ranks(failed_without_all_reduce, 2)
