"""Shapes the planner reads from a configuration are those of the real model.

pytest tests/test_plan_models.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from fullshard.api.planning import model_shape
from fullshard.core.errors import ConfigError
from fullshard.plan.families import FAMILIES, from_config
from fullshard.plan.job import Job
from fullshard.plan.library import MODELS, load_model
from fullshard.plan.time import forward_flops

AUTO = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM, "roberta": AutoModelForMaskedLM}
PUBLISHED = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Mistral-7B": 7_241_732_096,
    "Mixtral-8x7B": 46_702_792_704,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "GPT-2": 124_439_808,
    "GPT-2-XL": 1_557_611_200,
}
"""Parameters as the safetensors metadata on the models' pages gives them."""


def meta_model(values: dict[str, Any]) -> Any:
    kind = values["model_type"]
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        return AUTO.get(kind, AutoModelForCausalLM).from_config(config)


def small(kind: str, **changes: Any) -> dict[str, Any]:
    """The family's own default configuration with three layers."""
    config = AutoConfig.for_model(kind)
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if hasattr(config, name):
            setattr(config, name, 3)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:3]
    return {**config.to_dict(), **changes}


CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in FAMILIES),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 64}),
    ("gpt2", {"n_inner": 1000}),
    ("t5", {"feed_forward_proj": "gated-gelu", "is_gated_act": True, "num_decoder_layers": 2}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ("qwen3", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=[f"{k}-{'-'.join(c) or 'default'}" for k, c in CASES])
def test_every_parameter_of_every_unit(kind: str, changes: dict[str, Any]) -> None:
    """Names, shapes, order and owning unit, read from the file and read from the modules."""
    values = small(kind, **changes)
    planned, notes = from_config(values, where="config.json")
    model = meta_model(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        real = model_shape(model)
    assert notes == []
    assert [unit.name for unit in planned.units] == [unit.name for unit in real.units]
    for ours, theirs in zip(planned.units, real.units, strict=True):
        assert [(p.name, p.shape) for p in ours.parameters] == [(p.name, p.shape) for p in theirs.parameters]
        assert ours.block == theirs.block
    assert [u.name for u in planned.in_call_order()] == [u.name for u in real.in_call_order()]
    assert planned.numel == sum(parameter.numel() for parameter in model.parameters())
    embeddings = {p.name for p in real.parameters if p.role == "embedding"}
    assert {p.name for p in planned.parameters if p.role == "embedding"} == embeddings


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_known_models_have_their_published_size(name: str) -> None:
    assert load_model(name)[0].numel == PUBLISHED[name]


def test_names_are_found_however_they_are_written() -> None:
    for text in ("llama-2-7b", "meta-llama/Llama-2-7b-hf", "LLAMA 2 7B", "gpt2", "mixtral_8x7b"):
        assert load_model(text)[0].name in MODELS


@pytest.mark.parametrize("text", ["7B", "124m", "1.3e9", "70b", "405B"])
def test_a_number_of_parameters(text: str) -> None:
    model, notes = load_model(text)
    count = {"7B": 7e9, "124m": 124e6, "1.3e9": 1.3e9, "70b": 70e9, "405B": 405e9}[text]
    assert model.numel == pytest.approx(count, rel=1e-3)
    assert "planned as a Llama" in notes[0]


def test_a_number_with_shape_flags() -> None:
    shape: dict[str, int | None] = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 128256}
    model, _ = load_model("8.030261248B", shape)
    block = model.blocks[0]
    assert (len(model.blocks), block.hidden, block.kv_heads, block.intermediate) == (32, 4096, 8, 14336)


def test_active_parameters_of_a_mixture() -> None:
    """Mixtral: 12.9 B of 46.7 B are used per token (model card), 131 M of which are the embedding table."""
    one_token = Job.of({"seq_len": 1})
    active = sum(forward_flops(unit, one_token) for unit in load_model("Mixtral-8x7B")[0].units) / 2
    assert active == pytest.approx(12.88e9 - 0.131e9, rel=2e-3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Lama-2-7B", "Llama-2-7B"),
        ("nothing-like-it", "known names"),
    ],
)
def test_unknown_names_get_suggestions(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_model(text)


def test_faults_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, expected in [
        ("{", "config.json:1:2"),
        ("[]", "expected an object"),
        ("{}", "no model_type"),
        (json.dumps({"model_type": "lama"}), "did you mean 'llama'"),
        (json.dumps({"model_type": "llama", "hidden_size": 64}), "no field num_attention_heads"),
        (json.dumps({**small("llama"), "vocab_size": -1}), "vocab_size is -1"),
        (json.dumps({**small("llama"), "model_type": "brand_new", "num_experts": 4}), "mixture of experts"),
    ]:
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=expected):
            load_model(str(tmp_path))


def test_an_unknown_dense_model_is_planned_as_a_llama_and_said_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**small("llama"), "model_type": "brand_new"}), encoding="utf-8")
    model, notes = load_model(str(tmp_path))
    assert "planned as a Llama" in notes[0]
    assert model.numel == from_config(small("llama"), where="x")[0].numel


def test_shape_flags_need_a_number() -> None:
    with pytest.raises(ConfigError, match="layers: shape flags go with a number"):
        load_model("Llama-2-7B", {"layers": 3})


def test_planning_imports_no_torch() -> None:
    code = "import sys, fullshard.plan.library as l; l.load_model('Llama-3.1-405B'); sys.exit('torch' in sys.modules)"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert time.monotonic() - start < 10
