"""Experts: what a real layer of Transformers does, against what the planner counts, and a measured kernel.

pytest tests/plan/test_plan_experts.py
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard.plan.activations import layer_activations
from fullshard.plan.axes import Message
from fullshard.plan.evaluate import Plan, evaluate
from fullshard.plan.experts import added_seconds, dispatched_nbytes, operations, selected_nbytes
from fullshard.plan.families import from_config
from fullshard.plan.hardware import DEVICES, parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import MODELS, load_model
from fullshard.plan.shapes import ModelShape
from fullshard.plan.work import HEAD_NORM_KERNELS, LAYER_KERNELS, LAYER_VIEWS, forward_flops
from tests.plan.allocations import peak_of
from tests.plan.test_plan_time import Counting

TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 9,
    "num_key_value_heads": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0,
}  # fmt: skip
TOKENS = 96


class Rows(TorchDispatchMode):
    """Adds up the bytes of rows of the residual stream's width that are read and written outside of products."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        rows = (TOKENS * TINY["num_experts_per_tok"], TINY["hidden_size"])
        moved = [t for t in (*args, made) if isinstance(t, torch.Tensor) and tuple(t.shape) == rows]
        if name in ("mul", "sum", "new_zeros"):
            self.nbytes += sum(t.numel() * t.itemsize for t in moved)
        elif name in ("index", "index_put") and moved:  # reads or writes one row for each; adding reads it, too
            self.nbytes += (2 if name == "index" else 3) * moved[0].numel() * moved[0].itemsize
        return made


def shape() -> ModelShape:
    return from_config({"model_type": "qwen3_moe", "num_hidden_layers": 1, **TINY}, where="a test")[0]


def model(layers: int, experts: str, **changes: Any) -> Any:
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=layers, **TINY | changes)
    config.use_cache = False
    how = "grouped_mm" if experts == "grouped" else experts
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", experts_implementation=how)


def both(layers: int, experts: str, mode: type[Any], **changes: Any) -> list[Any]:
    tokens, net = torch.randint(0, 9, (1, TOKENS)), model(layers, experts, **changes).bfloat16()
    with mode() as forward:
        loss = net(input_ids=tokens, labels=tokens).loss
    with mode() as backward:
        loss.backward()
    return [forward, backward]


def test_tokens_are_moved_as_often_as_in_transformers() -> None:
    """The sum over a token's experts reads the rows as (tokens, experts, width), which the mode does not see."""
    block = shape().blocks[0]
    row = 2 * TINY["hidden_size"] * TINY["num_experts_per_tok"] * TOKENS
    planned = [nbytes * TOKENS for nbytes in dispatched_nbytes(block, Job())]
    found = [mode.nbytes for mode in both(1, "grouped", Rows)]
    print(f"planned {[p / row for p in planned]} passes, found {[f / row for f in found]}")
    assert planned[0] == found[0] + row
    assert planned[1] == pytest.approx(found[1], abs=1.5 * row)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_backward_of_experts_begins_with_their_weights(kind: str) -> None:
    """The most that a layer has allocated, with its output in place of the gradient that comes in.

    The second model computes these weights, and what they weight, in float32. An eighth of it is smaller tensors.
    """
    config = {**TINY, "hidden_size": 128, "num_experts": 16, "num_experts_per_tok": 8, "num_hidden_layers": 1}
    config |= {"n_routed_experts": 16, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "model_type": kind}
    net: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="sdpa", experts_implementation="grouped_mm"
    ).bfloat16()
    inputs = torch.randn(1, 1024, 128, dtype=torch.bfloat16, requires_grad=True)
    positions = net.model.rotary_emb(inputs, torch.arange(1024)[None])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = net.model.layers[0](inputs, position_embeddings=positions, attention_mask=None)
        with record_function("measured"):
            out.backward(torch.ones_like(out))
        with record_function("after"):
            pass
    job = Job.of({"attention": "sdpa", "seq_len": 1024})
    planned = layer_activations(from_config(config, where="a test")[0].blocks[0], job, DEVICES["CPU"])
    most = planned.kept - planned.inputs + max(planned.working, planned.weighting)
    print(f"{kind}: planned {most}, of which {planned.weighting} for weights; found {peak_of(profiler)}")
    assert planned.weighting > 2.5 * planned.working
    assert most == pytest.approx(peak_of(profiler), rel=0.13)


@pytest.mark.parametrize("experts", ["grouped", "eager"])
def test_operations_of_experts(experts: str) -> None:
    job = Job.of({"experts": experts})
    counted = [
        [getattr(mode, what) for what in ("kernels", "views") for mode in both(layers, experts, Counting)]
        for layers in (1, 2)
    ]
    kernels, views = operations(shape().blocks[0], job)
    planned = [*map(sum, zip(LAYER_KERNELS, HEAD_NORM_KERNELS, kernels, strict=True))]
    planned += [*map(sum, zip(LAYER_VIEWS, views, strict=True))]
    for ours, few, many in zip(planned, *counted, strict=True):
        assert ours == pytest.approx(many - few, rel=0.15)


