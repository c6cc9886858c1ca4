"""What goes to the host and back: when, how many bytes, and as the planner says.

pytest tests/features/offload/test_offload_moves.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.comm.base import BufferSpec
from fullshard.comm.resized_buffer import ResizedBuffer
from fullshard.comm.torch_dist import Alone, completed
from fullshard.core.events import Event, EventKind
from fullshard.core.sizes import GIB
from fullshard.features import units_of, unsharded
from fullshard.features.offload.host import Host
from fullshard.features.packed_messages import PACKINGS
from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.host import many_page_locked_nbytes, page_locked_nbytes
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from tests.distributed import run_ranks
from tests.offload import BFLOAT16, CASES, DEPTH, POLICIES, SCHEDULED, SLOW_CASES, WIDTH, Case, Log, allowed
from tests.plan_check import PlanCheck

pytestmark = pytest.mark.usefixtures("rehearsed")


# -- what is moved, when, and how many bytes ----------------------------------------------------------------------

PLANS: dict[str, dict[str, Any]] = {
    "everything": {"offload": True},
    "main weights": {"offload_main_weights": True},
    "optimizer state": {"offload_optimizer_state": True},
    "frozen": {"offload_compute_shards": True},
    "frozen and optimizer state": {"offload_compute_shards": True, "offload_optimizer_state": True},
}


def planned_and_found(case: Case, name: str) -> list[str]:
    """What differs between the engine's third step and the planner's."""
    model = case.model(POLICIES[name])
    optimizer = case.optimizer_of(model)
    kind = {"AdamW": "adamw", "fused": "adamw-fused", "SGD": "sgd-momentum"}[case.optimizer]
    settings = {"strategy": case.strategy, "shard_size": case.shard_size, "accumulation": case.micro_batches}
    check = PlanCheck(model, optimizer, Job.of({**settings, "optimizer": kind, **PLANS[name]}))
    for step in range(3):
        case.backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    moved = [d for d in check.report() if d.category.startswith("copied") and d.found]
    assert moved, "nothing was moved"
    return [str(difference) for difference in check.report() if not difference.is_as_planned]


def all_planned_and_found(case: Case) -> dict[str, list[str]]:
    return {name: planned_and_found(case, name) for name in allowed(case)}


@pytest.mark.parametrize("name", ["frozen", *(pytest.param(n, marks=pytest.mark.full) for n in SCHEDULED)])
def test_the_planner_knows_every_move(name: str) -> None:
    """Events, one by one, and bytes either way, on every rank: the last owns padding instead of elements."""
    case = {**CASES, **SLOW_CASES}[name]
    for found in run_ranks(all_planned_and_found, 3 if case.shard_size is None else 4, case):
        assert not any(found.values()), found


def moves(case: Case, name: str) -> tuple[list[str], dict[str, int]]:
    """The second step's moves in words, and the size of each layer's shards."""
    events: list[Event] = []
    model = case.model(POLICIES[name], event_sink=events.append)
    optimizer = case.optimizer_of(model)
    for step in range(2):
        events.clear()
        case.backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    said = [
        f"{event.kind} {event.what} {event.unit.removeprefix('layers.') or 'root'}.{event.bucket}: {event.nbytes}"
        if event.what
        else f"{event.kind} {event.unit.removeprefix('layers.') or 'root'}"
        for event in events
    ]
    shards = {b.owner.name or "root": b.layout.shard_numel for unit in units_of(model) for b in unit.buckets}
    return said, shards


def added_early(name: str) -> set[bool]:
    """Return whether a second backward would add to main gradients before its end."""
    case = Case(BFLOAT16)
    model = case.model(POLICIES[name])
    case.backward(model, 0)
    return {b.gradient.adds_early for unit in units_of(model) for b in unit.buckets if b.has_gradient}


def test_gradients_on_the_host_are_added_to_when_backward_has_launched_everything() -> None:
    assert run_ranks(added_early, 2, "main weights") == [{False}] * 2
    assert run_ranks(added_early, 2, "optimizer state") == [{True}] * 2


def test_compute_shards_are_copied_with_the_gather_and_gradients_while_backward_goes_on() -> None:
    """In half precision two bytes per element go to the device, twice, and four come back, once."""
    said, shards = run_ranks(moves, 2, Case(BFLOAT16, optimizer="fused"), "everything")[0]
    layer, root = 2 * shards["layers.0"], 2 * shards["root"]
    copies = [line for line in said if line.startswith("to_")]
    assert copies == [
        f"to_device compute shard root.0: {root}",
        *(f"to_device compute shard {index}.0: {layer}" for index in range(DEPTH)),
        *(f"to_device compute shard {index}.0: {layer}" for index in reversed(range(1, DEPTH))),
        f"to_device compute shard 0.0: {layer}",
        # each gradient once the next one is on its way to be reduced
        *(f"to_host gradient {index}.0: {2 * layer}" for index in reversed(range(DEPTH))),
        f"to_host gradient root.0: {2 * root}",
    ], copies
    for index in range(DEPTH):
        at = said.index(f"to_device compute shard {index}.0: {layer}")
        assert said[at - 1] == f"unshard_issued {index}"
    ahead = said.index(f"to_device compute shard 1.0: {layer}")
    assert ahead < said.index("forward_begin 0"), "copied while the layer before it runs"
    assert said.index(f"to_host gradient 2.0: {2 * layer}") < said.index("backward_begin 0"), "beside backward"


def test_compute_shards_on_the_device_are_made_anew_once_per_step() -> None:
    said, shards = run_ranks(moves, 2, Case(BFLOAT16, micro_batches=2), "main weights")[0]
    copies = [line for line in said if line.startswith("to_device")]
    assert sorted(copies) == sorted(
        f"to_device compute shard {name.removeprefix('layers.')}.0: {2 * numel}" for name, numel in shards.items()
    )
    assert len([line for line in said if line.startswith("to_host gradient")]) == 2 * (DEPTH + 1)


def test_state_visits_the_device_for_the_step() -> None:
    said, _ = run_ranks(moves, 2, Case(), "optimizer state")[0]
    step = said.index("optimizer_step root")
    moved = [line for line in said if line.startswith("to_")]
    assert [line.split()[0] for line in moved] == ["to_device"] * (DEPTH + 1) + ["to_host"] * (DEPTH + 1)
    assert said[step - DEPTH - 1 : step] == moved[: DEPTH + 1]
    assert all(line.startswith("to_host") for line in said[step + 1 :])


# -- the plan, and the order of streams ---------------------------------------------------------------------------


def test_what_a_page_locked_buffer_takes() -> None:
    """1.25 GiB took 2.00 on an H200."""
    found = [page_locked_nbytes(nbytes) for nbytes in (0, 1, 3, GIB, GIB + 1, 5 * GIB // 4)]
    assert found == [0, 1, 4, GIB, 2 * GIB, 2 * GIB]


def test_the_plan_has_host_and_device_apart() -> None:
    """Llama-3.1-8B in bf16 with AdamW over 8 devices: S elements each; the layers are gathered twice, the root once.

    What travels is page-locked on the host, one buffer after the other: weights, gradients of two micro-batches.
    """
    model, _ = load_model("Llama-3.1-8B")
    cluster = parse_cluster("8xA100")

    def planned(**settings: Any) -> Any:
        return evaluate(model, Job.of({"optimizer": "adamw-fused", "accumulation": 3, **settings}), cluster)

    numel, root = model.numel / 8, model.root.numel / 8
    shards = [bucket.layout.shard_numel for bucket in planned().setting.layout.buckets]
    halves, floats = (sum(page_locked_nbytes(width * shard) for shard in shards) for width in (2, 4))
    assert 2 * numel < halves < 4 * numel
    expected = {
        # settings: (bytes that stay on the device, on a host of 8, copied to the device, and back), in elements
        "": (12 * numel, 0, 0, 0),
        "offload": (0, 8 * (halves + 3 * floats + 8 * numel), 3 * 2 * (2 * numel - root), 3 * 4 * numel),
        "offload_main_weights": (2 * numel, 8 * (3 * floats + 8 * numel), 2 * numel, 3 * 4 * numel),
        "offload_optimizer_state": (4 * numel, 8 * many_page_locked_nbytes(round(8 * numel)), 8 * numel, 8 * numel),
    }
    for switch, (device, host, there, back) in expected.items():
        plan = planned(**({switch: True} if switch else {}))
        found = (plan.memory.persistent, plan.memory.host_steady, *copied_nbytes(plan))
        assert found == pytest.approx((device, host, there, back), rel=2e-3, abs=1), switch
    peaks = {switch: planned(**({switch: True} if switch else {})).memory for switch in expected}
    step, visited = (planned(accumulation=1, offload_optimizer_state=wanted).memory for wanted in (False, True))
    assert sum(visited.phases["optimizer"].values()) == sum(step.phases["optimizer"].values()), "it visits the device"
    # What is left of gradients is the two on their way.
    assert peaks[""].peak_of_step - peaks["offload"].peak_of_step > 15 * numel


def copied_nbytes(plan: Any) -> tuple[int, int]:
    return plan.traffic.to_device_nbytes, plan.traffic.to_host_nbytes


def test_a_frozen_base_on_the_host_leaves_the_adapters_on_the_device() -> None:
    model, _ = load_model("Llama-3.1-8B")
    plain, frozen = (
        evaluate(model, Job.of({"method": "qlora", **more}), parse_cluster("2xA100"))
        for more in ({}, {"offload_compute_shards": True})
    )
    kept = ("main weights", "optimizer state")
    on_device = [{name: plan.memory.phases["load"][name] for name in kept} for plan in (plain, frozen)]
    assert on_device[0] == on_device[1]
    assert frozen.memory.persistent == sum(on_device[1].values())
    base = plain.memory.persistent - frozen.memory.persistent
    assert base > 0.5 * 0.5 * model.numel, "half a byte per element, over two ranks"
    assert frozen.traffic.to_host_nbytes == 0 < base < frozen.traffic.to_device_nbytes <= 2 * base


def test_streams_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an accelerator is told, in which order; what it makes of it is in test_offload_gpu.py."""
    log = Log()
    monkeypatch.setattr(torch, "Stream", lambda _: log.stream(next(log.names)))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: log.computing)
    host = Host(torch.device("cuda"), pins=False, overlaps=True)
    full, main = torch.empty(4), torch.arange(4.0)
    with host.copying_to_device():
        work = host.arriving(completed(full.copy_(main)))
    work.wait()
    assert log.said == [
        "to device waits for computing",  # what used the memory before
        "onto to device",
        "to device records",
        "off to device",
        "computing waits for the event of to device",
    ]
    log.said.clear()
    leaving = [host.send(completed(torch.full((4,), float(i)))) for i in range(2)]
    sent = ["to host waits for computing", "onto to host", "off to host", "to host records"]
    assert log.said == [*sent, *sent, "computing waits for the event of to host"]  # before the first is freed
    log.said.clear()
    assert [work.wait()[0].item() for work in leaving] == [0.0, 1.0]
    waits = "the host waits for the event of to host"
    assert log.said == [waits, "computing waits for the event of to host", waits]
    log.said.clear()
    host.settle()
    host.settle()  # once is enough
    assert log.said == ["the host waits for the event of to device"]


