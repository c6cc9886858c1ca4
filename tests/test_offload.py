"""Shards on the host: training is bit for bit what it is without, and what is moved is recorded.

On a CPU host and device are one; `FULLSHARD_OFFLOAD=rehearse` makes the host further memory, and everything else is as
on any other device. On an accelerator: `pytest tests/test_offload_gpu.py`.

    pytest tests/test_offload.py            # the quick ones: -m "not full"
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

from fullshard.api.plan_check import PlanCheck
from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.comm.torch_dist import Done
from fullshard.core.errors import ConfigError
from fullshard.core.events import Event
from fullshard.core.offload import Offload
from fullshard.engine import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedParameter,
    clip_grad_norm_,
    describe,
    shard_model,
    units_of,
    unsharded,
)
from fullshard.engine.offload import SWITCH, Host
from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from tests.differential import compare, gradients, optimizer_state, parameters
from tests.distributed import run_ranks

WIDTH, DEPTH, STEPS = 48, 3, 3

POLICIES: dict[str, OffloadPolicy] = {
    "everything": CPUOffloadPolicy(),
    "main weights": OffloadPolicy(main_weights=True),
    "optimizer state": OffloadPolicy(optimizer_state=True),
    "frozen": OffloadPolicy(compute_shards=True),
    "frozen and optimizer state": OffloadPolicy(compute_shards=True, optimizer_state=True),
}

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "rehearse")


class Layer(nn.Module):
    """A product that is trained, beside one that may be frozen, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7, bias=False), nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.base(x)) + self.down(self.up(x))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Case:
    """What to train, apart from where shards are."""

    policy: MixedPrecisionPolicy | None = None
    is_frozen: bool = False
    micro_batches: int = 1
    strategy: str = "FULL_SHARD"
    shard_size: int | None = None
    dtype: torch.dtype = torch.float32
    optimizer: str = "AdamW"

    def model(self, offload: OffloadPolicy | None, **arguments: Any) -> nn.Module:
        torch.manual_seed(3)
        model = Model().to(self.dtype)
        if self.is_frozen:
            for layer in model.layers:
                layer.base.requires_grad_(False)
        arguments = {"strategy": self.strategy, "shard_size": self.shard_size, **arguments}
        return shard_model(
            model, unit_modules=list(model.layers), mp_policy=self.policy, offload_policy=offload, **arguments
        )

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "SGD":
            return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(trained, lr=0.01, fused=self.optimizer == "fused")

    def backward(self, model: nn.Module, step: int) -> torch.Tensor:
        loss = torch.zeros(())
        for micro_batch in range(self.micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + 1)
            x = torch.randn(4, WIDTH, generator=generator, dtype=self.dtype)
            loss = model(x).float().square().mean()
            loss.backward()
        return loss.detach()


def allowed(case: Case) -> list[str]:
    """What is refused is not trained: of trainable parameters there are no compute shards apart."""
    return [name for name in POLICIES if case.is_frozen or "frozen" not in name]


def trained(case: Case, offload: OffloadPolicy | None) -> dict[str, dict[Any, torch.Tensor | None]]:
    model = case.model(offload)
    optimizer = case.optimizer_of(model)
    record: dict[str, dict[Any, torch.Tensor | None]] = {"losses": {}, "norms": {}, "gradients": {}}
    for step in range(STEPS):
        record["losses"][step] = case.backward(model, step)
        record["norms"][step] = clip_grad_norm_(model, 0.05)
        record["gradients"] |= {f"{step}.{name}": value for name, value in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), unsharded(model):
        record["whole"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    record["parameters"] = parameters(model)
    record["state"] = optimizer_state(model, optimizer)
    return record


def differences(case: Case, policies: list[str]) -> dict[str, float]:
    plain = trained(case, None)
    found = {}
    for name in policies:
        for kind, value in compare(trained(case, POLICIES[name]), plain).items():
            found[f"{name}: {kind}"] = value
    return found


CASES = {
    "float32": Case(micro_batches=2),
    "bfloat16": Case(BFLOAT16, optimizer="fused"),
    "frozen": Case(BFLOAT16, is_frozen=True, micro_batches=2),
}
SLOW_CASES = {
    "hybrid": Case(BFLOAT16, strategy="HYBRID_SHARD", shard_size=2, micro_batches=2),
    "kept": Case(strategy="SHARD_GRAD_OP", micro_batches=2),
    "stored in bfloat16": Case(dtype=torch.bfloat16, is_frozen=True),
    "momentum": Case(BFLOAT16, optimizer="SGD"),
    "packed": Case(MixedPrecisionPolicy(gather_as=torch.int8, reduce_as=torch.bfloat16), micro_batches=2),
    "one rank's dtype": Case(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)),
}


