"""Optimizers that step in backward: the numbers of `optimizer.step()`, bit for bit.

What cannot be: tests/features/steps_in_backward/test_step_in_backward_refused.py. Trainer, launcher and recipe:
tests/features/steps_in_backward/test_step_in_backward_requested.py.

pytest tests/features/steps_in_backward/test_step_in_backward.py
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.config.switches import COMM
from fullshard.core.errors import CommunicationError
from fullshard.core.events import Event, EventKind
from fullshard.features import FSDPModule, fully_shard, no_sync, shard_model, unsharded
from fullshard.features.steps_in_backward.stepper import step_in_backward
from tests.differential import own_part
from tests.distributed import run_ranks
from tests.hosts import are_possible, run_hosts
from tests.optimizers import in_groups
from tests.stepping import MAKE, make_model, run_backward, stepping
from tests.traps import rank_and_size

STEPS = 4


def snapshot(model: nn.Module, optimizer: optim.Optimizer) -> list[Any]:
    """Weights and state."""
    found: list[Any] = []
    for parameter in model.parameters():
        found.append(own_part(parameter))
        found += [(key, own_part(torch.as_tensor(value))) for key, value in optimizer.state.get(parameter, {}).items()]
    return found


def train(kind: str, make: str, how: str, *, in_backward: bool) -> list[Any]:
    """Losses, and weights and state after every step.

    Args:
        kind: of the model.
        make: the optimizer.
        how: `plain`, `accumulate`, `no_sync` (accumulate without sync), `scheduler`, `reload`, `regroup`, `on and off`
            (every second step is an ordinary one).
        in_backward: whether it steps there.
    """
    model = make_model(kind)
    optimizer = MAKE[make](p for p in model.parameters() if p.requires_grad)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if how == "scheduler" else None
    if in_backward:
        step_in_backward(optimizer)
    history: list[Any] = []
    for step in range(STEPS):
        if how == "regroup" and step == 2:
            moved = optimizer.param_groups[0]["params"].pop()
            optimizer.add_param_group({"params": [moved], "lr": 1e-4})
        for micro_batch in range(1 if how not in ("accumulate", "no_sync") else 3):
            is_last = how not in ("accumulate", "no_sync") or micro_batch == 2
            cast(FSDPModule, model).set_is_last_backward(is_last and not (how == "on and off" and step % 2))
            with no_sync(model) if how == "no_sync" and not is_last else contextlib.nullcontext():
                history.append(run_backward(model, 10 * step + micro_batch))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if how == "reload" and step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        history += snapshot(model, optimizer)
    with unsharded(model):
        return history + [parameter.detach().clone() for parameter in model.parameters()]


def check_alike(cases: list[tuple[str, str, str]]) -> None:
    """Train with `step_in_backward` and without: the same bits."""
    for case in cases:
        ordinary, early = (train(*case, in_backward=in_backward) for in_backward in (False, True))
        assert len(ordinary) == len(early), case
        for position, (a, b) in enumerate(zip(ordinary, early, strict=True)):
            if isinstance(a, tuple):
                assert a[0] == b[0], (case, position)
                a, b = a[1], b[1]
            assert torch.equal(a, b), (case, position)


HOW = ("accumulate", "no_sync", "scheduler", "reload", "regroup", "on and off")
KINDS = ("tied", "frozen", "bf16", "bf16 stored", "ignored", "checkpointed", "checkpointed reentrant", "SHARD_GRAD_OP")
OPTIMIZERS = [("plain", make, "plain") for make in MAKE]
LOOPS = [("plain", "AdamW", how) for how in HOW]
MODELS = [(kind, "AdamW fused", "plain") for kind in (*KINDS, "NO_SHARD")]
MORE = [(kind, make, how) for kind in (*KINDS, "NO_SHARD") for make in ("AdamW", "AdamW in groups") for how in HOW]


def test_one_rank() -> None:
    run_ranks(check_alike, 1, LOOPS[::2] + MODELS)


def test_two_ranks() -> None:
    run_ranks(check_alike, 2, OPTIMIZERS + LOOPS + MODELS)


def check_alike_over_gloo(cases: list[tuple[str, str, str]]) -> None:
    os.environ[COMM.name] = "gloo"
    check_alike(cases)


@pytest.mark.full
@pytest.mark.parametrize("check", [check_alike, check_alike_over_gloo])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_combination(check: Callable[..., None], world_size: int) -> None:
    run_ranks(check, world_size, OPTIMIZERS + LOOPS + MORE)


@pytest.mark.full
@pytest.mark.parametrize("check", [check_alike, check_alike_over_gloo])
def test_hybrid(check: Callable[..., None]) -> None:
    run_ranks(check, 4, [("hybrid", make, how) for make in ("AdamW", "SGD momentum") for how in ("plain", *HOW)])


@pytest.mark.full
@pytest.mark.skipif(not are_possible(), reason="this machine makes no namespaces")
def test_two_hosts() -> None:
    run_hosts(check_alike, (2, 2), [*LOOPS, *MODELS, ("hybrid", "AdamW", "accumulate")])


# -- what happens when ------------------------------------------------------------------------------------------------


def check_moments() -> list[tuple[str, str]]:
    events: list[Event] = []
    model = make_model("plain", events)
    optimizer = MAKE["AdamW"](model.parameters())
    step_in_backward(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    run_backward(model, 0)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "it has stepped"
    held = [bucket.gradient.main.tensor for p in model.parameters() for bucket in [p.bucket] if bucket.has_gradient]  # type: ignore[attr-defined]
    assert held == [None] * len(held), "gradients are freed"
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    kinds = (EventKind.REDUCE_ISSUED, EventKind.BUCKET_STEP, EventKind.OPTIMIZER_STEP)
    return [(str(e.kind), e.unit) for e in events if e.kind in kinds]


def test_a_bucket_steps_when_the_next_is_being_reduced() -> None:
    def issued(unit: str) -> tuple[str, str]:
        return "reduce_issued", unit

    def stepped(unit: str) -> tuple[str, str]:
        return "bucket_step", unit

    order = ["blocks.2", "blocks.1", "blocks.0", ""]
    [alone] = run_ranks(check_moments, 1)
    assert alone == [e for unit in order for e in (issued(unit), stepped(unit))] + [("optimizer_step", "")]
    expected = [issued(order[0])]
    for earlier, unit in itertools.pairwise(order):
        expected += [issued(unit), stepped(earlier)]
    assert run_ranks(check_moments, 2) == [[*expected, stepped(""), ("optimizer_step", "")]] * 2


class _ReadLate(torch.autograd.Function):
    """On rank 1, read a weight in backward for longer than the other rank; note whether it changed since forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Linear, changed: list[bool]) -> torch.Tensor:
        ctx.layer, ctx.changed, ctx.before = layer, changed, layer.weight.detach().clone()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if rank_and_size()[0] == 1:
            time.sleep(0.4)
            ctx.changed.append(not torch.equal(ctx.layer.weight, ctx.before))
        return grads[0], None, None


