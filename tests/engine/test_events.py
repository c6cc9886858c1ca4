"""The order of the engine's work, event by event, and the memory it holds at each.

pytest tests/engine/test_events.py
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.core.events import Event, EventKind
from fullshard.engine.call import Call
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.features import units_of
from tests.distributed import run_ranks
from tests.traps import BLOCKS, WIDTH, Stack, adamw, assert_at_rest, batch, build_sharded, rank_and_size, run_squared
from tests.traps import unsharded_nbytes as held

CODES = {
    EventKind.UNSHARD_ISSUED: "issue",
    EventKind.UNSHARD_READY: "ready",
    EventKind.FORWARD_BEGIN: "forward",
    EventKind.FORWARD_END: "end",
    EventKind.BACKWARD_BEGIN: "backward",
    EventKind.BACKWARD_END: "passed",
    EventKind.RESHARDED: "reshard",
    EventKind.REDUCE_ISSUED: "reduce",
    EventKind.REDUCE_DONE: "done",
    EventKind.OPTIMIZER_STEP: "step",
}


def record(
    strategy: str, options: dict[str, Any], steps: int = 2, depth: tuple[str, ...] = BLOCKS
) -> list[tuple[str, str]]:
    """The events of the last of some steps as `(what, unit)`; blocks are called 0, 1, 2 and the root is called root."""
    events: list[Event] = []
    model = build_sharded(Stack, depth, strategy=strategy, events=events, **options)
    optimizer = adamw(model.parameters())
    rank, _ = rank_and_size()
    for step in range(steps):
        events.clear()
        run_squared(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
    assert_at_rest(model)
    return [(CODES[event.kind], event.unit.removeprefix("blocks.") or "root") for event in events]


def parse(text: str) -> list[tuple[str, str]]:
    """`what unit` per comma, over several lines."""
    return [tuple(item.split()) for item in text.replace("\n", ",").split(",") if item.strip()]  # type: ignore[misc]


FORWARD = """
    issue root, ready root, forward root
    issue 0, ready 0, forward 0, end 0, reshard 0
    issue 1, ready 1, forward 1, end 1, reshard 1
    issue 2, ready 2, forward 2, end 2, reshard 2
    end root
"""
FORWARD_PREFETCHED = """
    issue root, ready root, issue 0, forward root
    ready 0, issue 1, forward 0, end 0, reshard 0
    ready 1, issue 2, forward 1, end 1, reshard 1
    ready 2, forward 2, end 2, reshard 2
    end root
"""
BACKWARD = {
    "BACKWARD_PRE": """
        issue 2, backward root
        ready 2, issue 1, backward 2, reduce 2, passed 2, reshard 2
        ready 1, issue 0, backward 1, reduce 1, passed 1, reshard 1
        ready 0, backward 0, reduce 0, passed 0, reshard 0
        reduce root, reshard root
    """,
    "BACKWARD_POST": """
        backward root
        issue 2, ready 2, backward 2, reduce 2, passed 2, reshard 2, issue 1
        ready 1, backward 1, reduce 1, passed 1, reshard 1, issue 0
        ready 0, backward 0, reduce 0, passed 0, reshard 0
        reduce root, reshard root
    """,
    "NO_PREFETCH": """
        backward root
        issue 2, ready 2, backward 2, reduce 2, passed 2, reshard 2
        issue 1, ready 1, backward 1, reduce 1, passed 1, reshard 1
        issue 0, ready 0, backward 0, reduce 0, passed 0, reshard 0
        reduce root, reshard root
    """,
}
KEPT_BACKWARD = """
    backward root
    backward 2, reduce 2, passed 2, reshard 2
    backward 1, reduce 1, passed 1, reshard 1
    backward 0, reduce 0, passed 0, reshard 0
    reduce root, reshard root
"""
FINISH = "done 2, done 1, done 0, done root, step root"


@pytest.mark.parametrize("forward_prefetch", [False, True], ids=["no forward prefetch", "forward prefetch"])
@pytest.mark.parametrize("backward_prefetch", list(BACKWARD))
def test_full_shard(forward_prefetch: bool, backward_prefetch: str) -> None:
    options = {"forward_prefetch": forward_prefetch, "backward_prefetch": backward_prefetch}
    forward = FORWARD_PREFETCHED if forward_prefetch else FORWARD
    expected = parse(forward + BACKWARD[backward_prefetch] + FINISH)
    for events in run_ranks(record, 2, "FULL_SHARD", options):
        assert events == expected


class WithUnused(Stack):
    """Has a parameter without gradient in each block, so that a bucket is complete only when backward leaves it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.unused = nn.Parameter(torch.ones(WIDTH))


