"""Shapes the planner reads from a configuration are those of the real model.

pytest tests/plan/test_plan_models.py
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from fullshard.api.counting import _build, count
from fullshard.api.planning import model_shape
from fullshard.core.errors import ConfigError
from fullshard.plan import families
from fullshard.plan.families import ESTIMATED, FAMILIES, from_config
from fullshard.plan.job import Job
from fullshard.plan.known_models import ALIASES, MODELS
from fullshard.plan.library import load_model
from fullshard.plan.work import forward_flops

PUBLISHED = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.3-70B": 70_553_706_496,
    "Mistral-7B": 7_241_732_096,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Nemo-12B": 12_247_782_400,
    "Mistral-Small-24B": 23_572_403_200,
    "Mistral-Large-123B": 122_610_069_504,
    "Ministral-8B": 8_019_808_256,
    "Mixtral-8x7B": 46_702_792_704,
    "Mixtral-8x22B": 140_630_071_296,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-Coder-480B-A35B": 480_154_875_392,
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Phi-4": 14_659_507_200,
    "Phi-4-mini": 3_836_021_760,
    "OLMo-2-13B": 13_716_198_400,
    "OLMo-2-32B": 32_234_279_936,
    "OLMo-3-32B": 32_233_522_176,
    "SmolLM2-1.7B": 1_711_376_384,
    "SmolLM3-3B": 3_075_098_624,
    "GPT-2": 124_439_808,
    "GPT-2-XL": 1_557_611_200,
}
"""Parameters as the safetensors metadata on the models' pages gives them."""
WITH_BUFFERS = {
    "DeepSeek-V3": (671_026_419_200, 58 * 256),
    "Kimi-K2": (1_026_408_232_448, 60 * 384),
}
"""The same, and how many of them are the routers' corrections, which are no parameters."""
ACTIVE = {
    "Mixtral-8x7B": (12.9e9, 32000 * 4096),
    "gpt-oss-20b": (3.6e9, 0),
    "gpt-oss-120b": (5.1e9, 0),
    "DeepSeek-V3": (37e9, 0),
    "Kimi-K2": (32e9, 0),
    "Qwen3-30B-A3B": (3.3e9, 151936 * 2048),
    "Qwen3-235B-A22B": (22e9, 0),
    "GLM-4.5": (32e9, 0),
    "GLM-4.5-Air": (12e9, 0),
    "Llama-4-Scout-17B-16E": (17e9, 0),
    "Llama-4-Maverick-17B-128E": (17e9, 0),
}
"""Parameters that a token uses, by the models' cards, and those of the table of words where the card counts them."""


def meta_model(values: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def small(kind: str, **changes: Any) -> dict[str, Any]:
    """The family's own default configuration with three layers."""
    config = AutoConfig.for_model(kind)
    for name in ("num_hidden_layers", "n_layer"):
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
    assert notes == [] or kind in ESTIMATED
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


DEFAULTS = {
    "deepseek_v3": "DeepSeek-V3", "gemma": "Gemma-7B", "gemma2": "Gemma-2-2B", "gpt2": "GPT-2",
    "gpt_oss": "gpt-oss-120b", "llama": "Llama-2-7B", "llama4_text": "Llama-4-Scout-17B-16E", "mistral": "Mistral-7B",
    "mixtral": "Mixtral-8x7B", "smollm3": "SmolLM3-3B",
}  # fmt: skip
"""Families whose configuration's own defaults are a published model's."""

EXPLAINED = {
    ("Phi-3-mini", "window"),  # its file says 2047
    *((f"Gemma-3-{size}", "vocab") for size in ("4B", "12B", "27B")),  # 64 rows more, for pictures
}
"""Where a table rounds, or tells the tokenizer's words from the rows of the model's table."""


@pytest.mark.parametrize("kind", list(DEFAULTS))
def test_shapes_are_the_defaults_of_their_class(kind: str) -> None:
    values, config = MODELS[DEFAULTS[kind]], AutoConfig.for_model(kind)
    values = values.get("text_config", values)
    assert {name: getattr(config, name) for name in values if hasattr(config, name)} == {
        name: value for name, value in values.items() if hasattr(config, name)
    }


def test_shapes_are_those_of_others_tables() -> None:
    """Field by field; each line of the file says where it is from."""
    path = Path(__file__).parents[1] / "fixtures/published_shapes.csv"
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) >= 60
    different = set()
    for line in lines:
        model, _ = load_model(line["model"])
        block = model.blocks[-1]  # of those that differ an ordinary one
        ours = {
            "layers": len(model.blocks), "hidden": block.hidden, "inner": block.intermediate, "heads": block.heads,
            "kv_heads": block.kv_heads, "head_dim": block.head_dim, "vocab": model.vocab,
            "window": max(block.window for block in model.blocks),
        }  # fmt: skip
        unlike = {"DeepSeek-V3": "head_dim", "Qwen3-Next-80B-A3B": "window"}  # several sizes; linear attention
        ours.pop(unlike.get(line["model"], ""), None)
        different |= {(line["model"], name) for name, value in ours.items() if value != int(line[name])}
    assert different == EXPLAINED