SCHEDULED = [name for name in (*CASES, *SLOW_CASES) if name not in ("frozen", "stored in bfloat16")]
"""Gradients and state of what is stored in half precision the planner takes for float32, wherever they are."""


@pytest.mark.parametrize("name", CASES)
def test_training_is_bitwise_the_same(name: str) -> None:
    for found in run_ranks(differences, 2, CASES[name], allowed(CASES[name])):
        assert set(found.values()) == {0.0}, {key: value for key, value in found.items() if value}


@pytest.mark.full
@pytest.mark.parametrize("comm", ["", "gloo"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", [*CASES, *SLOW_CASES])
def test_training_is_bitwise_the_same_everywhere(
    name: str, world_size: int, comm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {**CASES, **SLOW_CASES}[name]
    if case.shard_size is not None and case.shard_size >= world_size:
        case = Case(**{**case.__dict__, "shard_size": 1})
    if comm:
        monkeypatch.setenv("FULLSHARD_COMM", comm)
    for found in run_ranks(differences, world_size, case, allowed(case)):
        assert set(found.values()) == {0.0}, {key: value for key, value in found.items() if value}


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
    shards = {b.unit.name or "root": b.layout.shard_numel for unit in units_of(model) for b in unit.buckets}
    return said, shards


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


# -- main weights may change in any way ---------------------------------------------------------------------------


def changed_outputs(name: str | None) -> list[torch.Tensor]:
    """What the model computes after each of several ways to change its weights."""
    case = Case(BFLOAT16)
    model = case.model(None if name is None else POLICIES[name])
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(5))
    outputs = []

    def run() -> None:
        with torch.no_grad():
            outputs.append(model(x))

    run()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    run()
    for parameter in model.parameters():
        parameter.data.add_(0.25)
    run()
    model.float().to("cpu")  # which changes nothing
    torch.manual_seed(11)
    model.load_state_dict(Model().state_dict())
    run()
    with torch.no_grad(), unsharded(model, writeback=True):
        for parameter in model.parameters():
            parameter.mul_(0.5)
    run()
    with unsharded(model), torch.no_grad():
        outputs.append(model(x))
    whole = [p.full_tensor() for p in model.parameters() if isinstance(p, ShardedParameter)]
    return outputs + whole


def changed_alike() -> list[str]:
    plain = changed_outputs(None)
    return [name for name in ("everything", "main weights") if not same(changed_outputs(name), plain)]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def test_compute_shards_follow_every_change_of_main_weights() -> None:
    assert run_ranks(changed_alike, 2) == [[], []]


# -- loss scaling and checkpoints ---------------------------------------------------------------------------------


def overflowing(name: str | None) -> list[torch.Tensor]:
    """Two steps with a scaled loss, which overflows on one rank in the first."""
    case = Case(optimizer="fused")
    model = case.model(None if name is None else POLICIES[name])
    optimizer, scaler = case.optimizer_of(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.full_tensor() for p in sharded(model)]
    for step in range(2):
        loss = model(torch.full((2, WIDTH), float(step + 1))).square().mean()
        scaler.scale(loss * (float("inf") if step == 0 and dist.get_rank() == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 0:
            assert same([p.full_tensor() for p in sharded(model)], before), "the step was not skipped"
    return [p.full_tensor() for p in sharded(model)] + [torch.tensor(scaler.get_scale())]


def sharded(model: nn.Module) -> list[ShardedParameter]:
    return [p for p in model.parameters() if isinstance(p, ShardedParameter)]


def scaled_alike() -> list[str]:
    plain = overflowing(None)
    return [name for name in POLICIES if "frozen" not in name and not same(overflowing(name), plain)]


@pytest.mark.full
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    assert run_ranks(scaled_alike, 2) == [[], []]


def resumed(directory: str, saved_with: str | None, loaded_with: str | None) -> bool:
    """Four steps in one go, and two saved and resumed: the same losses and parameters."""
    case = Case(BFLOAT16, is_frozen=True)

    def make(name: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = case.model(None if name is None else POLICIES[name])
        return model, case.optimizer_of(model)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            case.backward(model, step)
            optimizer.step()
            optimizer.zero_grad()

    whole = make(saved_with)
    run(*whole, range(2))
    save_checkpoint(directory, model=whole[0], optimizer=whole[1])
    run(*whole, range(2, 4))
    again = make(loaded_with)
    load_checkpoint(directory, model=again[0], optimizer=again[1])
    run(*again, range(2, 4))
    return all(d == 0 for d in compare({"p": parameters(again[0])}, {"p": parameters(whole[0])}).values())


@pytest.mark.full
@pytest.mark.parametrize("saved_with", [None, *POLICIES])
def test_checkpoints_do_not_care_where_shards_are(saved_with: str | None, tmp_path: Path) -> None:
    for number, loaded_with in enumerate((None, "everything", "optimizer state")):
        assert all(run_ranks(resumed, 2, str(tmp_path / str(number)), saved_with, loaded_with))


# -- a quantised base ---------------------------------------------------------------------------------------------


def quantised(name: str | None) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Three steps on a 4-bit base: losses and adapters; of each copy of a frozen bucket, its bytes and elements."""
    from tests import test_quantized as four_bits

    model = four_bits.build(four_bits.FourBits())
    policy = None if name is None else POLICIES[name]
    events: list[Event] = []
    shard_model(
        model,
        unit_modules=list(model),
        offload_policy=policy,
        device=torch.device("cpu"),
        event_sink=events.append,
    )
    optimizer = torch.optim.AdamW(four_bits.trainable(model), lr=1e-2)
    found = []
    for step in range(3):
        loss = model(four_bits.batch(dist.get_rank(), step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    buckets = {(unit.name, number): b for unit in units_of(model) for number, b in enumerate(unit.buckets)}
    copied = [
        (event.nbytes, bucket.layout.shard_numel)
        for event in events
        if event.what == "compute shard" and (bucket := buckets[event.unit, event.bucket]).dtype is torch.uint8
    ]
    return found + [p.full_tensor() for p in sharded(model)], copied


def quantised_alike() -> dict[str, tuple[bool, bool, int]]:
    plain, _ = quantised(None)
    found = {}
    for name in POLICIES:
        values, copied = quantised(name)
        found[name] = same(values, plain), all(nbytes == numel for nbytes, numel in copied), len(copied)
    return found


@pytest.mark.full
def test_a_quantised_base_is_gathered_from_the_host_as_the_bytes_it_is() -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    for found in run_ranks(quantised_alike, 2):
        assert all(alike and as_bytes for alike, as_bytes, _ in found.values()), found
        moved = {name: copies > 0 for name, (_, _, copies) in found.items()}
        assert moved == {name: policy.compute_shards for name, policy in POLICIES.items()}


# -- the plan, and the order of streams ---------------------------------------------------------------------------


def test_the_plan_has_host_and_device_apart() -> None:
    """Llama-3.1-8B in bf16 with AdamW over 8 devices: S elements each; the layers are gathered twice, the root once."""
    model, _ = load_model("Llama-3.1-8B")
    cluster = parse_cluster("8xA100")

    def planned(**settings: Any) -> Any:
        return evaluate(model, Job.of({"optimizer": "adamw-fused", "accumulation": 3, **settings}), cluster)

    numel, root = model.numel / 8, model.root.numel / 8
    expected = {
        # settings: (bytes that stay on the device, on a host of 8, copied to the device, and back), in elements
        "": (12 * numel, 0, 0, 0),
        "offload": (0, 8 * (14 + 8) * numel, 3 * 2 * (2 * numel - root), 3 * 4 * numel),
        "offload_main_weights": (2 * numel, 8 * (12 + 8) * numel, 2 * numel, 3 * 4 * numel),
        "offload_optimizer_state": (4 * numel, 8 * 8 * numel, 8 * numel, 8 * numel),
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


STREAM = torch.Stream


class Log:
    """Stands in for an accelerator's streams, of which it keeps what they are told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.computing = self.stream("computing")
        self.names = iter(("to device", "to host"))

    def stream(self, name: str) -> Any:
        stream = create_autospec(STREAM, instance=True)
        stream.label = name
        stream.wait_stream.side_effect = lambda other: self.said.append(f"{name} waits for {other.label}")
        stream.wait_event.side_effect = lambda event: self.said.append(f"{name} waits for {event.label}")
        stream.synchronize.side_effect = lambda: self.said.append(f"the host waits for {name}")
        stream.__enter__ = lambda _: self.said.append(f"onto {name}")
        stream.__exit__ = lambda *_: self.said.append(f"off {name}")

        def record() -> Any:
            self.said.append(f"{name} records")
            event = create_autospec(torch.Event, instance=True)
            event.label = f"the event of {name}"
            event.synchronize.side_effect = lambda: self.said.append(f"the host waits for the event of {name}")
            return event

        stream.record_event.side_effect = record
        return stream


def test_streams_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an accelerator is told, in which order; what it makes of it is in tests/test_offload_gpu.py."""
    log = Log()
    monkeypatch.setattr(torch, "Stream", lambda _: log.stream(next(log.names)))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: log.computing)
    host = Host(torch.device("cuda"), pins=False, overlaps=True)
    full, main = torch.empty(4), torch.arange(4.0)
    with host.copying_to_device():
        work = host.arriving(Done(full.copy_(main)))
    work.wait()
    assert log.said == [
        "to device waits for computing",  # what used the memory before
        "onto to device",
        "to device records",
        "off to device",
        "computing waits for the event of to device",
    ]
    log.said.clear()
    leaving = [host.send(Done(torch.full((4,), float(i)))) for i in range(2)]
    sent = ["to host waits for computing", "onto to host", "off to host", "to host records"]
    assert log.said == [*sent, *sent, "computing waits for the event of to host"]  # before the first is freed
    log.said.clear()
    assert [work.wait()[0].item() for work in leaving] == [0.0, 1.0]
    waits = "the host waits for the event of to host"
    assert log.said == [waits, "computing waits for the event of to host", waits]
    log.said.clear()
    host.settle()
    assert log.said == ["the host waits for to device"]


# -- as a user asks for it ----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--cpu-offload", "--offload-main-weights", "--offload-optimizer-state"])
def test_the_recipe_keeps_to_its_plan(flag: str, tmp_path: Path) -> None:
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
        [sys.executable, "-c", code, "train", flag, "--check-plan", "--no-plot", "--no-export", *options],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "step 3: as planned" in said, said
    assert "copied to the device: planned" in said, said
    assert "on the host, " in said, said


# -- what is refused, and what is said ----------------------------------------------------------------------------


def test_a_state_apart_from_its_main_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="an update needs both in one place"):
        OffloadPolicy(main_weights=True, optimizer_state=False)


def test_compute_shards_alone_need_something_frozen() -> None:
    with pytest.raises(ConfigError, match="gathered from main weights, and none is frozen"):
        Case().model(OffloadPolicy(compute_shards=True))


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "sometimes")
    with pytest.raises(ConfigError, match="FULLSHARD_OFFLOAD = 'sometimes'"):
        Case().model(CPUOffloadPolicy())


@pytest.mark.parametrize(
    ("policy", "offload"),
    [
        (None, Offload()),
        (fsdp.OffloadPolicy(), Offload()),
        (fsdp.CPUOffloadPolicy(), Offload(True, True, True)),
        (OffloadPolicy(main_weights=True), Offload(False, True, True)),
    ],
)
def test_policies(policy: Any, offload: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Case().model(policy)
    sharding = describe(model)
    assert sharding.offload == offload
    assert ("on the host, " in str(sharding)) == bool(offload)
    assert sharding.host_nbytes == (sharding.rank_nbytes if offload.main_weights else 0)
    monkeypatch.delenv(SWITCH)  # a CPU is the host itself
    assert not describe(Case().model(policy)).offload
