"""Predictions against figures that others published, row by row.

pytest -s tests/plan/test_plan_published.py        prints predicted, published and their ratio, and a summary by length

Every row has all that the formulas need. Nothing is fitted to a row: each term is derived in `fullshard.plan`, and the
device's efficiency is one number per device.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fullshard.plan.evaluate import ERROR_BAR, SPEED_BARS, Plan, evaluate
from fullshard.plan.families import from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.shapes import ModelShape
from tests.peers import Peer, peer_memory
from tests.published_recent import ROWS as RECENT
from tests.published_recent import Recent
from tests.published_runs import MARKS, REACHED, REASONS, errors, runs, table

GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Row:
    """One published memory figure.

    Attributes:
        published: bytes per device.
        reason: why the prediction is more than 25 % away.
    """

    name: str
    model: str
    ranks: int
    published: float
    peer: Peer
    job: dict[str, Any]
    source: str
    reason: str = ""


SEED = "PEFT documentation, fully sharded data parallel"
ANSWER = "Answer.AI, fsdp_qlora, benchmarks_03_2024.md"
_LORA = {"method": "lora", "checkpointing": "full"}
_QLORA = {"method": "qlora", "checkpointing": "full"}
_R64 = {"lora_rank": 64, "lora_targets": "q_proj,k_proj,v_proj,up_proj,down_proj,gate_proj", "precision": "bf16"}


def _answer(name: str, model: str, published: float, method: dict[str, Any], **job: Any) -> Row:
    peer = Peer(adapter_dtype="bfloat16", tool=job.pop("tool", "reserved"), keeps_inputs=True)
    reason = job.pop("reason", "")
    return Row(name, model, 2, published * GIB, peer, {**method, **_R64, **job}, ANSWER, reason)


_TRAINED = Peer(tool="nvidia-smi", logit_nbytes=12)  # Trainer frees the model's outputs before backward
_TRAINED_4_BITS = dataclasses.replace(_TRAINED, keeps_inputs=True)

ROWS = [
    Row("70B LoRA, base fp32, 8 x H100 (72 to 80 GB)", "Llama-2-70B", 8, 76 * GB, _TRAINED,
        {**_LORA, "base_dtype": "float32", "precision": "bf16", "micro_batch": 8, "accumulation": 4}, SEED),
    Row("70B QLoRA, 2 GPUs, no offload", "Llama-2-70B", 2, 35.6 * GB, _TRAINED_4_BITS,
        {**_QLORA, "precision": "no", "micro_batch": 2, "accumulation": 2, "reentrant": True}, SEED),
    Row("70B QLoRA, 2 GPUs, offload", "Llama-2-70B", 2, 19.6 * GB, _TRAINED_4_BITS,
        {**_QLORA, "precision": "no", "micro_batch": 2, "accumulation": 2, "reentrant": True, "offload": True}, SEED),
    Row("Llama-3-70B QLoRA, 4 x A10G, offload", "Llama-3-70B", 4, 22 * GB, _TRAINED_4_BITS,
        {**_QLORA, "precision": "bf16", "micro_batch": 1, "seq_len": 3072, "offload": True, "lora_rank": 16},
        "philschmid.de, FSDP and QLoRA for Llama 3"),
    _answer("7B QLoRA 1 x 512", "Llama-2-7B", 4.98, _QLORA, seq_len=512),
    _answer("7B QLoRA 1 x 2048", "Llama-2-7B", 5.21, _QLORA),
    _answer("7B QLoRA 4 x 2048", "Llama-2-7B", 11.22, _QLORA, micro_batch=4),
    _answer("7B QLoRA 10 x 2048", "Llama-2-7B", 20.97, _QLORA, micro_batch=10),
    _answer("7B LoRA 1 x 512, allocated", "Llama-2-7B", 8.28, _LORA, seq_len=512, tool="allocated"),
    _answer("7B LoRA 1 x 2048, allocated", "Llama-2-7B", 9.16, _LORA, tool="allocated"),
    _answer("7B LoRA 1 x 512", "Llama-2-7B", 10.24, _LORA, seq_len=512),
    _answer("7B LoRA 1 x 2048", "Llama-2-7B", 10.22, _LORA),
    _answer("7B LoRA 4 x 2048", "Llama-2-7B", 16.14, _LORA, micro_batch=4),
    _answer("7B LoRA 6 x 2048", "Llama-2-7B", 21.35, _LORA, micro_batch=6),
    _answer("34B QLoRA 2 x 2048", "Yi-34B", 23.05, _QLORA, micro_batch=2),
    _answer("34B QLoRA 4 x 2048, offload", "Yi-34B", 22.98, _QLORA, micro_batch=4, offload=True),
    _answer("70B QLoRA 2 x 2048, offload", "Llama-2-70B", 14.92, _QLORA, micro_batch=2, offload=True),
    Row("8B pretraining, 8 x H100, selective", "Llama-3.1-8B", 8, 82.4 * GIB,
        Peer("fsdp2", dropout=False, logit_nbytes=12),
        {"checkpointing": "selective", "micro_batch": 2, "seq_len": 8192}, "torchtitan, benchmarks of 2024-12"),
    Row("8B pretraining, 8 x H100, selective, compiled", "Llama-3.1-8B", 8, 77.0 * GIB,
        Peer("fsdp2", dropout=False, logit_nbytes=12),
        {"checkpointing": "selective", "micro_batch": 2, "seq_len": 8192, "compile": True},
        "torchtitan, benchmarks of 2024-12"),
]  # fmt: skip


def predicted(row: Row) -> int:
    model, _ = load_model(row.model)
    return sum(peer_memory(model, Job.of(row.job), row.peer, ranks=row.ranks).values())


@dataclass(frozen=True, eq=False)
class Speed:
    """One published speed, in tokens per second and device."""

    name: str
    model: str
    devices: str
    published: float
    job: dict[str, Any]
    source: str
    reason: str = ""
    hosts: int | None = field(default=None)


_PYTORCH = "PyTorch blog 2024-03, maximizing training throughput; 2 x 4096 tokens, not compiled"
_COMPILED = "foundation-model-stack/fms-fsdp README; 2 x 4096 tokens, compiled"
_BATCH = {"micro_batch": 2, "seq_len": 4096}
SPEEDS = [
    Speed("7B, 128 x A100", "Llama-2-7B", "128xA100", 3700, {**_BATCH, "strategy": "HYBRID_SHARD"}, _PYTORCH),
    Speed("13B selective, 128 x A100", "Llama-2-13B", "128xA100", 1800,
          {**_BATCH, "checkpointing": "selective"}, _PYTORCH),
    Speed("34B full, 128 x A100", "CodeLlama-34B", "128xA100", 700, {**_BATCH, "checkpointing": "full"}, _PYTORCH),
    Speed("70B full, 128 x A100", "Llama-2-70B", "128xA100", 370, {**_BATCH, "checkpointing": "full"}, _PYTORCH),
    Speed("7B, 128 x A100, compiled", "Llama-2-7B", "128xA100", 4550,
          {**_BATCH, "strategy": "HYBRID_SHARD", "compile": True}, _COMPILED),
    Speed("13B selective, 128 x A100, compiled", "Llama-2-13B", "128xA100", 2150,
          {**_BATCH, "checkpointing": "selective", "compile": True}, _COMPILED),
    Speed("7B, 96 x H100, compiled", "Llama-2-7B", "96xH100", 9600,
          {**_BATCH, "strategy": "HYBRID_SHARD", "compile": True}, _COMPILED),
    Speed("13B selective, 96 x H100, compiled", "Llama-2-13B", "96xH100", 4850,
          {**_BATCH, "checkpointing": "selective", "compile": True}, _COMPILED),
    Speed("8B selective, 8 x H100", "Llama-3.1-8B", "8xH100", 5762,
          {"micro_batch": 2, "seq_len": 8192, "checkpointing": "selective"}, "torchtitan 2024-12"),
    Speed("8B selective, 8 x H100, compiled", "Llama-3.1-8B", "8xH100", 6667,
          {"micro_batch": 2, "seq_len": 8192, "checkpointing": "selective", "compile": True}, "torchtitan 2024-12"),
]  # fmt: skip


_TITAN = "torchtitan, docs/performance.md of 2024-05 (Llama 3 of 8192 tokens, Llama 2 of 4096), not compiled"
_LONG = {"micro_batch": 1, "seq_len": 8192}
SPEEDS += [
    Speed("8B selective, 64 x A100", "Llama-3-8B", "64xA100", 2973, {**_LONG, "checkpointing": "selective"}, _TITAN),
    Speed("70B full, 64 x A100", "Llama-3-70B", "64xA100", 331, {**_LONG, "checkpointing": "full"}, _TITAN),
    Speed("13B, 64 x A100", "Llama-2-13B", "64xA100", 2162, _BATCH, _TITAN),
    Speed("13B selective, 64 x A100", "Llama-2-13B", "64xA100", 1904, {**_BATCH, "checkpointing": "selective"}, _TITAN),
    Speed("70B full, 64 x A100, 2 x 4096", "Llama-2-70B", "64xA100", 353, {**_BATCH, "checkpointing": "full"}, _TITAN),
]
MPT = {
    "MPT-125m": (12, 768, 12), "MPT-350m": (24, 1024, 16), "MPT-760m": (24, 1536, 12), "MPT-1b": (24, 2048, 16),
    "MPT-3b": (32, 2560, 20), "MPT-7b": (32, 4096, 32), "MPT-13b": (40, 5120, 40), "MPT-30b": (48, 7168, 56),
    "MPT-70b": (80, 8192, 64),
}  # fmt: skip
"""Layers, width and heads of the models that llm-foundry measures (its `scripts/train/yamls/pretrain`)."""


@functools.cache
def _mpt(name: str, positions: int) -> ModelShape:
    layers, hidden, heads = MPT[name]
    values = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": positions, "vocab_size": 50368}
    more = {"model_type": "gpt2", "activation_function": "gelu", "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    return from_config({**values, **more}, where=name, name=name)[0]


def foundry() -> list[Speed]:
    """mosaicml/llm-foundry, scripts/train/benchmarking/README.md: FSDP, bf16, 512 to 65,536 tokens.

    Their loss is assumed: one kernel, llm-foundry's default where flash-attn is installed. The tables do not say.

    Its attention was then the first version's (Triton's and `flash-attn` 1), half as fast as the second:
    version 2 came to it in 2023-11.
    """
    rows = []
    with (Path(__file__).parents[1] / "fixtures/published_speeds.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            numbers = {name: int(line[name]) for name in ("seq_len", "micro_batch", "accumulation")}
            job = {**numbers, "checkpointing": line["checkpointing"], "loss": "kernel"}
            name = f"{line['model']} {line['seq_len']} {line['devices']} {line['micro_batch']}"
            job["optimizer"] = "adamw-fused"
            rows.append(
                Speed(name, line["model"], line["devices"], float(line["tokens_per_second"]), job, "llm-foundry")
            )
    return rows


def is_aside(row: Speed | Recent) -> bool:
    """A third, by its name, that nothing was looked up for while the formulas were made."""
    return hashlib.sha256(row.name.encode()).digest()[0] % 3 == 0


LENGTHS = {"below 4k": (0, 4096), "4k to 8k": (4096, 8193), "16k to 32k": (8193, 32769), "64k": (32769, 65537)}


def predicted_speed(row: Speed) -> float:
    plan = _planned(row, {})
    return plan.time.tokens_per_second / plan.cluster.count


def _planned(row: Speed, changed: dict[str, Any]) -> Plan:
    model = _mpt(row.model, row.job["seq_len"]) if row.model in MPT else load_model(row.model)[0]
    cluster = parse_cluster(row.devices, row.hosts)
    if row.model in MPT:
        cluster = dataclasses.replace(
            cluster, device=dataclasses.replace(cluster.device, flash=cluster.device.flash / 2)
        )
    return evaluate(model, Job.of({**row.job, **changed}), cluster)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_memory(row: Row) -> None:
    got = predicted(row)
    print(f"\n{row.name}: predicted {got / GIB:.2f} GiB, published {row.published / GIB:.2f} GiB, "
          f"ratio {got / row.published:.2f}{f' ({row.reason})' if row.reason else ''}")  # fmt: skip
    terms = peer_memory(load_model(row.model)[0], Job.of(row.job), row.peer, ranks=row.ranks)
    print("   ", ", ".join(f"{name} {nbytes / GIB:.2f}" for name, nbytes in terms.items()))
    assert abs(got / row.published - 1) <= 0.25 or row.reason


@pytest.mark.parametrize("row", SPEEDS, ids=[row.name for row in SPEEDS])
def test_speed(row: Speed) -> None:
    got = predicted_speed(row)
    print(f"\n{row.name}: predicted {got:.0f} tokens/s, published {row.published:.0f}, ratio {got / row.published:.2f}")
    assert abs(got / row.published - 1) <= 0.25 or row.reason


def test_the_median_error_is_small() -> None:
    memory = [abs(predicted(row) / row.published - 1) for row in ROWS]
    speed = [abs(predicted_speed(row) / row.published - 1) for row in SPEEDS]
    print(f"\nmedian error: memory {statistics.median(memory):.1%} of {len(memory)} rows, "
          f"speed {statistics.median(speed):.1%} of {len(speed)}")  # fmt: skip
    assert statistics.median(memory) <= 0.10
    assert statistics.median([*memory, *speed]) <= 0.10


def recent(row: Recent) -> dict[str, float]:
    """Predicted speed and memory as parts of what is published, as far as it is."""
    model, job, cluster = load_model(row.model)[0], Job.of(row.job), parse_cluster(row.devices)
    plan = evaluate(model, job, cluster)
    ratios = {}
    if row.speed:
        ratios["speed"] = plan.time.tokens_per_second / cluster.count / row.speed
    if row.gib:
        own = plan.memory.peak - cluster.device.framework
        nbytes = own if row.peer is None else sum(peer_memory(model, job, row.peer, ranks=cluster.count).values())
        ratios["memory"] = nbytes / GIB / row.gib
    return ratios


@pytest.mark.parametrize("row", RECENT, ids=[row.name for row in RECENT])
def test_recent_figures(row: Recent) -> None:
    ratios = recent(row)
    said = ", ".join(f"{what} {ratio:.2f}" for what, ratio in ratios.items())
    print(f"\n{row.name}: {said}{', aside' * is_aside(row)}{f' ({row.reason})' if row.reason else ''}")
    assert row.reason or all(abs(ratio - 1) <= 0.25 for ratio in ratios.values())


def test_recent_figures_as_a_whole() -> None:
    """Half of them within a tenth in memory and within 15 % in speed, of those set aside, too."""
    for aside in (False, True):
        found = [recent(row) for row in RECENT if is_aside(row) == aside]
        for what, most in (("memory", 0.10), ("speed", 0.15)):
            errors = sorted(abs(ratios[what] - 1) for ratios in found if what in ratios)
            median, ninth = statistics.median(errors), statistics.quantiles(errors, n=10, method="inclusive")[-1]
            print(
                f"\nrecent {what}{', aside' * aside}: {len(errors)} rows, median error {median:.1%}, "
                f"90th percentile {ninth:.1%}, worst {errors[-1]:.1%}"
            )
            assert median <= most


def test_a_few_published_runs() -> None:
    """Each 12th of those that `test_published_runs` compares, so of each source."""
    for run in runs()[::12]:
        assert run.values["reason"] or all(abs(run.ratios[what] - 1) <= 0.25 for what in run.published)


@pytest.mark.full
def test_published_runs() -> None:
    """Each kind's median is at most what it was, what is more than 25 % off has a reason, and the page is true."""
    for run in runs():
        reasons = run.values["reason"].split("; ") if run.values["reason"] else []
        ratios = ", ".join(f"{what} {ratio:.2f}" for what, ratio in run.ratios.items())
        print(f"{run.name}: {ratios} {'; '.join(REASONS[reason] for reason in reasons)}")
        assert reasons or all(abs(run.ratios[what] - 1) <= 0.25 for what in run.published), run.name
    print(table())
    for what, kinds in REACHED.items():
        for kind, most in kinds.items():
            assert statistics.median(errors(kind, what)) <= most, (kind, what)
    page = (Path(__file__).parents[2] / "docs/planning.md").read_text(encoding="utf-8")
    assert MARKS.search(page)[2].strip() == table()  # type: ignore[index]