@pytest.mark.parametrize("name", list(WITH_BUFFERS))
def test_latent_attention_has_its_published_size(name: str) -> None:
    published, buffers = WITH_BUFFERS[name]
    assert load_model(name)[0].numel == published - buffers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama-2-7b", "Llama-2-7B"),
        ("meta-llama/Llama-2-7b-chat-hf", "Llama-2-7B"),
        ("LLAMA 2 7B", "Llama-2-7B"),
        ("gpt2", "GPT-2"),
        ("mixtral_8x7b", "Mixtral-8x7B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("llama3.1:8b", "Llama-3.1-8B"),
        ("unsloth/Llama-3.2-3B-Instruct-bnb-4bit", "Llama-3.2-3B"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama-4-Scout-17B-16E"),
        ("mistralai/Mistral-7B-v0.1", "Mistral-7B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B"),
        ("mistralai/Mistral-Large-Instruct-2407", "Mistral-Large-123B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("google/gemma-3-27b-it", "Gemma-3-27B"),
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-V3"),
        ("moonshotai/Kimi-K2-Instruct-0905", "Kimi-K2"),
        ("allenai/OLMo-2-1124-13B-Instruct", "OLMo-2-13B"),
    ],
)
def test_names_are_found_however_they_are_written(text: str, expected: str) -> None:
    assert load_model(text)[0].name == expected


def test_other_names_are_of_known_models() -> None:
    assert set(ALIASES.values()) <= MODELS.keys()
    for name in MODELS:
        assert load_model(name)[0].name == name


@pytest.mark.parametrize("text", ["7B", "124m", "1.3e9", "70b", "405B"])
def test_a_number_of_parameters(text: str) -> None:
    model, notes = load_model(text)
    count = {"7B": 7e9, "124m": 124e6, "1.3e9": 1.3e9, "70b": 70e9, "405B": 405e9}[text]
    assert model.numel == pytest.approx(count, rel=1e-3)
    assert "planned as a Llama" in notes[0]


@pytest.mark.parametrize("name", list(ACTIVE))
def test_active_parameters_of_a_mixture(name: str) -> None:
    """Cards round to whole billions and some count the table of words, which multiplies nothing, so within 7 %."""
    published, table = ACTIVE[name]
    one_token = Job.of({"seq_len": 1})
    active = sum(forward_flops(unit, one_token) for unit in load_model(name)[0].units) / 2
    assert active == pytest.approx(published - table, rel=0.07)


@pytest.mark.parametrize("kind", sorted(ESTIMATED))
def test_estimates_are_called_so(kind: str) -> None:
    assert ESTIMATED[kind] in from_config(small(kind), where="x")[1][-1]


def test_a_window_is_in_the_layers_that_have_one() -> None:
    def widths(name: str) -> list[int]:
        return [block.window for block in load_model(name)[0].blocks]

    assert widths("Gemma-3-1B") == [512 * ((index + 1) % 6 != 0) for index in range(26)]
    assert widths("gpt-oss-20b") == [128, 0] * 12
    assert widths("OLMo-3-7B") == [4096, 4096, 4096, 0] * 8
    assert widths("Mistral-7B") == [4096] * 32 and widths("Mistral-7B-v0.3") == [0] * 32
    said = {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    assert [b.window for b in from_config({**small("qwen3"), **said}, where="x")[0].blocks] == [0, 64, 0]
    few = {**small("qwen3_next"), "num_hidden_layers": 4, "layer_types": ["full_attention"]}
    assert [b.window for b in from_config(few, where="x")[0].blocks] == [0, 64, 64, 0]  # the rest as by default


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Lama-2-7B", "did you mean Llama-2-7B"),
        ("Llama-3.2-7B", "did you mean Llama-3.2-3B"),
        ("Qwen3-9B", "did you mean Qwen3-8B"),
        ("gpt-4", "did you mean GPT-2"),
        ("nothing-like-it", "known names"),
        ("1e999", "unknown model '1e999'"),
        ("0", "a Llama of 1 layers and width 64 has more than 0 parameters\nhint: use a config.json"),
    ],
)
def test_unknown_names_get_suggestions(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_model(text)


def test_faults_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, expected in [
        ("{", "config.json:1:2"),
        ("[]", "expected a JSON object"),
        ("{}", "no model_type"),
        (json.dumps({"model_type": "lama"}), "did you mean 'llama'"),
        (json.dumps({"model_type": "llama", "hidden_size": 64}), "the field vocab_size is missing"),
        (json.dumps({**small("llama"), "vocab_size": -1}), "vocab_size is -1"),
        (json.dumps({**small("llama"), "model_type": "brand_new", "num_experts": 4}), "mixture of experts"),
    ]:
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=expected):
            load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_key_value_heads": 16}, "8 attention heads cannot be divided evenly among 16 key-value heads"),
        ({"num_experts_per_tok": 9}, "a token is routed to 9 experts, but there are only 8"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or false"),
        ({"hidden_size": 4}, "hidden_size 4 is too small for 8 attention heads"),
        ({"layer_types": 5}, "layer_types is 5, expected a list"),
        ({"model_type": "qwen2_moe", "num_experts": 8, "mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list"),
    ],
)
def test_numbers_that_make_no_model(changes: dict[str, Any], what: str) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    with pytest.raises(ConfigError, match=what):
        from_config({**MODELS["Mixtral-8x7B"], **sizes, **changes}, where="config.json")