def record_with_unused() -> list[tuple[str, str]]:
    """Return the order of gathers and reductions in a backward that gathers after the gradients."""
    events: list[Event] = []
    model = build_sharded(WithUnused, BLOCKS, events=events, backward_prefetch="BACKWARD_POST")
    run_squared(model, 0, rank_and_size()[0])
    begin = next(n for n, event in enumerate(events) if event.kind is EventKind.BACKWARD_BEGIN)
    named = [(CODES[event.kind], event.unit.removeprefix("blocks.") or "root") for event in events[begin:]]
    return [event for event in named if event[0] in ("issue", "reduce")]


def test_gathers_after_backward_follow_the_reductions() -> None:
    """Other ranks may have launched the reduction at their last gradient, so it comes before the gather everywhere."""
    expected = parse("issue 2, reduce 2, issue 1, reduce 1, issue 0, reduce 0, reduce root")
    assert run_ranks(record_with_unused, 2) == [expected] * 2


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("backward_prefetch", list(BACKWARD))
def test_kept_between_forward_and_backward(strategy: str, backward_prefetch: str) -> None:
    """Nothing is gathered in backward, whatever the prefetch says."""
    options = {"forward_prefetch": False, "backward_prefetch": backward_prefetch}
    forward = [event for event in parse(FORWARD) if event[0] != "reshard"]
    expected = [*forward, *parse(KEPT_BACKWARD), *parse(FINISH)]
    for events in run_ranks(record, 2, strategy, options):
        assert events == expected


@pytest.mark.parametrize("world_size", [1, 3])
def test_same_on_every_number_of_ranks(world_size: int) -> None:
    """With the defaults: forward prefetch and BACKWARD_PRE."""
    expected = parse(FORWARD_PREFETCHED + BACKWARD["BACKWARD_PRE"] + FINISH)
    for events in run_ranks(record, world_size, "FULL_SHARD", {}):
        assert events == expected


def test_first_step_gathers_without_knowing_the_order() -> None:
    """Before all ranks were seen to agree nothing is gathered ahead in forward; after it, everything is."""
    options = {"forward_prefetch": True, "backward_prefetch": "BACKWARD_PRE"}
    for events in run_ranks(record, 2, "FULL_SHARD", options, 1):
        assert events == parse(FORWARD + BACKWARD["BACKWARD_PRE"] + FINISH)


@pytest.mark.full
@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("backward_prefetch", list(BACKWARD))
def test_two_units_unsharded_at_most(forward_prefetch: bool, backward_prefetch: str) -> None:
    options = {"forward_prefetch": forward_prefetch, "backward_prefetch": backward_prefetch}
    for events in run_ranks(record, 2, "FULL_SHARD", options):
        unsharded: set[str] = set()
        most = 0
        for what, unit in events:
            if unit == "root":
                continue
            if what == "issue":
                unsharded.add(unit)
            elif what == "reshard":
                unsharded.discard(unit)
            most = max(most, len(unsharded))
        assert most == (2 if forward_prefetch or backward_prefetch == "BACKWARD_PRE" else 1)


def check_bytes() -> None:
    """An event's bytes are those of the whole buffer it is about."""
    events: list[Event] = []
    model = build_sharded(Stack, BLOCKS, events=events)
    run_squared(model, 0, 0)
    sizes = {unit.name: sum(b.layout.full_numel * 8 for b in unit.buckets) for unit in units_of(model)}
    with_bytes = {EventKind.UNSHARD_ISSUED, EventKind.UNSHARD_READY, EventKind.RESHARDED, EventKind.REDUCE_ISSUED}
    for event in events:
        assert event.nbytes == (sizes[event.unit] if event.kind in with_bytes else 0), event


def test_event_bytes() -> None:
    run_ranks(check_bytes, 2)


# -- explicit prefetch ------------------------------------------------------------------------------------------


def record_explicit() -> list[tuple[str, str]]:
    events: list[Event] = []
    options = {"forward_prefetch": False, "backward_prefetch": "NO_PREFETCH"}
    model = build_sharded(Stack, BLOCKS, events=events, **options)
    first, second, third = (model.get_submodule(name) for name in BLOCKS)
    first.set_modules_to_forward_prefetch([second, third])  # type: ignore[operator]
    third.set_modules_to_backward_prefetch([second, first])  # type: ignore[operator]
    rank, _ = rank_and_size()
    run_squared(model, 0, rank)
    return [(CODES[event.kind], event.unit.removeprefix("blocks.") or "root") for event in events]


