"""`--auto` against every combination there is, tried one by one.

pytest tests/plan/test_plan_search.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import time
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from rich.console import Console

from fullshard.core.errors import ConfigError
from fullshard.plan.evaluate import MARGIN, Plan, changes_that_fit, evaluate
from fullshard.plan.hardware import DEVICES, Cluster, parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.report import front_table
from fullshard.plan.search import _SLACK, _Search, _turns, few_layers, search
from fullshard.plan.shapes import ModelShape

SITUATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "small, one host": ("GPT-2", "8xA100", {"seq_len": 512}),
    "small, no room": ("GPT-2-medium", "2xA10G", {"seq_len": 1024, "micro_batch": 2}),
    "small, two hosts": ("Qwen2.5-0.5B", "16xRTX4090", {"micro_batch": 4}),
    "adapters": ("Qwen2.5-0.5B", "2xRTX3090", {"method": "lora", "seq_len": 4096}),
    "7B, one host": ("Llama-2-7B", "8xA100-40", {}),
    "7B, many hosts": ("Llama-2-7B", "64xA100", {"micro_batch": 4, "seq_len": 4096}),
    "7B, little memory": ("Llama-2-7B", "8xRTX4090", {}),
    "8B, long": ("Llama-3.1-8B", "8xH100", {"seq_len": 32768}),
    "8B, compiled": ("Llama-3.1-8B", "8xH100", {"seq_len": 8192, "compile": True}),
    "7B in four bits": ("Llama-2-7B", "2xRTX3090", {"method": "qlora", "micro_batch": 4}),
    "mixture": ("Mixtral-8x7B", "64xH100", {"seq_len": 4096}),
    "70B": ("Llama-3.1-70B", "64xH100", {"micro_batch": 2, "seq_len": 4096}),
    "8B in four bits, one card": ("Llama-3.1-8B", "1xRTX4090", {"method": "qlora", "micro_batch": 4}),
    "8B, PCIe": ("Llama-3.1-8B", "8xL40S", {"seq_len": 4096}),
    "8B, very long": ("Llama-3.1-8B", "8xH100", {"seq_len": 131072}),
    "small experts": ("Qwen3-30B-A3B", "64xH100", {"seq_len": 4096}),
    "small experts in four bits": ("Qwen3-30B-A3B", "2xRTX4090", {"method": "lora", "quantize": "nf4-double"}),
    "experts as published": ("gpt-oss-20b", "2xRTX4090", {"method": "lora"}),
    "mixture, one host": ("Mixtral-8x7B", "8xH200", {"method": "lora"}),
    "7B, little host memory": ("Llama-2-7B", "8xRTX3090", {"seq_len": 1024}),
    "adapters, little host memory": ("Llama-3.1-8B", "4xRTX3090", {"method": "lora", "seq_len": 8192}),
}
QUICK = ("small, no room",)
WITH_WHAT_COSTS_NOTHING = ("small, one host", "small, no room", "small, two hosts", "adapters")
"""Where the other optimizer is tried, too, which is never faster: twice as many plans."""


def everything(
    model: ModelShape, job: Job, cluster: Cluster, *, tries_all: bool, fixed: Collection[str] = ()
) -> Iterator[Plan]:
    """Each combination that fits below the margin."""
    sizes = [2**power for power in range(1, 12) if 2**power < cluster.count]
    meshes: list[tuple[str, int | None]] = [(name, None) for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")]
    meshes += [(name, None) for name in ("SHARD_GRAD_OPTIMIZER", "SHARD_OPTIMIZER")]
    meshes += itertools.product(("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"), sizes)
    parts = ("offload_optimizer_state", "offload_main_weights", "offload")
    hosts: list[dict[str, Any]] = [{}, *({part: True} for part in parts)]
    hosts += [{**part, "offload_activations": True} for part in hosts]
    sequences = job.micro_batch * job.accumulation
    kinds, flags = ("none", "selective", "full"), (False, True)
    optimizers, losses = ("adamw", "adamw-fused") if tries_all else ("adamw-fused",), ("eager", "fused")
    for (
        strategy,
        shard_size,
    ), checkpointing, host, in_backward, embeddings, optimizer, loss, size in itertools.product(
        meshes, kinds, hosts, flags, flags, optimizers, losses, (1, 2, 4, 8, 16, 32, 64)
    ):
        if size > sequences > 1 or (checkpointing == "selective" and job.compile):
            continue
        values = {"strategy": strategy, "shard_size": shard_size, "checkpointing": checkpointing, "loss": loss, **host}
        values |= {"step_in_backward": in_backward, "wrap_embeddings": embeddings, "optimizer": optimizer}
        values |= {"micro_batch": size, "accumulation": max(1, sequences // size)}
        if any(values.get(name, False) != getattr(job, name) for name in fixed):
            continue
        try:
            plan = evaluate(model, Job.of({**job.model_dump(), **values}), cluster)
        except ConfigError:
            continue
        if plan.is_within(MARGIN):
            yield plan


def shortened(model_name: str, devices: str, job: Job) -> tuple[ModelShape, Cluster]:
    """A model of seven layers, and devices with less memory."""
    (model, _), cluster, layers = load_model(model_name), parse_cluster(devices), 7
    share = (model.numel - model.root.numel) * layers / len(model.blocks) / model.numel + model.root.numel / model.numel
    model = dataclasses.replace(model, units=(*model.units[:layers], model.root))
    # Of a very long sequence one layer alone needs most of it.
    memory = round(cluster.device.memory * (min(1.0, 2 * share) if job.seq_len < 2**17 else 1.0))
    host = round(cluster.device.host_memory * min(1.0, 2 * share))
    device = dataclasses.replace(cluster.device, memory=memory, host_memory=host)
    return model, dataclasses.replace(cluster, device=device)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in SITUATIONS]
)
def test_no_combination_is_faster(name: str) -> None:
    """Or better, by more than 2 %. Layers are taken away, so that there is time for thousands of plans."""
    model_name, devices, values = SITUATIONS[name]
    job = Job.of(values)
    model, cluster = shortened(model_name, devices, job)
    found = search(model, job, cluster)[0]
    plans = everything(model, job, cluster, tries_all=name in WITH_WHAT_COSTS_NOTHING)
    best = max(plans, key=lambda plan: plan.worth)
    speeds = found.worth, best.worth
    assert found.host_needed <= MARGIN * cluster.device.host_memory
    print(f"{name}: found {speeds[0]:.0f}, best {speeds[1]:.0f}: {best.job.model_dump(exclude_defaults=True)}")
    assert speeds[0] >= 0.98 * speeds[1]


def test_what_needs_no_host_memory_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is a quarter slower."""
    model, cluster = load_model("Llama-3.1-8B")[0], parse_cluster("2xRTX4090", None, 512 * 2**30)
    job = Job.of({"method": "qlora", "seq_len": 4096})
    preferred = search(model, job, cluster)[0]
    monkeypatch.setattr("fullshard.plan.evaluate._HOST_PREMIUM", 1.0)
    fastest = search(model, job, cluster)[0]
    assert fastest.setting.on_host and not preferred.setting.on_host
    assert 1 < fastest.time.tokens_per_second / preferred.time.tokens_per_second < 1.25