class Selections(TorchDispatchMode):
    """Adds up the bytes of gradients as large as what a loop selects an expert or its tokens from."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        whole = {(4, 80, 64), (4, 64, 40), (TOKENS, 64)}
        moved = {"select_backward": [made], "new_zeros": [made], "add": [*args, made]}
        for tensor in moved.get(function.overloadpacket.__name__, []):
            if isinstance(tensor, torch.Tensor) and tuple(tensor.shape) in whole:
                self.nbytes += tensor.numel() * tensor.itemsize
        return made


def test_a_loop_writes_a_whole_gradient_for_each_expert() -> None:
    job = Job.of({"experts": "eager"})
    planned = sum(selected_nbytes(4, elements, job) for elements in (4 * 80 * 64, 4 * 64 * 40, TOKENS * 64))
    found = both(1, "eager", Selections)[1].nbytes
    print(f"planned {planned}, found {found}")
    assert planned == pytest.approx(found, rel=0.05)
    assert selected_nbytes(4, TOKENS * 64, Job()) == 0


@pytest.mark.parametrize(
    ("experts", "per_token", "width", "milliseconds"), [(128, 8, 768, 10.218), (512, 10, 512, 11.411)]
)
def test_a_grouped_forward_takes_what_was_measured(
    experts: int, per_token: int, width: int, milliseconds: float
) -> None:
    """ByteDance-Seed/VeOmni, pull request 460, on an H100: 32,768 tokens of width 2048."""
    values = {**MODELS["Qwen3-30B-A3B"], "num_experts": experts, "num_experts_per_tok": per_token}
    unit = from_config({**values, "moe_intermediate_size": width}, where="a test")[0].units[0]
    only = dataclasses.replace(unit, parameters=tuple(p for p in unit.parameters if ".experts." in p.name))
    job, device = Job.of({"seq_len": 32768}), DEVICES["H100"]
    assert only.block is not None
    passes = (2 * 2048 + 3 * width + 3 * 2048) * 2 * per_token * job.tokens / device.memory_speed
    seconds = (
        forward_flops(only, job) / (device.flops * device.efficiency) + added_seconds(only, job, device)[0] + passes
    )
    print(f"planned {1e3 * seconds:.2f} ms, measured {milliseconds}")
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.07)


def test_few_rows_take_as_long_as_reading_the_weights() -> None:
    unit, device = load_model("Qwen3-30B-A3B")[0].units[0], DEVICES["H100"]
    stacks = sum(p.numel for p in unit.parameters if ".experts." in p.name)
    for experts in ("grouped", "kernel"):
        job = Job.of({"experts": experts, "seq_len": 128})  # 8 rows each
        work = 2 * stacks * 8 / (device.flops * device.efficiency)
        assert added_seconds(unit, job, device)[0] + work >= 2 * stacks / device.memory_speed
    dense = load_model("Llama-3.1-8B")[0].units[0]
    assert added_seconds(dense, Job(), device) == (0.0, 0.0)


def plan(**job: Any) -> Plan:
    settings = {"seq_len": 4096, "checkpointing": "full", "loss": "fused", **job}
    return evaluate(load_model("Qwen3-30B-A3B")[0], Job.of(settings), parse_cluster("8xH100"))


def test_a_loop_waits_for_the_host_and_kernels_for_experts_are_faster() -> None:
    loop, grouped, kernel = (plan(experts=experts).time.total for experts in ("eager", "grouped", "kernel"))
    assert loop > 1.5 * grouped > 1.5 * kernel
    assert plan(ep=8).traffic.ep_nbytes > 1.3 * plan(ep=8, experts="kernel").traffic.ep_nbytes


def test_a_token_is_sent_once_to_each_rank_and_each_host() -> None:
    """DeepEP, against tokens whose experts are drawn: 4 of 64 ranks, of which 8 share a host."""
    chosen, drawn = 4, random.Random(0)
    tokens = [[drawn.randrange(64) for _ in range(chosen)] for _ in range(20000)]
    ranks = sum(len({rank for rank in token if rank}) for token in tokens) / len(tokens)
    hosts = sum(len({rank // 8 for rank in token if rank // 8}) for token in tokens) / len(tokens)
    settings = {"ep": 64, "experts": "kernel", "ep_imbalance": 1.0, "seq_len": 4096}
    there = evaluate(load_model("gpt-oss-120b")[0], Job.of(settings), parse_cluster("64xH100"))
    token = 2880 * 2
    assert there.traffic.ep_nbytes / (36 * 4 * 4096 * token) == pytest.approx(ranks, rel=0.01)
    message = Message("ep", ranks * token, 64, 1, chosen=chosen)
    assert message.links(8)[1] == pytest.approx(hosts * token, rel=0.01)
