"""Shards on the host: training is bit for bit what it is without. What is moved: test_offload_moves.py.

On a CPU host and device are one; `FULLSHARD_OFFLOAD=rehearse` makes the host further memory, and everything else is as
on any other device. On an accelerator: `pytest tests/features/offload/test_offload_gpu.py`.

    pytest tests/features/offload/test_offload.py            # the quick ones: -m "not full"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.config.switches import OFFLOAD
from fullshard.core.errors import ConfigError
from fullshard.core.events import Event
from fullshard.core.offload import Offload
from fullshard.features import (
    CPUOffloadPolicy,
    OffloadPolicy,
    ShardedParameter,
    clip_grad_norm_,
    describe,
    shard_model,
    units_of,
    unsharded,
)
from fullshard.plan.buckets import CountedBucket
from tests.differential import compare, gradients, optimizer_state, parameters
from tests.distributed import run_ranks
from tests.offload import BFLOAT16, CASES, POLICIES, SLOW_CASES, STEPS, WIDTH, Case, Model, allowed

pytestmark = pytest.mark.usefixtures("rehearsed")


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


def bytes_per_element() -> dict[str, tuple[float, float]]:
    found = {}
    for name in ("optimizer state", "main weights", "everything"):
        buckets = [bucket for unit in units_of(Case(BFLOAT16).model(POLICIES[name])) for bucket in unit.buckets]
        numel = sum(bucket.layout.shard_numel for bucket in buckets)
        found[name] = (
            sum(
                b.compute_shard.nbytes
                for b in buckets
                if b.compute_shard is not b.main and not b.plan.is_gathered_from_host
            )
            / numel,
            sum(sum(CountedBucket.like(bucket.plan).host_buffers) for bucket in buckets) / numel,
        )
    return found


def test_what_lasts_besides_main_weights_and_what_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bfloat16: what is gathered from is a copy where main weights are not, on the device or beside them."""
    monkeypatch.setenv("FULLSHARD_COMM", "gloo")
    expected = {"optimizer state": (0, 0), "main weights": (2, 4), "everything": (0, 6)}
    assert run_ranks(bytes_per_element, 2) == [expected] * 2


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
    torch.manual_seed(12)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
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


# -- a quantized base ---------------------------------------------------------------------------------------------


def quantized(name: str | None) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Three steps on a 4-bit base: losses and adapters; of each copy of a frozen bucket, its bytes and elements."""
    from tests.features.quantized_weights import test_quantized as four_bits

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


def quantized_alike() -> dict[str, tuple[bool, bool, int]]:
    plain, _ = quantized(None)
    found = {}
    for name in POLICIES:
        values, copied = quantized(name)
        found[name] = same(values, plain), all(nbytes == numel for nbytes, numel in copied), len(copied)
    return found


@pytest.mark.full
def test_a_quantized_base_is_gathered_from_the_host_as_the_bytes_it_is() -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    for found in run_ranks(quantized_alike, 2):
        assert all(alike and as_bytes for alike, as_bytes, _ in found.values()), found
        moved = {name: copies > 0 for name, (_, _, copies) in found.items()}
        assert moved == {name: policy.compute_shards for name, policy in POLICIES.items()}


# -- what is refused, and what is said ----------------------------------------------------------------------------


def test_a_state_apart_from_its_main_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="an update needs both in one place"):
        OffloadPolicy(main_weights=True, optimizer_state=False)


def test_compute_shards_alone_need_something_frozen() -> None:
    with pytest.raises(ConfigError, match="gathered from main weights, and no parameter is frozen"):
        Case().model(OffloadPolicy(compute_shards=True))


def test_an_unknown_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OFFLOAD.name, "sometimes")
    with pytest.raises(ConfigError, match="FULLSHARD_OFFLOAD has the invalid value 'sometimes'"):
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
    monkeypatch.delenv(OFFLOAD.name)  # a CPU is the host itself
    assert not describe(Case().model(policy)).offload