def test_explicit_prefetch_lists() -> None:
    expected = parse(
        """
        issue root, ready root, forward root
        issue 0, ready 0, issue 1, issue 2, forward 0, end 0, reshard 0
        ready 1, forward 1, end 1, reshard 1
        ready 2, forward 2, end 2, reshard 2
        end root, backward root
        issue 2, ready 2, issue 1, issue 0, backward 2, reduce 2, passed 2, reshard 2
        ready 1, backward 1, reduce 1, passed 1, reshard 1
        ready 0, backward 0, reduce 0, passed 0, reshard 0
        reduce root, reshard root, done 2, done 1, done 0, done root
        """
    )
    for events in run_ranks(record_explicit, 2):
        assert events == expected


# -- memory -----------------------------------------------------------------------------------------------------


class Watching(Stack):
    """Notes which units hold unsharded memory before and after every block."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_sets: list[set[str]] = []
        self.backward_sets: list[set[str]] = []

    def note(self, sets: list[set[str]]) -> None:
        sets.append({name.removeprefix("blocks.") or "root" for name, nbytes in held(self).items() if nbytes})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            self.note(self.forward_sets)
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda _: self.note(self.backward_sets))
        self.note(self.forward_sets)
        out: torch.Tensor = self.head(x)
        return out


def check_memory(strategy: str, backward_prefetch: str) -> tuple[list[set[str]], list[set[str]], list[set[str]]]:
    model: Any = build_sharded(
        Watching, BLOCKS, strategy=strategy, forward_prefetch=False, backward_prefetch=backward_prefetch
    )
    rank, _ = rank_and_size()
    run_squared(model, 0, rank)
    model.forward_sets.clear()
    model.backward_sets.clear()
    loss = model(batch(1, rank)).sum()
    between: list[set[str]] = []
    model.note(between)
    loss.backward()
    assert_at_rest(model)
    with torch.no_grad():
        model(batch(2, rank))
    assert_at_rest(model)
    return model.forward_sets[:4], between, model.backward_sets


def test_memory_is_freed_after_forward_and_after_backward() -> None:
    for forward, between, backward in run_ranks(check_memory, 2, "FULL_SHARD", "NO_PREFETCH"):
        assert forward == [{"root"}] * 4
        assert between == [{"root"}]
        # A hook registered on an output after the unit's own runs once the unit is whole again.
        assert backward == [{"root", "2"}, {"root", "1"}, {"root", "0"}]


def test_memory_that_is_kept() -> None:
    for forward, between, backward in run_ranks(check_memory, 2, "SHARD_GRAD_OP", "NO_PREFETCH"):
        assert forward == [{"root"}, {"root", "0"}, {"root", "0", "1"}, {"root", "0", "1", "2"}]
        assert between == [{"root", "0", "1", "2"}]
        assert backward == [{"root", "0", "1", "2"}, {"root", "0", "1"}, {"root", "0"}]


def check_switches() -> None:
    model: Any = build_sharded(Stack, BLOCKS, strategy="FULL_SHARD")
    rank, _ = rank_and_size()
    model.set_reshard_after_forward(False)
    loss = model(batch(0, rank)).sum()
    assert all(held(model).values())
    model.set_reshard_after_backward(False)
    loss.backward()
    assert all(held(model).values())
    adamw(model.parameters())
    model.set_reshard_after_backward(True)
    model(batch(0, rank)).sum().backward()
    assert_at_rest(model)


def test_reshard_switches() -> None:
    run_ranks(check_switches, 2)


def check_no_gradient_memory(strategy: str) -> None:
    """As soon as all of a unit's gradients are set to None, whatever the order."""
    model = build_sharded(Stack, BLOCKS, strategy=strategy)
    run_squared(model, 0, 0)
    for parameter in reversed(list(model.parameters())):
        parameter.grad = None
    for unit in units_of(model):
        for bucket in unit.buckets:
            assert bucket.has_gradient and bucket.gradient.main.tensor is None


def test_gradient_memory_is_given_back() -> None:
    run_ranks(check_no_gradient_memory, 2, "FULL_SHARD")