def test_no_host_is_overfull() -> None:
    big, cluster = load_model("Llama-3.1-70B")[0], parse_cluster("8xH100")
    found = search(big, Job.of({}), cluster)
    assert found[0].setting.on_host
    assert all(plan.host_needed <= MARGIN * cluster.device.host_memory for plan in found)
    assert search(load_model("Llama-3.1-8B")[0], Job.of({}), parse_cluster("4xRTX3090")) == []


HOSTS: dict[str, tuple[str, str, dict[str, Any], Collection[str]]] = {
    "one large micro-batch": (
        "Llama-2-7B",
        "2xRTX4090",
        {"micro_batch": 4, "seq_len": 4096, "checkpointing": "full", "loss": "fused", "wrap_embeddings": True},
        ("strategy", "checkpointing", "loss", "wrap_embeddings", "step_in_backward", "offload_activations"),
    ),
    "any micro-batch": ("Llama-3.1-8B", "4xRTX3090", {}, ("strategy",)),
    "four sequences": ("Llama-3.1-8B", "4xRTX3090", {"micro_batch": 4}, ("strategy", "step_in_backward")),
    "accumulation": ("Llama-2-7B", "8xRTX3090", {"accumulation": 8, "seq_len": 1024}, ("strategy", "loss")),
    "adapters": ("Qwen2.5-7B", "2xRTX3090", {"method": "lora", "seq_len": 8192, "micro_batch": 2}, ("strategy",)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if number else []) for number, name in enumerate(HOSTS)]
)
def test_what_fits_a_host_is_found(name: str) -> None:
    """With as much host memory as each of a few plans needs, no better one of those that fit is missed."""
    model_name, devices, values, fixed = HOSTS[name]
    job = Job.of({"optimizer": "adamw-fused", **values})
    model, cluster = shortened(model_name, devices, job)

    def with_host(nbytes: int) -> Cluster:
        return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, host_memory=nbytes))

    plans = list(everything(model, job, with_host(0), tries_all=False, fixed=fixed))
    needs = sorted({plan.host_needed for plan in plans})
    for needed in needs[:: max(1, len(needs) // 6)]:
        host = with_host(math.ceil(needed / MARGIN))
        best = max((plan for plan in plans if plan.host_needed <= needed), key=lambda plan: plan.worth)
        found = search(model, job, host, fixed=fixed)
        assert found and found[0].fits_host(MARGIN), f"{needed} bytes: {best.job.model_dump(exclude_defaults=True)}"
        assert found[0].worth >= 0.98 * best.worth, f"{needed} bytes: {best.job.model_dump(exclude_defaults=True)}"


@pytest.mark.parametrize(("batch", "sizes"), [({"micro_batch": 6}, {1, 2, 3, 6}), ({"accumulation": 5}, {1, 5})])
def test_the_number_of_sequences_stays(batch: dict[str, int], sizes: set[int]) -> None:
    """Also if it is not a power of two, and in what is proposed if nothing fits."""
    model, cluster = load_model("GPT-2")[0], parse_cluster("2xA10G")
    plans = search(model, Job.of(batch), cluster, fixed=batch)
    assert {plan.job.micro_batch * plan.job.accumulation for plan in plans} == {max(sizes)}
    assert {plan.job.micro_batch for plan in plans} <= sizes
    small = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory=7 * 2**30))
    too_large = evaluate(model, Job.of({"micro_batch": max(sizes), "checkpointing": "full"}), small)
    changes = changes_that_fit(too_large)
    assert changes
    assert {change.plan.job.micro_batch * change.plan.job.accumulation for change in changes} == {max(sizes)}