@pytest.mark.parametrize("row", foundry()[::30], ids=lambda row: row.name)
def test_long_sequences(row: Speed) -> None:
    """A few of those that `test_speeds_by_length_of_sequence` compares."""
    assert abs(predicted_speed(row) / row.published - 1) < 0.30


@pytest.mark.full
def test_speeds_by_length_of_sequence() -> None:
    """146 runs of llm-foundry: half of them within a tenth below 4k tokens and within 15 % above; none is off by 30 %.

    `aside` are those that were set aside first; they are held to the same.
    """
    ratios = {row: predicted_speed(row) / row.published for row in foundry()}
    for row, ratio in ratios.items():
        print(f"{row.name:32} published {row.published:8.0f} tokens/s, ratio {ratio:.2f}{', aside' * is_aside(row)}")
    for aside in (False, True):
        for length, (least, most) in LENGTHS.items():
            some = [r for row, r in ratios.items() if is_aside(row) == aside and least <= row.job["seq_len"] < most]
            errors = sorted(abs(ratio - 1) for ratio in some)
            median, ninth = statistics.median(errors), statistics.quantiles(errors, n=10, method="inclusive")[-1]
            print(
                f"{length}{', aside' * aside}: {len(some)} runs, median error {median:.1%}, "
                f"90th percentile {ninth:.1%}, worst {errors[-1]:.1%}, median ratio {statistics.median(some):.2f}"
            )
            assert median <= (0.10 if least == 0 else 0.15)
            assert errors[-1] < 0.30


