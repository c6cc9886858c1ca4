"""Shapes of families that the planner does not know itself: as Transformers builds them, counted on the meta device.

pytest tests/plan/test_plan_counted.py
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

from fullshard.api.counting import count
from fullshard.core.errors import ConfigError
from fullshard.plan import counted as counted_shapes
from fullshard.plan.counted import counted, is_known_to_transformers, written
from fullshard.plan.evaluate import evaluate
from fullshard.plan.families import FAMILIES, from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_model
from fullshard.plan.shapes import Block
from fullshard.plan.work import forward_flops

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 90}
GRANITE = {"model_type": "granite", **SMALL, "num_key_value_heads": 2}
MIXTURE = {"model_type": "olmoe", **SMALL, "num_experts": 4, "num_experts_per_tok": 2}


def numel_on_meta(values: dict[str, Any], factory: Any = AutoModelForCausalLM) -> int:
    with torch.device("meta"):
        model = factory.from_config(AutoConfig.for_model(**values))
    return sum(parameter.numel() for parameter in model.parameters())


BERT = {"model_type": "bert", **SMALL, "max_position_embeddings": 128}


@pytest.mark.parametrize("values", [GRANITE, MIXTURE, BERT], ids=["granite", "olmoe", "bert"])
def test_parameters_are_those_of_the_model(values: dict[str, Any]) -> None:
    shape = count(values)
    assert shape.numel == numel_on_meta(values)
    assert len(shape.blocks) == 3 and (shape.vocab, shape.hidden) == (90, 64)
    assert shape.positions == values.get("max_position_embeddings")
    assert counted_shapes._SHAPES.validate_json(written(shape)) == shape


def test_layers_are_described_by_the_fields() -> None:
    assert count(GRANITE).blocks[0] == Block(64, 4, 2, 16, 96)


def test_experts_that_a_token_does_not_pass_are_not_counted() -> None:
    shape = count(MIXTURE)
    every = sum(p.numel for p in shape.units[0].parameters if len(p.shape) > 1)
    experts = sum(p.numel for p in shape.units[0].parameters if ".experts." in p.name)
    assert forward_flops(shape.units[0], Job.of({"seq_len": 1})) == pytest.approx(2 * (every - experts / 2), rel=0.01)


def test_models_that_are_no_decoders() -> None:
    vision = {"model_type": "vit", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape = count({**vision, "num_attention_heads": 4})
    assert shape.numel == numel_on_meta({**vision, "num_attention_heads": 4}, AutoModel) and shape.vocab == 0
    assert evaluate(shape, Job.of({}), parse_cluster("2xA10G")).fits


@pytest.mark.full
def test_an_encoder_is_counted_with_its_decoder() -> None:
    """Whisper's decoder alone would be a causal language model, too; a file that names an architecture has that."""
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    whisper = {"model_type": "whisper", "d_model": 64, "vocab_size": 90, "pad_token_id": 0, **layers, **heads}
    shape = count(whisper)
    assert shape.numel == numel_on_meta(whisper, AutoModelForSpeechSeq2Seq) and shape.encoder_decoder
    assert len(shape.blocks) == 4 and shape.positions == 448
    decoder = count({**whisper, "architectures": ["WhisperForCausalLM"]})
    assert decoder.numel == numel_on_meta(whisper) < shape.numel


def test_a_process_of_its_own_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole command's way; the second time nothing is started."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(GRANITE), encoding="utf-8")
    shape, notes = load_model(str(tmp_path))
    assert shape.numel == numel_on_meta(GRANITE) and "as Transformers builds it" in notes[0]
    (kept,) = (tmp_path / "cache/fullshard/shapes").iterdir()
    monkeypatch.setattr("subprocess.run", None)
    assert load_model(str(tmp_path))[0] == shape
    kept.write_text("{", encoding="utf-8")
    with pytest.raises(TypeError):  # it would be counted again
        load_model(str(tmp_path))


@pytest.mark.full
def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    """As Transformers writes them: Bamba's largest time step is infinite."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "vocab_size": 100}
    AutoConfig.for_model("bamba", **sizes).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "__float__" in text
    assert count(json.loads(text)).numel > 0


@pytest.mark.full
def test_what_transformers_cannot_build_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot build the model"):
        counted({**GRANITE, "hidden_size": "wide"}, where="config.json")


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_library_that_a_model_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="requires the timm library\nhint: pip install timm"):
        counted({"model_type": "gemma3n"}, where="config.json")


def test_what_transformers_knows() -> None:
    assert is_known_to_transformers("granite") and not is_known_to_transformers("brand_new")
    assert not is_known_to_transformers("")
    with pytest.raises(ConfigError, match="is unknown"):
        from_config({"model_type": "brand_new"}, where="x")
    assert "granite" not in FAMILIES
