"""What training adapters on a base in 4 bits needs, parts of it on the host: planned and allocated, within 6 %.

pytest tests/plan/test_plan_qlora.py -m full
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard.engine.step.plain_tensors import as_local
from fullshard.features import MixedPrecisionPolicy, OffloadPolicy, shard_model
from fullshard.features.offload.host import Host
from fullshard.features.quantized_weights.quantize import quantize
from fullshard.features.quantized_weights.scales import expose_scales
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.unit_selection import unit_modules
from fullshard.plan.families import from_config
from fullshard.plan.hardware import DEVICES
from fullshard.plan.job import Job
from fullshard.plan.layout import lay_out
from fullshard.plan.memory import Memory, memory_of
from fullshard.plan.methods import apply_method
from fullshard.plan.route import Route
from fullshard.plan.schedule import predict_step
from fullshard.plan.setting import PlanSetting
from tests.distributed import run_ranks

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOKENS, RANKS = 64, 2


def job_of(settings: dict[str, Any]) -> Job:
    fixed = {"method": "qlora", "checkpointing": "full", "precision": "no", "attention": "sdpa", "seq_len": TOKENS}
    return Job.of({**fixed, **settings})


def build(dtype: torch.dtype, form: str | None) -> nn.Module:
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    config = AutoConfig.for_model(**CONFIG)
    config.use_cache = False
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head" and form is None:
            packed = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
            )
            packed.weight = bnb.nn.Params4bit(layer.weight.data, False, quant_type="nf4", module=packed)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, packed)
    adapted: nn.Module = get_peft_model(model.to("cpu"), LoraConfig(r=8, target_modules="all-linear"))
    if form is None:
        expose_scales(adapted)
    else:
        quantize(adapted, form)
    return adapted


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(TOKENS)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def host_marked() -> Iterator[None]:
    empty: Any = Host.empty

    def marked(host: Host, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with record_function("host"):
            out: torch.Tensor = empty(host, numel, dtype)
            return out

    vars_of: Any = Host
    vars_of.empty = marked
    try:
        yield
    finally:
        vars_of.empty = empty


def measure(settings: dict[str, Any]) -> int:
    """Most live bytes of a step that are not the host's, the optimizer's state left out where it is there."""
    os.environ.update(FULLSHARD_COMM="gloo", FULLSHARD_OFFLOAD="rehearse")
    on_host = job_of(settings).on_host
    with host_marked(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build(getattr(torch, settings["base_dtype"]), settings.get("quantize"))
        units = unit_modules(model)
        checkpoint_modules(model, units)
        offload = OffloadPolicy(compute_shards=on_host.compute_shards, main_weights=on_host.main_weights)
        shard_model(model, unit_modules=units, offload_policy=offload, mp_policy=MixedPrecisionPolicy())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        step(model, optimizer)
        step(model, optimizer)
        with record_function("measured"):
            step(model, optimizer)
        with record_function("after"):
            pass
    state = sum(t.nbytes for s in optimizer.state.values() for t in as_local(s).values() if t.ndim > 0)
    return peak_of(profiler) - (state if on_host.optimizer_state else 0)


def peak_of(profiler: Any) -> int:
    """Return the most live bytes between the marks, host memory left out."""
    found: list[tuple[int, int, int, bool]] = []
    marks: dict[str, int] = {}

    def walk(event: Any, on_host: bool) -> None:
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, on_host))
        elif event.name in ("measured", "after"):
            marks[event.name] = event.start_time_ns
        for child in event.children:
            walk(child, on_host or event.name == "host")

    for event in profiler.profiler.kineto_results.experimental_event_tree():
        walk(event, False)
    live = most = 0
    there = set()
    for moment, place, nbytes, on_host in sorted(found):
        if on_host and nbytes > 0:
            there.add(place)
        elif nbytes < 0 and place in there:
            there.remove(place)
        else:
            live += nbytes
        if marks["measured"] <= moment < marks["after"]:
            most = max(most, live)
    return most


def planned(settings: dict[str, Any]) -> Memory:
    job = job_of(settings)
    shape = apply_method(from_config(CONFIG, where="test")[0], job)
    layout = lay_out(shape, strategy=job.row, world_size=RANKS, dtypes=job.dtypes, offload=job.on_host)
    route = Route.of(RANKS, on_cpu=True, per_host=None)
    setting = PlanSetting(shape, layout, job, DEVICES["CPU"], on_host=job.on_host, route=route)
    return memory_of(predict_step(layout, job.schedule), setting, ranks_per_host=RANKS)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offload", [{}, {"offload": True}, {"offload_compute_shards": True}], ids=str)
def test_peak_of_four_bits_with_adapters(offload: dict[str, Any], dtype: str) -> None:
    """Adapters are float32: on a base in bfloat16 each keeps a float32 copy of what it reads."""
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    settings = {"base_dtype": dtype, **offload}
    peak = planned(settings).peak_of_step
    for most in run_ranks(measure, RANKS, settings):
        print(f"{settings}: planned {peak}, found {most}, {peak / most:.3f}")
        assert peak == pytest.approx(most, rel=0.06)


@pytest.mark.full
@pytest.mark.parametrize("form", ["nf4", "nf4-double", "mxfp4", "fp8"])
@pytest.mark.parametrize("offload", [{}, {"offload_compute_shards": True}], ids=str)
def test_peak_of_weights_quantised_at_rest(offload: dict[str, Any], form: str) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    settings = {"base_dtype": "bfloat16", "method": "lora", "quantize": form, **offload}
    peak = planned(settings).peak_of_step
    for most in run_ranks(measure, RANKS, settings):
        print(f"{settings}: planned {peak}, found {most}, {peak / most:.3f}")
        assert peak == pytest.approx(most, rel=0.05)
