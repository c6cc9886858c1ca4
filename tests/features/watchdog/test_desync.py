"""Ranks that do not do the same are told in that step, with what both of them do: eight ways to lose step.

pytest tests/features/watchdog/test_desync.py
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.api import collectives
from fullshard.api.state import ProcessState
from fullshard.checkpoint import save_checkpoint
from fullshard.config.switches import COMM
from fullshard.core.errors import CommunicationError, FullshardError
from fullshard.core.journal import JOURNAL
from fullshard.features import shard_model, units_of
from fullshard.features.watchdog import WATCHDOG, watchdog
from tests.distributed import run_ranks
from tests.features.watchdog.test_waits_and_timeouts import until
from tests.traps import rank_and_size

WIDTH, LAYERS, STEPS = 8, 4, 8


def soon(run: Callable[..., Any]) -> Callable[..., Any]:
    """Have ranks say soon that they wait. The time-out stays two minutes, and steps of earlier tests do not count."""
    fresh = mock.patch.multiple(WATCHDOG, slowest=0.0, _step_began=0.0)
    return fresh(mock.patch.object(watchdog, "_STALL_SECONDS", 1.0)(run))


def leave_together(directory: str) -> None:
    """Wait for the other rank: who leaves takes the job's store along."""
    rank, _ = rank_and_size()
    (Path(directory) / str(rank)).touch()
    until(lambda: (Path(directory) / str(1 - rank)).exists())


class Net(nn.Module):
    """Layers that run in the order the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = x + self.layers[number](x)
        return x


@soon
def lose_step(kind: str, seed: int, strategy: str, odd_rank: int, directory: str) -> tuple[str, int, float]:
    """What a rank is told, in which step and how long after it was lost; the odd rank does something else."""
    rank, _ = rank_and_size()
    choice = random.Random(seed)
    odd_step, layer = choice.randrange(2, STEPS - 2), choice.randrange(LAYERS)
    swap = choice.randrange(LAYERS - 1)
    odd_step = STEPS if kind == "layer drop" else odd_step
    JOURNAL.close()
    model: Any = Net()
    model = shard_model(model, unit_modules=list(model.layers), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drops = [random.Random(each) for each in (0, 1)]  # of each rank
    begin = time.monotonic()
    step = 0

    def run(order: list[int]) -> None:
        model(torch.ones(2, WIDTH), order).square().mean().backward()

    try:
        for step in range(STEPS):
            odd = step == odd_step and rank == odd_rank
            if step == odd_step:
                begin = time.monotonic()
            order = list(range(LAYERS))
            if kind == "layer drop" and step >= 1:
                orders = [[number for number in order if not number or drop.random() > 0.5] for drop in drops]
                order, odd_step = orders[rank], min(odd_step, step if orders[0] != orders[1] else STEPS)
            if odd and kind == "skipped module":
                order.remove(layer)
            if odd and kind == "order":
                order[swap : swap + 2] = reversed(order[swap : swap + 2])
            if odd and kind == "learning rate":
                optimizer.param_groups[0]["lr"] = 0.2
            if kind == "phase":
                JOURNAL.tell(step + (step >= odd_step and rank == odd_rank))
            if odd and kind == "more batches":
                run(order)
                optimizer.step()
                optimizer.zero_grad()
            if odd and kind == "more micro-batches":
                run(order)
            run(order)
            if not (odd and kind == "no optimizer step"):
                optimizer.step()
            optimizer.zero_grad()
            if step == odd_step and kind.startswith("more"):
                save_checkpoint(Path(directory) / "saved", model=model)
    except RuntimeError as error:
        return str(error), step - odd_step, time.monotonic() - begin
    finally:
        JOURNAL.close()
        leave_together(directory)
    return "", step - odd_step, time.monotonic() - begin


KINDS = {
    "skipped module": "unit 'layers.",
    "order": "unit 'layers.",
    "more batches": "",
    "more micro-batches": "",
    "no optimizer step": "optimizer step",
    "learning rate": "learning rates",
    "phase": "of the run",
    "layer drop": "",
}
"""Each way, and what both sides are quoted with."""


def check(kind: str, seed: int, strategy: str, tmp_path: Path) -> None:
    odd_rank = seed % 2
    found = run_ranks(lose_step, 2, kind, seed, strategy, odd_rank, str(tmp_path))
    words = ("but other ranks differ", "ranks are out of step: ", "], but rank ")
    messages = [message for message, _, _ in found if any(word in message for word in words)]
    assert messages, found
    assert KINDS[kind] in messages[0], messages
    # A step that was left out is seen at the next message, before anything else is stepped.
    assert all(step <= (kind == "no optimizer step") for message, step, _ in found if message), found
    assert all(message for message, _, _ in found), found


LINE = r"(?: \(step \d+\))?, at test_desync\.py:\d+ in {}"
"""The line of the script at which a rank waits."""


@soon
def have_one_more(comm: str, after: str) -> str:
    """What a rank is told that has a batch more than the other, which goes on to something of all ranks."""
    with mock.patch.dict(os.environ, {COMM.name: comm}):
        rank, _ = rank_and_size()
        model = fully_shard(nn.Linear(WIDTH, WIDTH))
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
        dist.barrier()
    try:
        if rank == 1:
            model(torch.ones(2, WIDTH))
        elif after == "barrier":
            dist.barrier()
        else:
            collectives.all_gather_object([rank])
    except RuntimeError as error:
        return str(error) if error.__cause__ is None else f"{error} because of {error.__cause__}"
    return ""


@pytest.mark.parametrize(
    ("comm", "after"), [("auto", "gather"), pytest.param("gloo", "barrier", marks=pytest.mark.full)]
)
def test_a_batch_more_is_told_while_the_other_rank_lives(comm: str, after: str) -> None:
    other = {"gather": "waits in gathering objects", "barrier": "waits in torch's barrier"}[after]
    here, call = LINE.format("have_one_more"), r" \(all_gather_object\)" * (after == "gather")
    begin = time.monotonic()
    _, told, _ = run_ranks(have_one_more, 3, comm, after)
    assert time.monotonic() - begin < 100
    said = "rank 1, the outermost unit, unshard: (rank [02] has given up: )?ranks are out of step: rank 1 is alone"
    assert re.match(f"{said}, the others are ", told)
    assert re.search(
        rf"rank 0 \(.*\) {other}{here}{call}.*; rank 1 \(.*\) waits in the outermost unit, unshard{here}", told
    )
    assert "hint: check whether another rank failed first, had fewer batches" in told and "because of" not in told


def shard_another_model() -> str:
    """What a rank is told whose model has a layer less than the other's."""
    rank, _ = rank_and_size()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2 + rank)])
    with pytest.raises(CommunicationError) as caught:
        shard_model(model, unit_modules=[model[0]], sync_module_states=True)
    return str(caught.value)


