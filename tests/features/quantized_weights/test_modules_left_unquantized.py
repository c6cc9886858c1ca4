"""What stays in 16 or 32 bits of a model that was to be quantized: counted alike by the planner, said, and refused.

pytest tests/features/quantized_weights/test_modules_left_unquantized.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import fullshard
from fullshard import Accelerator
from fullshard.checkpoint.pretrained import _replace_linear_layers
from fullshard.checkpoint.quantities import conversion_of as conversion_of_model
from fullshard.checkpoint.quantities import quantize_rest
from fullshard.core.errors import ConfigError, WrapError
from fullshard.engine.lookup import units_of
from fullshard.features.quantized_weights.codecs import codec
from fullshard.features.quantized_weights.marks import form_at
from fullshard.features.quantized_weights.scales import outline
from fullshard.plan.evaluate import evaluate, notes_of
from fullshard.plan.families import from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.methods import apply_method, conversion_of

peft = pytest.importorskip("peft")
parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIXTURE = {**LLAMA, **_EXPERTS, "model_type": "qwen3_moe"}
CONFIGS = {
    "llama": LLAMA,
    "qwen3_moe": MIXTURE,
    "mixtral": {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2, "model_type": "mixtral"},
    "gpt_oss": {**LLAMA, **_EXPERTS, "model_type": "gpt_oss"},
    "qwen2_moe, one dense layer": {
        **LLAMA, **_EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "mlp_only_layers": [1],
    },
}  # fmt: skip
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}


def with_adapters(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS)
def test_the_planner_counts_what_bitsandbytes_leaves(values: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    _replace_linear_layers(model, BitsAndBytesConfig(**FOUR_BITS))
    outline(model)
    quantize_rest(model, freezes=True)
    found = conversion_of_model(with_adapters(model))
    job = Job.of({"method": "qlora", "lora_targets": "q_proj,o_proj"})
    planned = conversion_of(from_config(values, where="test")[0], job)
    assert found == dataclasses.replace(planned, form="fp4" if planned.at_rest else "")
    assert found.stacked == 0 and (found.at_rest > 0) == (found.unadapted > 0) == (values is not LLAMA)


@pytest.mark.parametrize("values", CONFIGS.values(), ids=CONFIGS)
def test_the_planner_knows_what_is_quantized_at_rest(values: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).requires_grad_(False)
    marked = fullshard.quantize(model, "nf4")
    job = Job.of({"method": "lora", "quantize": "nf4", "lora_targets": "q_proj"})
    shape = apply_method(from_config(values, where="test")[0], job)
    modules = dict(model.named_modules())
    for parameter in shape.parameters:
        path, _, attribute = parameter.name.rpartition(".")
        if "lora" not in parameter.name:
            assert form_at(modules[path], attribute) == parameter.form, parameter.name
    assert sum(marked.marked.values()) == sum(p.numel for p in shape.parameters if p.form)


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIXTURE)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("loaded", ["by each rank", "whole"])
def test_experts_are_at_rest_in_the_form_of_the_layers(
    loaded: str, bits: int, mixture: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    config = BitsAndBytesConfig(**FOUR_BITS) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    options = {"quantization_config": config, "dtype": torch.float32}
    said = f"are {'fp4' if bits == 4 else 'int8'} at rest and in messages"
    if loaded == "whole":
        model = AutoModelForCausalLM.from_pretrained(mixture, **options)
    else:
        model = fullshard.from_pretrained(AutoModelForCausalLM, mixture, **options)
        assert said in caplog.text
    sharded = Accelerator(cpu=True).prepare(with_adapters(model))
    assert said in capsys.readouterr().err
    coded = {p.name for u in units_of(sharded) for b in u.buckets if b.plan.form for p in b.sharded_parameters}
    assert {str(name).rpartition("layers.")[2] for name in coded} == {
        f"{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")
    }
    ids = torch.arange(16)[None]
    sharded(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in sharded.parameters() if p.requires_grad)


def test_experts_that_are_trained_are_refused(mixture: Path) -> None:
    config = BitsAndBytesConfig(**FOUR_BITS)
    model: Any = AutoModelForCausalLM.from_pretrained(mixture, quantization_config=config, dtype=torch.float32)
    model = with_adapters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "experts" in name)
    with pytest.raises(ConfigError, match=r"stay in 16 or 32 bits.*experts, stacked.*\nhint: freeze the weights"):
        Accelerator(cpu=True).prepare(model)


@pytest.mark.parametrize("form", ["nf4-double", "int8"])
def test_a_model_is_read_into_a_form(form: str, mixture: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = fullshard.from_pretrained(AutoModelForCausalLM, mixture, quantize=form, dtype=torch.float32)
    assert f"{form} at rest: linear layers 24.6 k (10.6%), stacked weights 196.6 k (85.2%); left as" in caplog.text
    assert not any(p.requires_grad for n, p in model.named_parameters() if "experts" in n or "q_proj" in n)
    sharded: Any = Accelerator(cpu=True).prepare(with_adapters(model))
    whole = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).state_dict()
    for name, parameter in sharded.named_parameters():
        if name.endswith(("experts.down_proj", "q_proj.base_layer.weight", "norm.weight")):
            original = whole[name.removeprefix("base_model.model.").replace(".base_layer", "")]
            parts = codec(form).encode(original.flatten())
            decoded = torch.empty(original.numel())
            codec(form).decode(parts, decoded)
            expected = original if "norm" in name else decoded.view_as(original)
            assert torch.equal(parameter.full_tensor(), expected)
    with pytest.raises(ConfigError, match="did you mean 'nf4'"):
        fullshard.from_pretrained(AutoModelForCausalLM, mixture, quantize="nf5")


def test_what_its_hint_says_is_taken(
    mixture: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    left = BitsAndBytesConfig(**FOUR_BITS, llm_int8_skip_modules=["lm_head", "experts"])
    model: Any = fullshard.from_pretrained(AutoModelForCausalLM, mixture, quantization_config=left, dtype=torch.float32)
    assert "stay in 16 or 32 bits" in caplog.text
    Accelerator(cpu=True).prepare(with_adapters(model))
    told = capsys.readouterr().err
    assert "stay in 16 or 32 bits" in told and "weights of experts have no adapter and are not trained" in told

    model = AutoModelForCausalLM.from_pretrained(
        mixture, quantization_config=BitsAndBytesConfig(**FOUR_BITS), dtype=torch.float32
    )
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(layer.mlp.experts, name)
    assert conversion_of_model(model).stacked == 0
    sharded = Accelerator(cpu=True).prepare(with_adapters(model))
    assert "weights of experts have no adapter" in capsys.readouterr().err
    ids = torch.arange(16)[None]
    sharded(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in sharded.parameters() if p.requires_grad)


def test_a_setting_has_all_large_weights_quantized(capsys: pytest.CaptureFixture[str]) -> None:
    model = with_adapters(AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIXTURE)))
    sharded, _, _ = fullshard.accelerate(model, config={"quantize": "int8"})
    said = "int8 at rest: linear layers 24.6 k"
    assert said in capsys.readouterr().err
    assert {b.plan.form.name for u in units_of(sharded) for b in u.buckets if b.plan.form} == {"int8"}
    with pytest.raises(ConfigError, match=r"quantize.*nf4"):
        fullshard.accelerate(model, config={"quantize": "nf5"})
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    with pytest.raises(WrapError, match=r"no weight of LlamaForCausalLM can be stored as nf4.*trained"):
        fullshard.accelerate(whole, config={"quantize": "nf4"})


def test_experts_with_adapters_are_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MIXTURE))
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    Accelerator(cpu=True).prepare(peft.get_peft_model(model, peft.LoraConfig(r=4, target_parameters=names)))
    assert "adapter and" not in capsys.readouterr().err


def test_a_plan_says_the_same() -> None:
    cluster, mixture, llama = parse_cluster("8xH100"), *(from_config(v, where="test")[0] for v in (MIXTURE, LLAMA))
    notes = notes_of(evaluate(mixture, Job.of({"method": "qlora"}), cluster))
    assert [n for n in notes if "stay in 16 or 32 bits; 196.6 k without such a layer are nf4-double at rest" in n]
    notes = notes_of(evaluate(llama, Job.of({"method": "qlora"}), cluster))
    assert [n for n in notes if "% of the weights (8.5 k of 82.2 k) stay in 16 or 32 bits" in n]
    assert not [n for n in notes if "adapter" in n]
    for targets, has_adapters in (("q_proj", False), (None, True)):
        notes = notes_of(evaluate(mixture, Job.of({"method": "lora", "lora_targets": targets}), cluster))
        assert bool([n for n in notes if "experts have no adapter" in n]) != has_adapters


def test_two_forms_of_one_weight_are_an_error() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).requires_grad_(False)
    fullshard.quantize(model, "nf4")
    fullshard.quantize(model, "nf4")
    with pytest.raises(ConfigError, match=r"Linear.weight is already marked as nf4, not int8"):
        fullshard.quantize(model, "int8")