class ReadLate(nn.Module):
    """Two layers; when backward has the gradients of both, rank 1 still reads the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.changed = nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 6), list[bool]()
        late = lambda _, args: _ReadLate.apply(*args, self.first[0], self.changed)  # noqa: E731
        self.first[0].register_forward_pre_hook(late)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x))
        return y


def read_late() -> list[bool]:
    model = ReadLate()
    shard_model(model, unit_modules=[model.first])
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    step_in_backward(optimizer)
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()
    return model.changed


def test_a_step_in_backward_waits_for_a_rank_that_still_reads_the_weights() -> None:
    assert run_ranks(read_late, 2) == [[], [False]]


class Wide(nn.Module):
    """Layers whose gradients are most of its memory."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def check_memory(in_backward: bool, gloo: bool) -> tuple[int, int]:
    """The most bytes of main gradients at any moment of backward, and those of the whole model."""
    if gloo:
        os.environ[COMM.name] = "gloo"
    model = Wide(8, 64)
    held = 0

    def look(event: Event) -> None:
        nonlocal held
        buckets = [p.bucket for p in model.parameters() if hasattr(p, "bucket")]
        held = max(held, sum(bucket.gradient.main.nbytes for bucket in buckets if bucket.has_gradient))

    shard_model(model, unit_modules=list(model.layers), event_sink=look)
    optimizer = optim.AdamW(model.parameters())
    if in_backward:
        step_in_backward(optimizer)
    for _ in range(2):
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return held, sum(p.bucket.main.nbytes for p in model.parameters())  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradients_of_the_whole_model_never_exist_at_once(world_size: int) -> None:
    for gloo in (False, True):
        for held, whole in run_ranks(check_memory, world_size, False, gloo):
            assert held == whole
        for held, whole in run_ranks(check_memory, world_size, True, gloo):
            assert held == whole // 8