def test_parameters_that_one_rank_lacks_are_named() -> None:
    for told in run_ranks(shard_another_model, 2):
        assert "rank 0 has [no further parameter], but rank 1 has [2.weight (8, 8)]" in told


MORE = ("more batches", "more micro-batches")


@pytest.mark.parametrize("kind", KINDS)
def test_lost_step(kind: str, tmp_path: Path) -> None:
    check(kind, 0, "FULL_SHARD", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (kind, strategy)
        for kind in KINDS
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        if kind not in MORE or strategy != "NO_SHARD"  # which gathers nothing: its ranks learn by the time-out
    ],
)
def test_lost_step_anywhere(kind: str, seed: int, strategy: str, tmp_path: Path) -> None:
    check(kind, seed, strategy, tmp_path)


class OwnRates(torch.optim.SGD):
    """Its learning rate is None between steps: Transformers' Adafactor makes its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] = None
        return loss


def run_without_rates() -> list[float]:
    model: Any = Net()
    model = shard_model(model, unit_modules=list(model.layers))
    optimizer = OwnRates(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, WIDTH), [0, 1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_learning_rates_that_are_none() -> None:
    one, other = run_ranks(run_without_rates, 2)
    assert one == other and len(set(one)) == 3


def run_with_rates_in_tensors() -> str:
    """Each rank has another learning rate from the second step on, in a tensor."""
    model: Any = Net()
    model = shard_model(model, unit_modules=list(model.layers))
    rate = torch.tensor(0.125)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    for step in range(3):
        try:
            model(torch.ones(2, WIDTH), [0, 1]).square().mean().backward()
        except CommunicationError as error:
            return f"{step}: {error}"
        optimizer.step()
        optimizer.zero_grad()
        rate.fill_(0.25 * (1 + rank_and_size()[0]))
    return ""


def run_with_another_optimizer() -> None:
    """The first one is dropped as a part of a cycle, and on rank 0 alone collected."""
    model: Any = Net()
    model = shard_model(model, unit_modules=list(model.layers))
    gc.collect()
    gc.disable()
    for rate in (0.1, 0.2):
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate)
        optimizer.itself = optimizer
        for _ in range(2):
            model(torch.ones(2, WIDTH), [0, 1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        del optimizer
        if rank_and_size()[0] == 0:
            gc.collect()
    gc.enable()


def test_a_dropped_optimizer_has_no_learning_rate() -> None:
    run_ranks(run_with_another_optimizer, 2)


def test_learning_rates_in_tensors_are_compared() -> None:
    expected = r"1: ranks disagree about step 2 .*rank 0 has \[learning rates \[0\.25\]\], but rank 1 has .*\[0\.5\]"
    for found in run_ranks(run_with_rates_in_tensors, 2):
        assert re.match(expected, found), found


@soon
def lose_step_in_a_part(kind: str) -> tuple[str, list[int]]:
    """Of three ranks the last two train, as the last stage of a pipeline would; rank 2 does something else."""
    rank, _ = rank_and_size()
    mesh = DeviceMesh("cpu", [1, 2])
    if rank == 0:
        return "", []
    model: Any = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_replica_check("raise", every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    odd = rank == 2
    try:
        for step in range(3):
            if step == 2 and odd and kind == "learning rate":
                optimizer.param_groups[0]["lr"] = 0.2
            inputs = torch.full((2, WIDTH), float("nan") if step == 2 and odd and kind == "NaN" else 1.0)
            model(inputs, [1, 0] if step == 2 and odd and kind == "order" else [0, 1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except FullshardError as error:
        return str(error), [pace.rank for pace in model.rank_paces()]
    return "", []


WAITS = "waits in (unit '.*'|the outermost unit), unshard" + LINE.format("lose_step_in_a_part")
NAMED = {
    "order": "ranks are out of step: " + "; ".join(rf"rank {rank} \(.*\) {WAITS}, called from .*" for rank in (1, 2)),
    "learning rate": r"rank 1 has \[learning rates \[0.1\]\], but rank 2 has \[learning rates \[0.2\]\]",
    "NaN": r"rank 1, step 3 of this process: gradients are not finite: layers.1.weight \(NaN\), "
    r"layers.0.weight \(NaN\), layers.1.bias \(NaN\) and 1 more; they came from rank 2",
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_rank_is_named_as_the_job_numbers_it(kind: str) -> None:
    """Not by its place in the mesh that its model is sharded over."""
    _, (first, paces), (second, _) = run_ranks(lose_step_in_a_part, 3, kind)
    assert re.search(NAMED[kind], first) and "rank 1" in first and second
    assert paces == [1, 2]


def give_up_first() -> tuple[float, str]:
    """Rank 2 looks for the cause of the wait earlier than rank 1, and leaves its process group when it is told."""
    start = time.monotonic()
    with mock.patch.object(watchdog, "stall_seconds", lambda _: 6.0 if rank_and_size()[0] == 1 else 1.0):
        told, _ = lose_step_in_a_part("order")
    return time.monotonic() - start, told


def test_a_rank_that_has_given_up_ends_the_waits_of_others() -> None:
    """Also those in shared memory, which its closed connections do not end."""
    _, (waited, first), (_, second) = run_ranks(give_up_first, 3)
    assert waited < 30 and "ranks are out of step" in first and "ranks are out of step" in second, (waited, first)


class Heads(nn.Module):
    """Layers in reentrant checkpoints, and two heads that are units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.ModuleList()
        self.heads.extend(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return [head(x) for head in self.heads]


@soon
def leave_units_out_of_backward(kind: str, directory: str) -> tuple[str, float]:
    """On rank 1 the backward of the third step comes to fewer units than on rank 0."""
    is_odd = rank_and_size()[0] == 1
    model: Any = Heads()
    model = shard_model(model, unit_modules=[*model.layers, *model.heads])
    for step in range(3):
        is_less = is_odd and step == 2
        inputs = torch.ones(2, WIDTH, requires_grad=not (is_less and kind == "inputs"))
        first, second = model(inputs)
        loss = first.sum() if is_less and kind == "loss" else (first + second).sum()
        begin = time.monotonic()
        try:
            loss.backward()
        except CommunicationError as error:
            seconds = time.monotonic() - begin
            leave_together(directory)
            return f"{step}: {error}", seconds
    return "", 0.0


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("comm", ["auto", pytest.param("gloo", marks=pytest.mark.full)])
@pytest.mark.parametrize(("kind", "units"), [("inputs", "layers.1"), ("loss", "heads.1")])
def test_a_backward_that_leaves_units_out(
    kind: str, units: str, comm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    found = run_ranks(leave_units_out_of_backward, 2, kind, str(tmp_path))
    messages = " ".join(message for message, _ in found)
    assert f"waits in unit '{units}'" in messages and "ranks are out of step: rank 0 (" in messages, found
    assert all(message.startswith("2: ") and seconds < 20 for message, seconds in found), found


class Fails(torch.autograd.Function):
    """A function of the script's own.

    Attributes:
        after: seconds that this rank takes until it fails, in forward, too.
    """

    after = 0.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Fails.now()

    @classmethod
    def now(cls) -> NoReturn:
        time.sleep(cls.after)
        raise ArithmeticError("on this rank only")


class Failing(Net):
    """Raises in forward or in backward, if it is told to."""

    where = ""

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = super().forward(x, order[:2])
        if self.where == "a forward":
            Fails.now()
        x = super().forward(Fails.apply(x) if self.where == "a backward" else x, order[2:])
        return Fails.now() if self.where == "the end of a forward" else x


@soon
def go_on_alone(where: str, strategy: str, directory: str, slow_rank: int | None = None) -> str:
    """Rank 1, or both with a slow one, catches an error or leaves a backward out, and goes on with the next batch."""
    rank, _ = rank_and_size()
    model: Any = Failing()
    model = shard_model(model, unit_modules=list(model.layers), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = ""
    try:
        for step in range(4):
            odd = step == 2 and (rank == 1 or slow_rank is not None)
            model.where = where if odd else ""
            if step == 2:
                dist.barrier()
                WATCHDOG._asked = 6.0  # not before: a busy machine takes longer for the first steps
                Fails.after = 2.5 if rank == slow_rank else 0.0
            with contextlib.suppress(ArithmeticError):
                loss = model(torch.ones(2, WIDTH), list(range(LAYERS))).square().mean()
                if model.where != "no backward":
                    loss.backward()
                    optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        message = str(error)
    leave_together(directory)
    return message


FAILS = (
    r"rank \d, (unit '.*'|the outermost unit), .*: "
    r"rank 1 had an error in {} \(ArithmeticError\('on this rank only'\)\) that rank 0 did not"
)


@pytest.mark.parametrize(
    ("comm", "where", "strategy"),
    [
        ("auto", "a forward", "FULL_SHARD"),
        ("auto", "a backward", "FULL_SHARD"),
        *(
            pytest.param(comm, where, strategy, marks=pytest.mark.full)
            for comm, where, strategy in [("gloo", f"a {each}", "FULL_SHARD") for each in ("forward", "backward")]
            + [(comm, f"a {each}", "SHARD_GRAD_OP") for comm in ("auto", "gloo") for each in ("forward", "backward")]
        ),
    ],
)
def test_an_error_that_one_rank_catches(
    comm: str, where: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are told of it, long before their time is over: the others wait where this one does not come."""
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    for found in run_ranks(go_on_alone, 2, where, strategy, str(tmp_path)):
        assert re.match(FAILS.format(where), found), found
        assert "\nhint: see that error on its rank" in found and "fewer batches" not in found


def test_an_error_in_backward_that_one_rank_catches_where_nothing_is_gathered(tmp_path: Path) -> None:
    """Its next batch is added to what the others have for this one."""
    for found in run_ranks(go_on_alone, 2, "a backward", "NO_SHARD", str(tmp_path)):
        assert (
            "rank 0 has [errors in forward or backward: 0], but rank 1 has [errors in forward or backward: 1]" in found
        )


@pytest.mark.parametrize("comm", ["auto", pytest.param("gloo", marks=pytest.mark.full)])
def test_a_backward_that_one_rank_leaves_out(comm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a loss that is not finite."""
    monkeypatch.setenv("FULLSHARD_COMM", comm)
    found = run_ranks(go_on_alone, 2, "no backward", "FULL_SHARD", str(tmp_path))
    assert any(re.search(r"waits in unit 'layers.\d', .*; rank 1 .* waits in unit", message) for message in found), (
        found
    )
    assert all(found)


@pytest.mark.parametrize("where", ["a forward", pytest.param("a backward", marks=pytest.mark.full)])
def test_an_error_that_all_ranks_have_may_come_late_to_one(where: str, tmp_path: Path) -> None:
    """Who waits for that one in the next step sees that it has had no error so far."""
    assert run_ranks(go_on_alone, 2, where, "FULL_SHARD", str(tmp_path), 0) == ["", ""]


def begin_anew() -> float:
    """Rank 1 fails at the end of its forward, rank 0 in the loss; in what both do then, rank 1 is slow."""
    rank, _ = rank_and_size()
    Fails.after = 0.0
    for attempt in range(2):
        model: Any = Failing()
        model = shard_model(model, unit_modules=list(model.layers))
        for step in range(2):
            model.where = "the end of a forward" if (attempt, step, rank) == (0, 1, 1) else ""
            time.sleep(2.5 if (attempt, step, rank) == (1, 1, 1) else 0)
            with contextlib.suppress(ArithmeticError):
                loss = model(torch.ones(2, WIDTH), list(range(LAYERS))).square().mean()
                if (attempt, step) == (0, 1):
                    raise ArithmeticError("no memory for the loss")
                loss.backward()
        WATCHDOG._asked = 6.0
    return float(loss.detach())


def test_errors_in_different_places_are_over_for_the_next_model() -> None:
    """As for a batch size that is looked for: the ranks run out of memory together, and begin anew."""
    one, other = run_ranks(begin_anew, 2)
    assert one == other


COLLECTIVES: dict[str, Any] = {
    "the end of a barrier": lambda: ProcessState.start(device="cpu").barrier(),
    "gathering objects": lambda: collectives.gather(torch.ones(2)),
    "reducing tensors": lambda: collectives._reduce_tensor(torch.ones(2), "sum", 1.0),
    "sharing an object of rank 0": lambda: collectives.broadcast_object("something") if dist.get_rank() else None,
}


def fail_before(what: str, directory: str) -> str:
    """Rank 1, or rank 0 where others wait for what it has, catches an error in forward, and does not come."""
    rank, _ = rank_and_size()
    model: Any = Failing()
    model = shard_model(model, unit_modules=list(model.layers))
    fails = 0 if what == "sharing an object of rank 0" else 1
    for where in ("", "the end of a forward" if rank == fails else ""):
        model.where = where
        with contextlib.suppress(ArithmeticError):
            model(torch.ones(2, WIDTH), list(range(LAYERS)))
    message = ""
    try:
        if rank != fails:
            COLLECTIVES[what]()
    except CommunicationError as error:
        message = str(error)
    leave_together(directory)
    return message


@pytest.mark.parametrize(
    "what",
    [what if number < 1 else pytest.param(what, marks=pytest.mark.full) for number, what in enumerate(COLLECTIVES)],
)
def test_who_waits_in_a_collective_is_told_of_an_error(what: str, tmp_path: Path) -> None:
    """Long before the 60 s of its group are over."""
    begin = time.monotonic()
    found = run_ranks(fail_before, 2, what, str(tmp_path))
    waits = int(what == "sharing an object of rank 0")
    error = r"rank {} had an error in a forward \(ArithmeticError\('on this rank only'\)\) that rank {} did not have"
    assert re.match(f"rank {waits}, {what}: {error.format(1 - waits, waits)}", found[waits]), found
    assert time.monotonic() - begin < 40


def drop_late() -> None:
    """Backward fails on both ranks; on rank 0 a thread of autograd's holds it until the model is at rest again."""
    model: Any = Net()
    shard_model(model, unit_modules=list(model.layers))
    held: list[object] = []

    def fail(gradient: torch.Tensor) -> NoReturn:
        if rank_and_size()[0] == 0:
            held.append(units_of(model)[-1].schedule.backward._callback())
        raise ArithmeticError

    inputs = torch.ones(2, WIDTH, requires_grad=True)
    inputs.register_hook(fail)
    with contextlib.suppress(ArithmeticError):
        model(inputs, [0, 1]).sum().backward()
    model.reset_iter_state()
    held.clear()
    model(torch.ones(2, WIDTH), [0, 1]).sum().backward()


def test_a_failed_backward_counts_whenever_autograd_drops_it() -> None:
    run_ranks(drop_late, 2)