def check_optimizer_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those it holds, and wraps none of them for that; another one keeps its gradient and the memory of its bucket."""
    model = build_sharded(Stack, BLOCKS)
    other, *held = list(model.parameters())
    optimizer = adamw(held)
    run_squared(model, 0, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(isinstance(p.grad, ShardedTensor) and not p.grad.local.any() for p in held)
    run_squared(model, 0, 0)
    wrapped: list[Any] = []
    monkeypatch.setattr(ShardedParameter, "wrap", lambda self, local: wrapped.append(self))
    optimizer.zero_grad()
    monkeypatch.undo()
    assert not wrapped
    assert [p for p in model.parameters() if p.grad is not None] == [other]
    mains = [bucket.gradient.main for unit in units_of(model) for bucket in unit.buckets if bucket.has_gradient]
    assert [main.tensor is not None for main in mains].count(True) == 1


def test_an_optimizer_clears_its_gradients() -> None:
    run_ranks(check_optimizer_clears, 1, pytest.MonkeyPatch())


def check_clearing_reads_few() -> None:
    """One gradient after the other is set to None, in any order, and each time one tells that something is left."""
    model, reads = build_sharded(Stack, []), 0
    parameters = list(model.parameters())
    run_squared(model, 0, 0)

    def read(parameter: Any) -> object:
        nonlocal reads
        reads += 1
        return parameter.__dict__["local_grad"]

    counted: Any = ShardedParameter
    counted.local_grad = property(read, lambda parameter, grad: parameter.__dict__.update(local_grad=grad))
    spent = []
    try:
        for order in (parameters, parameters[::-1], parameters[1::2] + parameters[::2]):
            before = reads
            for parameter in order:
                parameter.grad = None
            spent.append(reads - before)
            run_squared(model, 0, 0)
    finally:
        del counted.local_grad
    assert len(parameters) > 10 and all(len(parameters) < number <= 4 * len(parameters) for number in spent), spent


def test_clearing_gradients_takes_no_longer_per_parameter_of_more() -> None:
    run_ranks(check_clearing_reads_few, 1)


def count_hooks(model: nn.Module) -> int:
    """Hooks on all modules and original parameters."""
    total = 0
    for module in model.modules():
        total += len(module._forward_hooks) + len(module._forward_pre_hooks)
    for unit in units_of(model):
        for bucket in unit.buckets:
            for slot in bucket.slots:
                total += len(slot.parameter._post_accumulate_grad_hooks or {})
                total += len(slot.parameter._backward_hooks or {})
    return total


def check_hooks_do_not_pile_up() -> None:
    model = build_sharded(Stack, BLOCKS)
    before = count_hooks(model)
    x = batch(0, 0).requires_grad_()
    for step in range(4):
        run_squared(model, step, 0)
        model(x).sum().backward()
        model(x)
    assert count_hooks(model) == before
    assert len(x._backward_hooks or {}) == 0
    for unit in units_of(model):
        assert not unit.calls.are_expected and not unit._current


def test_hooks_do_not_pile_up() -> None:
    run_ranks(check_hooks_do_not_pile_up, 2)


class Answer(nn.Module):
    """Returns what it made, and what is made of that, as a language model does its logits and loss."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.below, self.above = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        below = self.below(x)
        if self.how == "view":
            return below.tanh().view(-1)
        return {"loss": self.above(below.tanh()).square().mean(), "logits": below}


class HandsOn(nn.Module):
    """Its layer returns its input beside what it makes of that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), Beside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, same = self.layer(self.first(x))
        both: torch.Tensor = made + same
        return both


class Beside(nn.Linear):
    """A linear layer that hands its input on."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


GRAPHS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "loss and logits": (lambda: Answer("both"), ("below",)),
    "a view": (lambda: Answer("view"), ("below", "above")),
    "an input handed on": (HandsOn, ("layer",)),
    "blocks": (Stack, BLOCKS),
}


def check_graphs_go(name: str, ends: str) -> None:
    make, units = GRAPHS[name]
    model = build_sharded(make, units)
    gc.disable()  # it does not look into autograd's graphs, and must not be needed for what it does see
    try:
        for step in range(2):
            output = model(batch(step, 0))
            loss = output["loss"] if isinstance(output, dict) else output.square().mean()
            if ends != "no backward":
                loss.backward(retain_graph=ends == "two backwards")
            if ends == "two backwards":
                loss.backward()
            del output, loss
            alive = [call for call in gc.get_objects() if isinstance(call, Call)]
            assert not alive, f"step {step}: {len(alive)} forwards are still there"
    finally:
        gc.enable()


@pytest.mark.parametrize("ends", ["one backward", "two backwards", "no backward"])
@pytest.mark.parametrize("name", list(GRAPHS))
def test_a_graph_goes_with_what_forward_has_returned(name: str, ends: str) -> None:
    run_ranks(check_graphs_go, 1, name, ends)
