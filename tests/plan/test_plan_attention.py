"""Attention's own time, against the figures of the papers, and what a step costs however small it is.

pytest tests/plan/test_plan_attention.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fullshard.core.errors import ConfigError
from fullshard.plan.attention import BACKWARD, attention_flops, part_of_size, seen_keys
from fullshard.plan.evaluate import Plan, changes_that_fit, evaluate, notes_of
from fullshard.plan.hardware import DEVICES, parse_cluster
from fullshard.plan.host import HostCosts
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.shapes import Block, ModelShape
from fullshard.plan.work import LAYER_KERNELS, LAYER_VIEWS, attention_seconds

BLOCK = Block(2048, 16, 16, 128, 8192)
H100 = {
    (128, 512): (191, 214),
    (128, 2048): (298, 291),
    (128, 16384): (335, 322),
    (64, 512): (180, 198),
    (64, 2048): (262, 264),
}
"""TFLOP/s of FlashAttention-3's figures 5 and 6 (arXiv 2407.08608): forward with a mask, backward without."""


def plan(model: str, devices: str, **job: Any) -> Plan:
    return evaluate(load_model(model)[0], Job.of(job), parse_cluster(devices))


@pytest.mark.parametrize(("head_dim", "keys"), list(H100))
def test_kernels_reach_what_was_published(head_dim: int, keys: int) -> None:
    """Both ways together within 15 %; a mask takes a tenth from backward."""
    forward, backward = H100[head_dim, keys]
    both = (1 + BACKWARD) / (1 / forward + BACKWARD / (0.9 * backward)) / 989
    assert part_of_size(head_dim, keys, flash=DEVICES["H100"].flash) == pytest.approx(both, rel=0.15)


def test_what_a_query_sees() -> None:
    assert seen_keys(BLOCK, 4096) == 2048 and seen_keys(BLOCK, 4096, whole=True) == 4096
    window = dataclasses.replace(BLOCK, window=1024)
    seen = sum(min(position + 1, 1024) for position in range(4096)) / 4096
    assert seen_keys(window, 4096) == pytest.approx(seen, rel=1e-3)
    assert seen_keys(window, 512) == 256


def test_flops_of_unequal_heads() -> None:
    """DeepSeek-V3's: 192 wide queries, 128 wide values."""
    block = dataclasses.replace(BLOCK, head_dim=192, value_dim=128)
    assert attention_flops(block, 10, 1000) == 2 * 16 * (192 + 128) * 10 * 500


def test_a_window_saves_time_and_flops() -> None:
    """OLMo-3's three of four layers see 4,096 tokens, OLMo-2's all; `sdpa` reads a mask and computes everything."""
    job: dict[str, Any] = {"seq_len": 65536, "checkpointing": "full"}
    with_window, without = plan("OLMo-3-7B", "8xH100", **job), plan("OLMo-2-7B", "8xH100", **job)
    assert with_window.time.total < 0.6 * without.time.total
    assert with_window.time.model_flops < 0.7 * without.time.model_flops
    masked = plan("OLMo-3-7B", "8xH100", **job, attention="sdpa")
    assert masked.time.total > without.time.total and masked.time.model_flops == with_window.time.model_flops


def with_heads_of_keys(kv_heads: int) -> ModelShape:
    """Llama 3.1 8B, whose layers compute with so many; parameters are as they were."""
    shape = load_model("Llama-3.1-8B")[0]
    units = [
        unit
        if unit.block is None
        else dataclasses.replace(unit, block=dataclasses.replace(unit.block, kv_heads=kv_heads))
        for unit in shape.units
    ]
    return dataclasses.replace(shape, units=tuple(units))


def test_float32_with_grouped_heads_has_no_kernel() -> None:
    """Its scores are written out, which takes memory and time, on accelerators only; and a note says so."""
    job: dict[str, Any] = {"precision": "fp32", "seq_len": 4096, "attention": "sdpa"}
    with_groups, without = (evaluate(with_heads_of_keys(n), Job.of(job), parse_cluster("8xH100")) for n in (8, 32))
    scores = 32 * 4 * 32 * 4096**2
    assert with_groups.memory.peak - without.memory.peak > 0.9 * scores
    assert with_groups.time.compute > without.time.compute

    def says(**changes: Any) -> str:
        devices = changes.pop("devices", "8xH100")
        return "; ".join(n for n in notes_of(plan("Llama-3.1-8B", devices, **job | changes)) if "keep scores" in n)

    assert says() == says(attention="flash")
    assert "8 heads of keys and values for 32" in says() and "in bf16 (--precision bf16) they do not" in says()
    assert not says(precision="bf16") + says(attention="eager") + says(devices="2xcpu")