@pytest.mark.parametrize("packing", [None, torch.int8, torch.bfloat16])
@pytest.mark.parametrize("pins", [True, False])
def test_page_locked_memory_is_read_beside_the_host(
    pins: bool, packing: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy does not block. Packed, it is the weights that are copied, once, and packed on the device."""
    main = torch.arange(512.0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda *_: pins)  # without an accelerator nothing is
    packs = None if packing is None else PACKINGS[packing]
    buffer = ResizedBuffer(
        Alone(), BufferSpec(512, torch.float32, torch.device("meta"), holds_main=False, packing=packs)
    )
    said: list[bool] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is torch.ops.aten._to_copy.default and not args[0].is_meta:
                said.append(bool(kwargs.get("non_blocking")))
            if function is torch.ops.aten.copy_.default and not args[1].is_meta:
                said.append(bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
            return function(*args, **kwargs)

    with Copies():
        buffer.gather(main, tag=0).wait()
        buffer.gather(main, tag=0, exactly=True).wait()
    assert said == [pins, pins]


@pytest.mark.parametrize("name", ["everything", "main weights", "frozen"])
def test_nobody_reads_the_host_once_weights_may_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a forward, with or without gradients, a backward and `unsharded()`, and before a load changes them."""
    case = CASES["frozen"]
    reads: list[str] = []
    read = 0

    def note(event: Event) -> None:
        nonlocal read
        if event.kind is EventKind.TO_DEVICE and event.what == "compute shard":
            reads.append(event.unit)
            read += 1

    model = case.model(POLICIES[name], event_sink=note)
    monkeypatch.setattr(Host, "settle", lambda _: reads.clear())
    optimizer = case.optimizer_of(model)
    x = torch.randn(4, WIDTH)
    for step in range(2):
        case.backward(model, step)
        assert reads == []
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        assert reads == []
        loss = model(x)
        assert reads == []
        loss.sum().backward()
        with unsharded(model):
            pass
        assert reads == []
        units_of(model)[0].issue_unshard()
        model.load_state_dict(model.state_dict())
        assert reads == []
    assert read


# -- as a user asks for it ----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--cpu-offload", "--offload-main-weights", "--offload-optimizer-state"])
def test_the_recipe_offloads(flag: str, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("one and two and three and " * 2000, encoding="utf-8")
    settings = {
        **{
            "nproc": 2,
            "device": "cpu",
            "data": tmp_path / "data.txt",
            "output-dir": tmp_path / "out",
            "vocab-size": 320,
        },
        **{"steps": 4, "batch-size": 2, "seq-len": 32, "precision": "bf16", "save-every": 0, "sample-tokens": 0},
    }
    options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    code = "from fullshard.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", flag, "--no-plot", "--no-export", *options],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "on the host, " in said, said
