"""Weights in a stored form: what the planner takes to be one, and what ranks allocate and send, planned and found.

pytest tests/plan/test_plan_at_rest_measured.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard import Accelerator, plan_model, quantize
from fullshard.api.plan_check import PlanCheck
from fullshard.engine.lookup import units_of
from fullshard.features import MixedPrecisionPolicy, shard_model
from fullshard.features.quantized_weights.at_rest import DecodedBuffer
from fullshard.features.quantized_weights.marks import MARKS
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.unit_selection import unit_modules
from fullshard.plan.families import from_config
from fullshard.plan.hardware import DEVICES
from fullshard.plan.job import Job
from fullshard.plan.layout import ModelLayout, lay_out
from fullshard.plan.memory import Memory, memory_of
from fullshard.plan.methods import apply_method
from fullshard.plan.route import Route
from fullshard.plan.schedule import predict_step
from fullshard.plan.setting import PlanSetting
from tests.distributed import run_ranks
from tests.plan.test_plan_qlora import peak_of

pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
peft = pytest.importorskip("peft")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "pad_token_id": None, "use_cache": False,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MIXTURE = {**LLAMA, **EXPERTS, "model_type": "qwen3_moe"}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3_moe": MIXTURE,
    "mixtral": {**MIXTURE, "model_type": "mixtral"},
    "gpt_oss": {**MIXTURE, "model_type": "gpt_oss"},
    "glm4_moe": {**MIXTURE, "model_type": "glm4_moe", "n_routed_experts": 16, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **MIXTURE, **LATENT, "model_type": "deepseek_v3", "n_routed_experts": 16, "first_k_dense_replace": 1,
        "num_key_value_heads": 8, "head_dim": 16,
    },
    "qwen2_moe": {**MIXTURE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
}  # fmt: skip
RANKS, TOKENS = 2, 64
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize("values", FAMILIES.values(), ids=FAMILIES)
def test_the_planner_quantises_what_the_engine_does(values: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    quantize(model.requires_grad_(False), "int8")
    marked = {f"{path}.{name}" for path, module in model.named_modules() for name in vars(module).get(MARKS, {})}
    job = Job.of({"method": "lora", "quantize": "int8"})
    planned = apply_method(from_config(values, where="test")[0], job)
    assert {p.name for p in planned.parameters if p.form} == marked
    of_object = plan_model(model, "8xH100")
    assert {p.name for p in of_object.setting.model.parameters if p.form == "int8"} == marked
    assert of_object.at_rest is not None


def test_a_model_object_is_planned_with_the_setting() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIXTURE)).requires_grad_(False)
    plan = plan_model(model, "8xH100", quantize="nf4")
    quantize(model)
    assert plan.at_rest is not None and plan.at_rest == plan_model(model, "8xH100").at_rest


def job_of(form: str | None, dtype: str) -> Job:
    fixed = {"method": "lora", "checkpointing": "full", "precision": "no", "attention": "sdpa", "seq_len": TOKENS}
    return Job.of({**fixed, "quantize": form, "base_dtype": dtype, "lora_targets": ",".join(TARGETS)})


def build(dtype: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MIXTURE)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=TARGETS))


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(TOKENS)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(form: str, dtype: str) -> tuple[int, list[int], list[int]]:
    """Most live bytes of a step; bytes at rest and of a message of each coded bucket."""
    os.environ["FULLSHARD_COMM"] = "gloo"
    torch.compiler.set_stance("force_eager")  # bitsandbytes compiles what it has no kernels for
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build(dtype)
        quantize(model, form)
        units = unit_modules(model)
        checkpoint_modules(model, units)
        shard_model(model, unit_modules=units, mp_policy=MixedPrecisionPolicy(), device=torch.device("cpu"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        step(model, optimizer)
        step(model, optimizer)
        with record_function("measured"):
            step(model, optimizer)
        with record_function("after"):
            pass
    buckets = [
        bucket for unit in units_of(model) for bucket in unit.buckets if isinstance(bucket.buffer, DecodedBuffer)
    ]
    messages = [bucket.buffer._message.full.numel() // RANKS for bucket in buckets]  # type: ignore[attr-defined]
    return peak_of(profiler), [bucket.main.nbytes for bucket in buckets], messages


def planned(form: str, dtype: str) -> tuple[Memory, ModelLayout]:
    job = job_of(form, dtype)
    shape = apply_method(from_config(MIXTURE, where="test")[0], job)
    layout = lay_out(shape, strategy=job.row, world_size=RANKS, dtypes=job.dtypes)
    route = Route.of(RANKS, on_cpu=True, per_host=None)
    setting = PlanSetting(shape, layout, job, DEVICES["CPU"], route=route)
    return memory_of(predict_step(layout, job.schedule), setting, ranks_per_host=RANKS), layout


_MORE = [("nf4-double", "float32"), ("fp4", "float32"), ("int8", "float32"), ("mxfp4", "bfloat16"), ("fp8", "bfloat16")]


@pytest.mark.parametrize(
    ("form", "dtype"), [("nf4", "bfloat16"), *(pytest.param(*each, marks=pytest.mark.full) for each in _MORE)]
)
def test_bytes_at_rest_of_messages_and_of_a_step(form: str, dtype: str) -> None:
    memory, layout = planned(form, dtype)
    buckets = [bucket for unit in layout.units for bucket in unit.coded]
    for most, at_rest, messages in run_ranks(measure, RANKS, form, dtype):
        print(f"{form} in {dtype}: planned {memory.peak_of_step}, found {most}, {memory.peak_of_step / most:.3f}")
        assert at_rest == [bucket.main_nbytes for bucket in buckets]
        assert messages == [bucket.gather_message_nbytes for bucket in buckets]
        assert memory.peak_of_step == pytest.approx(most, rel=0.05)


def check_prepared() -> list[str]:
    """Return what differs from the plan."""
    accelerator = Accelerator(cpu=True, fsdp_plugin={"quantize": "nf4-double"})
    model = build("float32")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    check = PlanCheck(model, optimizer, Job.of({"method": "lora", "precision": "no"}))
    for _ in range(3):
        step(model, optimizer)
    assert any(bucket.plan.form is not None for unit in units_of(model) for bucket in unit.buckets)
    return [str(found) for found in check.report() if not found.is_as_planned]


def test_a_prepared_model_is_quantised_as_set_and_as_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(check_prepared, RANKS) == [[]] * RANKS
    Accelerator(cpu=True, fsdp_plugin={"quantize": "int8"}).prepare(build("float32"))
    assert "int8 at rest: linear layers" in capsys.readouterr().err