@pytest.mark.full
@pytest.mark.parametrize(("loss", "most"), [("", 1), ("eager", 44)])
def test_what_has_run_fits(loss: str, most: int) -> None:
    """With the loss that it was run with, and with Transformers' own, which nobody here used."""
    rows = [*SPEEDS, *foundry()]
    missing = [row.name for row in rows if not _planned(row, {"loss": loss} if loss else {}).fits]
    print(f"{loss or 'own loss'}: {len(missing)} of {len(rows)} do not fit: {', '.join(missing)}")
    assert len(missing) <= most


def test_the_error_bar_is_that_of_the_rows() -> None:
    """What `plan` prints beside a prediction: four of five rows lie inside."""
    found = [row.published / predicted(row) for row in ROWS]
    found += [1 / ratios["memory"] for row in RECENT if "memory" in (ratios := recent(row))]
    tenths = statistics.quantiles(found, n=10, method="inclusive")
    assert (tenths[0], tenths[-1]) == pytest.approx(ERROR_BAR, abs=0.005)


@pytest.mark.full
def test_the_range_of_the_speed_is_that_of_the_rows() -> None:
    """As for memory. Runs of mixtures are apart, as their errors are larger."""
    mixtures = [1 / run.ratios["speed"] for run in runs() if "speed" in run.ratios and "moe" in run.kinds]
    dense = [1 / run.ratios["speed"] for run in runs() if "speed" in run.ratios and "moe" not in run.kinds]
    dense += [1 / ratios["speed"] for row in RECENT if "speed" in (ratios := recent(row))]
    dense += [row.published / predicted_speed(row) for row in (*SPEEDS, *foundry())]
    for found, bar in ((dense, SPEED_BARS["dense"]), (mixtures, SPEED_BARS["mixture"])):
        tenths = statistics.quantiles(found, n=10, method="inclusive")
        assert (tenths[0], tenths[-1]) == pytest.approx(bar, abs=0.01)


def test_host_memory_of_the_seed() -> None:
    """About 107 GB with Transformers' loader, of which 70 GB are two whole models; here the shards and two weights."""
    model, _ = load_model("Llama-2-70B")
    job = Job.of({**_QLORA, "precision": "no", "micro_batch": 2, "accumulation": 2, "offload": True})
    memory = evaluate(model, job, parse_cluster("2xRTX4090")).memory
    theirs, ours = memory.host_load_peers, memory.host_load
    print(f"\nhost memory: predicted {theirs / GB:.1f} GB, published about 107; ours {ours / GB:.1f} GB")
    assert theirs == pytest.approx(107 * GB, rel=0.04)
    # Of which 0.94 GB are weights in bfloat16 before they are quantized; and page-locked are 44.7 GB for 36.8.
    assert ours == pytest.approx(45.7 * GB, rel=0.01)