def test_a_micro_batch_of_one_can_be_asked_for() -> None:
    model, cluster = load_model("GPT-2")[0], parse_cluster("2xA10G")
    assert search(model, Job.of({}), cluster)[0].job.micro_batch > 1
    asked = search(model, Job.of({"micro_batch": 1}), cluster, fixed=("micro_batch",))
    assert asked and all(plan.job.micro_batch == plan.job.accumulation == 1 for plan in asked)


DIVIDED: dict[str, tuple[str, str, int]] = {
    "experts, many hosts": ("gpt-oss-120b", "64xH100", 8192),
    "small experts": ("Qwen3-30B-A3B", "16xH100", 4096),
    "64k": ("Llama-3.1-8B", "16xH100", 65536),
    "256k": ("Llama-3.1-8B", "8xH100", 262144),
    "experts, 128k": ("Qwen3-30B-A3B", "16xH200", 131072),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if number else []) for number, name in enumerate(DIVIDED)]
)
def test_no_groups_are_faster(name: str) -> None:
    """Every size of groups that share sequences and experts, one by one, with little else to choose."""
    model_name, devices, tokens = DIVIDED[name]
    fixed: dict[str, Any] = {"seq_len": tokens, "optimizer": "adamw-fused", "loss": "fused", "wrap_embeddings": True}
    fixed |= dict.fromkeys(("offload", "offload_main_weights", "offload_optimizer_state", "offload_activations"), False)
    fixed |= {"step_in_backward": False, "reshard_after_forward": "strategy"}
    job = Job.of(fixed)
    model, cluster = shortened(model_name, devices, job)
    found = search(model, job, cluster, fixed=fixed)[0]
    ranks = [2**power for power in range(7)]
    shared = [("cp", size) for size in ranks] + [("sp", size) for size in ranks[1:]]
    strategies, kinds = ("FULL_SHARD", "SHARD_GRAD_OP"), ("none", "selective", "full")
    best = 0.0
    for (axis, size), ep, strategy, kind, batch in itertools.product(shared, ranks, strategies, kinds, ranks):
        if (size == 1 or tokens >= 32768) and batch <= (size if size > 1 else 64):
            values = {axis: size, "ep": ep, "micro_batch": batch, "accumulation": size // batch if size > 1 else 1}
            with contextlib.suppress(ConfigError):
                plan = evaluate(
                    model, Job.of({**fixed, **values, "strategy": strategy, "checkpointing": kind}), cluster
                )
                best = max(best, plan.time.tokens_per_second if plan.is_within(MARGIN) else 0.0)
    print(f"{name}: found {found.time.tokens_per_second:.0f}, best {best:.0f}: {found.job.axes}")
    assert found.time.tokens_per_second >= 0.98 * best > 0


@pytest.mark.full
@pytest.mark.parametrize("name", SITUATIONS)
def test_it_answers_within_ten_seconds(name: str) -> None:
    """Of processor time, for the whole model."""
    model_name, devices, values = SITUATIONS[name]
    model, cluster, job = load_model(model_name)[0], parse_cluster(devices), Job.of(values)
    begun = time.process_time()
    search(model, job, cluster)
    spent = time.process_time() - begun
    print(f"{name}: {spent:.1f} s")
    assert spent < 10


def check_estimate(model: ModelShape, job: Job, cluster: Cluster) -> None:
    """What a few layers say of the whole model: never too much memory, never too slow."""
    bound = _Search(model, job, cluster, frozenset(), 100.0)._candidate({}, frozenset())
    plan = evaluate(model, job, cluster)
    assert bound is not None
    assert 0.9 * plan.memory.needed <= bound.needed <= 1.03 * plan.memory.needed
    assert plan.worth <= -bound.key * 1.001 <= 1.1 * plan.worth
    assert bound.host_needed == pytest.approx(plan.host_needed, rel=_SLACK)


def test_a_few_layers_say_what_all_need_at_least() -> None:
    model, _ = load_model("Llama-3.1-8B")
    switches: list[dict[str, Any]] = [{}, {"offload": True}, {"step_in_backward": True}, {"micro_batch": 8}]
    switches += [{"strategy": "SHARD_GRAD_OP"}]
    for checkpointing, more in itertools.product(("none", "full"), switches):
        check_estimate(model, Job.of({"checkpointing": checkpointing, **more}), parse_cluster("16xH100"))


@pytest.mark.parametrize(
    ("name", "first", "period"),
    [
        ("Llama-2-7B", 0, 1),
        ("gpt-oss-20b", 0, 2),
        ("Qwen3-Next-80B-A3B", 0, 4),
        ("Gemma-3-27B", 0, 6),
        ("DeepSeek-V3", 3, 1),
        ("GLM-4.5-Air", 1, 1),
    ],
)
def test_layers_that_take_turns(name: str, first: int, period: int) -> None:
    """So many, after those that come first, say what the whole model needs, to be looked at in the place of all."""
    model, _ = load_model(name)
    assert _turns([unit for unit in model.units if unit.block is not None]) == (first, period)
    few, more = (len(shorter.blocks) - first for _, shorter in few_layers(model))
    assert few % period == 0 and few >= 3 and more == 2 * few


def test_an_encoder_and_a_decoder_are_shortened_alike() -> None:
    from fullshard.api.counting import count

    model = count({"model_type": "t5", "d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32})
    assert [len(shorter.blocks) for _, shorter in few_layers(model)] == [2 * (1 + 3), 2 * (1 + 6)]
    check_estimate(model, Job.of({"seq_len": 512, "micro_batch": 8}), parse_cluster("4xA100"))


def test_what_is_fixed_stays() -> None:
    model, _ = load_model("GPT-2")
    job = Job.of({"strategy": "FULL_SHARD", "checkpointing": "full", "optimizer": "adamw"})
    fixed = ("strategy", "checkpointing", "optimizer", "loss")
    for plan in search(model, job, parse_cluster("8xH100"), fixed=fixed):
        assert all(getattr(plan.job, name) == getattr(job, name) for name in fixed)


def test_what_saves_memory_is_tried_together() -> None:
    """On a device that is too small for all but three things that are switched on at once."""
    model, cluster = load_model("Qwen2.5-0.5B")[0], parse_cluster("8xA100")
    values: dict[str, Any] = {"checkpointing": "full", "seq_len": 32768, "optimizer": "adamw-fused"}
    saving: dict[str, Any] = {"loss": "fused", "offload_activations": True, "offload_main_weights": True}
    fixed = ("strategy", "checkpointing", "wrap_embeddings", "offload", "optimizer", "cp", "sp")

    def needed(more: dict[str, Any]) -> int:
        return evaluate(model, Job.of({**values, **more}), cluster).memory.needed

    memory = round(needed(saving) / MARGIN) + 1
    for left in saving:
        assert needed({name: value for name, value in saving.items() if name != left}) > MARGIN * memory
    small = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory=memory))
    found = search(model, Job.of(values), small, fixed=fixed)[0].job
    assert {name: getattr(found, name) for name in saving} == saving


def test_the_margin() -> None:
    model, _ = load_model("GPT-2")
    cluster = parse_cluster("2xA10G")
    tight, loose = (search(model, Job.of({}), cluster, margin=margin)[0] for margin in (0.4, 1.0))
    assert tight.memory.needed <= 0.4 * cluster.device.memory < loose.memory.needed
    assert search(model, Job.of({}), cluster, margin=0.02) == []


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.8, "fits"), (0.9, "fits, tight"), (0.95, "may not fit"), (1.02, "may not fit"), (1.2, "does not")],
)
def test_verdicts(share: float, words: str) -> None:
    """By what part of the device a plan needs."""
    model, _ = load_model("GPT-2")
    plan = evaluate(model, Job.of({}), parse_cluster("8xA100"))
    device = dataclasses.replace(DEVICES["A100-80"], memory=round(plan.memory.needed / share))
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=device))
    assert plan.verdict.startswith(words)
    assert plan.confidence.startswith(words) and plan.fits == (share <= 1)


def test_the_list_of_plans_is_readable_in_80_columns() -> None:
    """No word is cut off, and what all plans have in common has no column."""
    model, _ = load_model("Llama-2-7B")
    jobs: list[dict[str, Any]] = [{"wrap_embeddings": True, "step_in_backward": True}, {"checkpointing": "selective"}]
    jobs += [{"strategy": "HYBRID_SHARD_ZERO2", "shard_size": 128, "micro_batch": 64}, {"accumulation": 8}]
    plans = [evaluate(model, Job.of(job), parse_cluster("1024xH100")) for job in jobs]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(front_table(plans, "plans"))
    text = console.export_text()
    assert (
        "\N{HORIZONTAL ELLIPSIS}" not in text
        and "HYBRID_SHARD_ZERO2" in text
        and "embeddings" in text
        and "on host" not in text
    )