# -- checkpoints and faults -------------------------------------------------------------------------------------------


def check_resume(directory: str) -> None:
    """A run that is saved and loaded half-way goes on bit for bit, in either way of stepping."""

    def run(steps: range, load: Path | None, save: Path | None, in_backward: bool) -> list[Any]:
        model = make_model("plain")
        optimizer = in_groups(model.parameters())
        if in_backward:
            step_in_backward(optimizer)
        if load is not None:
            load_checkpoint(load, model=model, optimizer=optimizer)
        for step in steps:
            run_backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        if save is not None:
            save_checkpoint(save, model=model, optimizer=optimizer)
        return snapshot(model, optimizer)

    whole = run(range(6), None, None, False)
    for first, second in ((True, True), (True, False), (False, True)):
        path = Path(directory) / f"{first}-{second}"
        run(range(3), None, path, first)
        resumed = run(range(3, 6), path, None, second)
        for a, b in zip(whole, resumed, strict=True):
            a, b = (a[1], b[1]) if isinstance(a, tuple) else (a, b)
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_checkpoints(tmp_path: Path) -> None:
    run_ranks(check_resume, 2, str(tmp_path))


def train_until_killed(killed: int) -> None:
    model, optimizer = stepping()
    if dist.get_rank() == killed:
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        model.get_submodule("blocks.0").register_full_backward_hook(die)
    run_backward(model, 0)
    optimizer.step()


def check_outer_unit_later() -> None:
    """What steps in the backward of a model goes on when that becomes a part of a larger one."""
    torch.manual_seed(0)
    inner, last = nn.Linear(6, 6), nn.Linear(6, 2)
    plain = copy.deepcopy(nn.Sequential(inner, last))
    fully_shard(inner)
    optimizer = optim.SGD(inner.parameters(), lr=0.1)
    step_in_backward(optimizer)
    model = fully_shard(nn.Sequential(inner, last))
    expected = optim.SGD(plain[0].parameters(), lr=0.1)
    for each in (model, plain):
        each(torch.ones(3, 6)).square().mean().backward()
    assert all(p.used_up_by for p in inner.parameters())  # type: ignore[attr-defined]
    optimizer.step()
    expected.step()
    for own, other in zip(inner.parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), other.detach())  # type: ignore[attr-defined]


def test_a_unit_around_it_made_later() -> None:
    run_ranks(check_outer_unit_later, 2)


def check_killed(killed: int) -> tuple[str, float]:
    start = time.monotonic()
    try:
        train_until_killed(killed)
    except CommunicationError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("nobody was missed")


@pytest.mark.full
@pytest.mark.skipif(not are_possible(), reason="this machine makes no namespaces")
@pytest.mark.parametrize("ranks_per_host", [(2,), (2, 2)])
def test_a_rank_killed_between_two_buckets(ranks_per_host: tuple[int, ...]) -> None:
    results = run_hosts(check_killed, ranks_per_host, 0, dies=0)
    assert results[0] is None
    for words, seconds in results[1:]:
        assert "unit" in words and seconds < 30
