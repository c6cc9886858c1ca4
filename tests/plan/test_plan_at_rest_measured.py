"""Weights in a stored form: what the planner takes to be one, and what ranks allocate and send, planned and found.

pytest tests/plan/test_plan_at_rest_measured.py
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard import Accelerator, plan_model, quantize
from fullshard.api.planning import model_shape
from fullshard.core.errors import ConfigError
from fullshard.engine.lookup import units_of
from fullshard.features import MixedPrecisionPolicy, shard_model
from fullshard.features.quantized_weights.at_rest import DecodedBuffer
from fullshard.features.quantized_weights.marks import MARKS
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.unit_selection import unit_modules
from fullshard.plan.families import CONVERTED_TARGETS, from_config
from fullshard.plan.job import Job
from fullshard.plan.methods import apply_method
from tests.distributed import run_ranks
from tests.plan.allocations import RANKS, TOKENS, measured, planned, step
from tests.plan_check import PlanCheck

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
    "mixtral": {**MIXTURE, "model_type": "mixtral", "moe_intermediate_size": 512},
    "gpt_oss": {**MIXTURE, "model_type": "gpt_oss"},
    "glm4_moe": {**MIXTURE, "model_type": "glm4_moe", "n_routed_experts": 16, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **MIXTURE, **LATENT, "model_type": "deepseek_v3", "n_routed_experts": 16, "first_k_dense_replace": 1,
        "num_key_value_heads": 8, "head_dim": 16,
    },
    "qwen2_moe": {**MIXTURE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
}  # fmt: skip
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize("values", FAMILIES.values(), ids=FAMILIES)
def test_the_planner_quantizes_what_the_engine_does(values: dict[str, Any]) -> None:
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


def test_the_planner_knows_which_experts_peft_adapts() -> None:
    from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN as PATTERNS

    converted = {
        name for name, pattern in {**PATTERNS, "mixtral": "mixtral"}.items() if pattern in ("mixtral", "qwen2_moe")
    }
    text_models = {name for name in converted if "omni" not in name and name != "beam" and name.islower()}
    assert set(CONVERTED_TARGETS) == text_models


_KNOWN_AS = {"mixtral": "w1,w2,w3,gate"}


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj", "projections"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gpt2"}))
def test_adapters_are_planned_where_peft_puts_them(family: str, targets: str) -> None:
    values = FAMILIES[family]
    targets = targets.replace("projections", _KNOWN_AS.get(family, "gate_proj,up_proj,down_proj"))
    targets = "o_proj,v_proj" if (family, targets[:4]) == ("gpt_oss", "gate") else targets
    targets = "o_proj,kv_b_proj" if (family, targets[:4]) == ("deepseek_v3", "q_pr") else targets
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
        names = targets if targets == "all-linear" else targets.split(",")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names))
    job = Job.of({"method": "lora", "lora_rank": 4, "lora_targets": targets})
    shape = apply_method(from_config(values, where="test")[0], job)
    found = {n.removeprefix("base_model.model."): (*p.shape,) for n, p in adapted.named_parameters() if p.requires_grad}
    assert {p.name: p.shape for p in shape.parameters if p.trainable} == found
    assert any(p.folded_rank for p in shape.parameters) == any("experts.lora" in name for name in found)
    of_object = model_shape(adapted)
    assert [block.adapters for block in shape.blocks] == [block.adapters for block in of_object.blocks]


@pytest.mark.parametrize(
    ("family", "targets", "said"),
    [
        ("qwen3_moe", "w1,w2,w3", "qwen3_moe has no linear layer named w1, w2, w3"),
        ("mixtral", "w1,w2", "mixtral stores w1 and w3 in one parameter, gate_up_proj"),
        ("qwen3_moe", "all-linear", "lora_dropout 0.1: PEFT has no dropout for adapters of stacked experts"),
    ],
)
def test_targets_that_peft_refuses(family: str, targets: str, said: str) -> None:
    job = Job.of({"method": "lora", "lora_targets": targets, "lora_dropout": 0.1})
    with pytest.raises(ConfigError, match=said):
        apply_method(from_config(FAMILIES[family], where="test")[0], job)


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


def measure(form: str, dtype: str) -> tuple[int, list[int], list[int]]:
    """Most live bytes of a step; bytes at rest and of a message of each coded bucket."""
    os.environ["FULLSHARD_COMM"] = "gloo"
    torch.compiler.set_stance("force_eager")  # bitsandbytes compiles what it has no kernels for

    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = build(dtype)
        quantize(model, form)
        units = unit_modules(model)
        checkpoint_modules(model, units)
        shard_model(model, unit_modules=units, mp_policy=MixedPrecisionPolicy(), device=torch.device("cpu"))
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    most, model, _ = measured(make)
    buckets = [
        bucket for unit in units_of(model) for bucket in unit.buckets if isinstance(bucket.buffer, DecodedBuffer)
    ]
    messages = [bucket.buffer._message.full.numel() // RANKS for bucket in buckets]  # type: ignore[attr-defined]
    return most, [bucket.main.nbytes for bucket in buckets], messages


_MORE = [("nf4-double", "float32"), ("fp4", "float32"), ("int8", "float32"), ("mxfp4", "bfloat16"), ("fp8", "bfloat16")]


@pytest.mark.parametrize(
    ("form", "dtype"), [("nf4", "bfloat16"), *(pytest.param(*each, marks=pytest.mark.full) for each in _MORE)]
)
def test_bytes_at_rest_of_messages_and_of_a_step(form: str, dtype: str) -> None:
    memory, layout = planned(MIXTURE, job_of(form, dtype))
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


def test_a_prepared_model_is_quantized_as_set_and_as_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(check_prepared, RANKS) == [[]] * RANKS
    Accelerator(cpu=True, fsdp_plugin={"quantize": "int8"}).prepare(build("float32"))
    assert "int8 at rest: linear layers" in capsys.readouterr().err
