"""What training adapters on a base in 4 bits needs, parts of it on the host: planned and allocated, within 6 %.

pytest tests/plan/test_plan_qlora.py -m full
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard.engine.step.plain_tensors import as_local
from fullshard.features import MixedPrecisionPolicy, OffloadPolicy, shard_model
from fullshard.features.quantized_weights.quantize import quantize
from fullshard.features.quantized_weights.scales import expose_scales
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.unit_selection import unit_modules
from fullshard.plan.families import from_config
from fullshard.plan.job import Job
from fullshard.plan.methods import EXPERTS_FORM
from tests.distributed import run_ranks
from tests.plan.allocations import RANKS, TOKENS, measured, planned

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 32}
TOYS = {
    "llama": {**CONFIG, "num_hidden_layers": 32},
    "mixture": {**CONFIG, **EXPERTS, "model_type": "qwen3_moe", "num_hidden_layers": 32},
}
CARD, MODEL = 24, 140
"""GB of a card, and of the weights of a model of 70 billion parameters in bfloat16."""


def job_of(settings: dict[str, Any]) -> Job:
    fixed = {"method": "qlora", "checkpointing": "full", "precision": "no", "attention": "sdpa", "seq_len": TOKENS}
    return Job.of({**fixed, **settings})


def build(values: dict[str, Any], job: Job) -> nn.Module:
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    config, dtype = AutoConfig.for_model(**values), getattr(torch, job.stored_dtype)
    config.use_cache = False
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head" and job.quantize is None:
            packed = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
            )
            packed.weight = bnb.nn.Params4bit(layer.weight.data, False, quant_type="nf4", module=packed)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, packed)
    adapted: nn.Module = get_peft_model(model.to("cpu"), LoraConfig(r=8, target_modules="all-linear"))
    if job.quantize is None:
        expose_scales(adapted)
    if job.quantize or "num_experts" in values:
        quantize(adapted, job.quantize or EXPERTS_FORM)
    return adapted


def measure(values: dict[str, Any], settings: dict[str, Any]) -> int:
    """Return the most live bytes of a step that are not the host's, nor the optimizer's state where it is there."""
    os.environ.update(FULLSHARD_COMM="gloo", FULLSHARD_OFFLOAD="rehearse")
    torch.compiler.set_stance("force_eager")  # bitsandbytes compiles what it has no kernels for
    job = job_of(settings)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build(values, job)
        units = unit_modules(model)
        checkpoint_modules(model, units)
        offload = OffloadPolicy(compute_shards=job.on_host.compute_shards, main_weights=job.on_host.main_weights)
        shard_model(model, unit_modules=units, offload_policy=offload, mp_policy=MixedPrecisionPolicy())
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    most, _, optimizer = measured(make)
    state = sum(t.nbytes for s in optimizer.state.values() for t in as_local(s).values() if t.ndim > 0)
    return most - (state if job.on_host.optimizer_state else 0)


def check(values: dict[str, Any], settings: dict[str, Any], within: float) -> int:
    """Compare the peak that is planned with what ranks allocate; return the larger of them."""
    peak = planned(values, job_of(settings))[0].peak_of_step
    found: list[int] = run_ranks(measure, RANKS, values, settings)
    for most in found:
        print(f"{values['model_type']} {settings}: planned {peak}, found {most}, {peak / most:.3f}")
        assert peak == pytest.approx(most, rel=within)
    return max(peak, *found)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offload", [{}, {"offload": True}, {"offload_compute_shards": True}], ids=str)
def test_peak_of_four_bits_with_adapters(offload: dict[str, Any], dtype: str) -> None:
    """Adapters are float32: on a base in bfloat16 each keeps a float32 copy of what it reads."""
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    check(CONFIG, {"base_dtype": dtype, **offload}, 0.06)


@pytest.mark.full
@pytest.mark.parametrize("form", ["nf4", "nf4-double", "mxfp4", "fp8"])
@pytest.mark.parametrize("offload", [{}, {"offload_compute_shards": True}], ids=str)
def test_peak_of_weights_quantized_at_rest(offload: dict[str, Any], form: str) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    check(CONFIG, {"base_dtype": "bfloat16", "method": "lora", "quantize": form, **offload}, 0.05)


@pytest.mark.full
@pytest.mark.parametrize("toy", TOYS)
def test_a_toy_of_70b_on_two_cards_of_24_gb(toy: str) -> None:
    """Each rank has the part of the weights' bytes in bfloat16 that such a card has of a 70B's."""
    pytest.importorskip("bitsandbytes", reason="needs the extra `quant`")
    weights = 2 * sum(p.numel for p in from_config(TOYS[toy], where="test")[0].parameters)
    peak = check(TOYS[toy], {"base_dtype": "bfloat16", "offload": True}, 0.06)
    print(f"{toy}: {peak / weights:.3f} of the weights in bfloat16; a card is {CARD / MODEL:.3f}")
    assert peak <= CARD / MODEL * weights
