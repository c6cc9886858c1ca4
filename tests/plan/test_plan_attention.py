"""Attention's own time, against the figures of the papers, and what a step costs however small it is.

pytest tests/plan/test_plan_attention.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_flash_attention_utils import _is_packed_sequence

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
    assert "8 key and value heads for 32" in says() and "in bf16 (--precision bf16) they do not" in says()
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


def test_sdpa_runs_a_newer_kernel_on_newer_devices() -> None:
    """cuDNN's on Hopper and Blackwell, unless it reads the mask of a window."""
    for devices, kernel in (("8xH100", "flash3"), ("8xB200", "flash4"), ("8xA100", "flash")):
        times = [plan("Llama-3.1-8B", devices, seq_len=8192, attention=name).time for name in ("sdpa", kernel)]
        assert times[0] == times[1]
    job, device = Job.of({"seq_len": 8192, "attention": "sdpa"}), DEVICES["H100"]
    window = dataclasses.replace(BLOCK, window=4096)
    whole = job.model_copy(update={"attention": "flash"})
    assert attention_seconds(window, job, device)[0] > 1.2 * attention_seconds(window, whole, device)[0]


def test_flash_attention_keeps_a_compiler_out_of_checkpointed_layers() -> None:
    settings: dict[str, Any] = {"compile": True, "checkpointing": "full", "seq_len": 8192}
    found = plan("Qwen3-4B", "8xA100", **settings)
    eager = plan("Qwen3-4B", "8xA100", **{**settings, "compile": False})
    assert found.time == eager.time and found.memory.peak == eager.memory.peak
    assert any("--attention sdpa" in note for note in notes_of(found)) and found.job.compile
    for change in ({"attention": "sdpa"}, {"micro_batch": 2}, {"checkpointing": "none"}):
        compiled, uncompiled = (
            plan("Qwen3-4B", "8xA100", **{**settings, **change, "compile": flag}) for flag in (True, False)
        )
        assert compiled.time.total < 0.95 * uncompiled.time.total
        assert not any("--attention sdpa" in note for note in notes_of(compiled))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which Dynamo reads
@pytest.mark.parametrize(("sequences", "is_checkpointed", "graphs"), [(1, True, 0), (2, True, 1), (2, False, 1)])
def test_graphs_of_a_layer(sequences: int, is_checkpointed: bool, graphs: int) -> None:
    """Of Transformers' Qwen3, with the question of its flash attention. A layer with one graph is compiled."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, position_ids: Any = None, **_: Any) -> Any:
        assert not _is_packed_sequence(position_ids, query.size(0))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("eager_asking", attend)
    torch.compiler.reset()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen3", num_hidden_layers=1, head_dim=16, vocab_size=9, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager_asking")
    layer, found = model.model.layers[0], []
    if is_checkpointed:
        layer = model.model.layers[0] = checkpoint_wrapper(layer, preserve_rng_state=False)

    def count(graph: Any, _: Any) -> Any:
        found.append(graph)
        return graph

    layer.compile(backend=count)
    tokens = torch.zeros(sequences, 8, dtype=torch.long)
    positions = torch.arange(8).expand(sequences, -1)
    model(input_ids=tokens, position_ids=positions, use_cache=False).logits.sum().backward()
    assert len(found) == graphs