def test_quantized_weights_of_a_file_are_said_to_be_planned_plain() -> None:
    quantized = {**MODELS["Llama-2-7B"], "quantization_config": {"quant_method": "gptq", "bits": 4}}
    _, (note,) = from_config(quantized, where="config.json")
    assert "quantization_config (gptq) is ignored" in note


def test_an_unknown_dense_model_is_planned_as_a_llama_and_said_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**small("llama"), "model_type": "brand_new"}), encoding="utf-8")
    model, notes = load_model(str(tmp_path))
    assert "planned as a Llama" in notes[0]
    assert model.numel == from_config(small("llama"), where="x")[0].numel


def test_kimi_is_a_deepseek() -> None:
    values = {**MODELS["Kimi-K2"], "num_hidden_layers": 3}
    theirs = meta_model({**values, "model_type": "deepseek_v3"})
    assert from_config(values, where="x")[0].numel == sum(parameter.numel() for parameter in theirs.parameters())
    for kin in ({**values, "model_type": "brand_new"}, {"model_type": "brand_new_vl", "text_config": values}):
        assert from_config(kin, where="x")[0].numel == from_config(values, where="x")[0].numel


def test_planning_imports_no_torch() -> None:
    code = "import sys, fullshard.plan.library as l; l.load_model('Llama-3.1-405B'); sys.exit('torch' in sys.modules)"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert time.monotonic() - start < 10


COMPOSED = (
    *("audioflamingo3", "deepseek_vl", "deepseek_vl_hybrid", "fun_asr_nano", "gemma3", "glmasr", "got_ocr2"),
    *("idefics2", "idefics3", "internvl", "janus", "lighton_ocr", "llama4", "llava", "llava_next", "llava_next_video"),
    *("llava_onevision", "mistral3", "musicflamingo", "paligemma", "pp_chart2table", "qwen2_audio", "qwen3_asr"),
    *("shieldgemma2", "smolvlm", "vibevoice_asr", "video_llama_3", "video_llava", "vipllava", "voxtral"),
)
"""Families of several parts whose text part is a family of the planner's."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "kind",
    [name if name in ("mistral3", "internvl", "voxtral") else pytest.param(name, marks=pytest.mark.full)
     for name in COMPOSED],
)  # fmt: skip
def test_the_head_of_a_composed_model_is_counted_as_often_as_it_is_there(kind: str, tied: bool) -> None:
    config = AutoConfig.for_model(kind)
    text = config.text_config
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    text.num_hidden_layers = 2
    config.tie_word_embeddings = tied
    values = json.loads(json.dumps(config.to_dict(), default=str))
    shape, notes = from_config(values, where="test")
    assert "only the text part" in notes[0]
    with torch.device("meta"):
        model: Any = _build(transformers, config)
    parts = ("language_model.", "lm_head.", "text_model.", "model.layers.", "model.embed_tokens.", "model.norm.")
    language = {name: p.numel() for name, p in model.named_parameters() if any(part in name for part in parts)}
    assert shape.numel == sum(language.values())


@pytest.mark.parametrize("kind", ["gemma4_text", pytest.param("gemma4", marks=pytest.mark.full)])
def test_layers_that_differ_are_counted(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    shape = count(json.loads(json.dumps(config.to_dict(), default=str)))
    assert {block.head_dim for block in shape.blocks} == {256, 512}


def test_a_model_that_writes_no_text_is_built_whole() -> None:
    config = AutoConfig.for_model("grounding-dino")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(families, "counted", lambda values, *, where: load_model("GPT-2")[0])
        _, notes = from_config(config.to_dict(), where="test")
    assert "as Transformers builds it" in notes[0]