def test_a_version_for_one_architecture_is_faster_there_and_refused_elsewhere() -> None:
    """As its authors measured, with a mask and 8,192 keys."""
    for attention, device, speeds in (("flash3", "H200", (630, 532)), ("flash4", "B200", (1418, 1209))):
        job = Job.of({"attention": attention, "seq_len": 8192})
        flops = attention_flops(BLOCK, job.tokens, job.seq_len)
        seconds = attention_seconds(BLOCK, job, DEVICES[device])
        assert [flops * part / s / 1e12 for part, s in zip((1, BACKWARD), seconds, strict=True)] == pytest.approx(
            speeds, rel=0.002
        )
    with pytest.raises(ConfigError, match=r"flash3 runs on Hopper, but the device is A100-80\nhint: use"):
        plan("Llama-2-7B", "8xA100", attention="flash3")


def test_before_ampere_grouped_heads_have_no_kernel_in_float16_either() -> None:
    """There is no flash attention: scores are written out, whole and in float32, where an A100 keeps none."""
    job: dict[str, Any] = {"precision": "fp16", "seq_len": 4096, "checkpointing": "full"}
    for attention in ("sdpa", "flash"):
        grouped, alone = (
            evaluate(with_heads_of_keys(kv_heads), Job.of(job | {"attention": attention}), parse_cluster("8xV100"))
            for kv_heads in (8, 32)
        )
        assert grouped.memory.peak - alone.memory.peak > 2 * 4 * 32 * 4096**2  # of one layer, and a gradient
        assert any("keep scores" in n and "they do not" not in n for n in notes_of(grouped))
        assert not any("keep scores" in note for note in notes_of(alone))
    device, block = DEVICES["V100"], load_model("Llama-3.1-8B")[0].blocks[0]
    forward, backward = attention_seconds(block, Job.of(job), device)
    flops = attention_flops(block, 4096, 4096, whole=True)
    assert backward == 2 * forward == pytest.approx(2 * flops / (device.flops_fp32 * device.efficiency))


def test_only_a_kernel_that_is_there_is_proposed() -> None:
    """On a V100 `sdpa` writes the scores of grouped heads out, too, but not where it reads a window's mask."""
    for model, seq_len, is_proposed in (("Llama-3.2-3B", 2048, False), ("Mistral-7B", 8192, True)):
        there = plan(model, "16xV100", precision="fp16", attention="eager", seq_len=seq_len)
        words = " ".join(change.words for change in changes_that_fit(there))
        assert words and ("attention that keeps no scores" in words) == is_proposed


def test_backward_of_one_kernel_computes_scores_again_in_float32_too() -> None:
    forward, backward = attention_seconds(BLOCK, Job.of({"precision": "fp32"}), DEVICES["H100"])
    assert backward == BACKWARD * forward


@pytest.mark.parametrize(("devices", "least"), [("1xH100", 0.012), ("8xH100", 0.012), ("8xB200", 0.012)])
def test_a_small_step_takes_what_the_host_takes(devices: str, least: float) -> None:
    """12 layers of 211 operations each, some microseconds per operation, whatever the device."""
    time = plan("GPT-2", devices, seq_len=512).time
    assert time.total > least > 0.9 * 12 * HostCosts().seconds(sum(LAYER_KERNELS), sum(LAYER_VIEWS))
    assert plan("GPT-2", devices, seq_len=512, compile=True).time.total < 0.7 * time.total


def test_a_large_step_does_not_wait_for_the_host() -> None:
    small, large = (plan("Llama-3.1-8B", "8xH100", micro_batch=size, checkpointing="full") for size in (2, 4))
    assert large.time.compute == pytest.approx(2 * small.time.compute, rel=0.03)
