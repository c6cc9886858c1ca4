"""Models that Transformers keeps otherwise in memory than on disk: read into shards and exported, by its own rules.

pytest tests/checkpoint/test_conversion.py
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
)

import fullshard
from fullshard import Accelerator
from fullshard.checkpoint import export_hf, full_state_dict
from fullshard.checkpoint.conversion import loading_rules, outline_of
from fullshard.checkpoint.sources import match
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval
from fullshard.features import shard_model
from tests.distributed import run_ranks
from tests.tiny_models import build, class_names, model_class, model_types, why_not
from tests.traps import rank_and_size

FAMILIES = {
    # renamed: heads, towers, prefixes, attention
    "gpt_neox": "GPTNeoXForCausalLM",
    "vit": "ViTForImageClassification",
    "audio-spectrogram-transformer": "ASTForAudioClassification",
    "videomae": "VideoMAEForVideoClassification",
    "llava": "LlavaForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "segformer": "SegformerForSemanticSegmentation",
    # converted: experts merged, projections cut apart or joined
    "mixtral": "MixtralForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
}
SHARDED = ("gpt_neox", "vit", "mixtral", "kimi_linear")
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
LLAMA = LlamaConfig(**SMALL, num_key_value_heads=2)
CHUNKS = 24
# Transformers itself does not read back what it has written; said here as it is, so that nothing is passed over.
NOT_REREAD = {
    "ChineseCLIPModel": "Transformers sets the row of the padding token to zero after it has been read",
    "ZayaForCausalLM": "Transformers sets an entry of a buffer to -1 after it has been read",
    "ZayaModel": "Transformers sets an entry of a buffer to -1 after it has been read",
    "MarianMTModel": "Transformers does not write the positions: it computes them anew",
    "Qwen2_5OmniForConditionalGeneration": "Transformers wants a file of speakers that it does not write",
    "shieldgemma2": "an auto class names a class for a configuration that is not its own",
    "PixioBackbone": "Transformers exchanges two norms, one with the base model's prefix and one without",
}


def save(model: Any, path: Path) -> dict[str, torch.Tensor]:
    """Write the model as Transformers does. Its state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
    return dict(model.state_dict())


def sharded_state(cls: Any, path: Path, **options: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model read into shards, and its whole state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fullshard.from_pretrained(cls, path, **options)
        shard_model(model, unit_modules=_blocks(model))
    return model, full_state_dict(model, rank0_only=False)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The children of the longest list, so that there are units besides the root."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def assert_same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys(), state.keys() ^ expected.keys()
    for name, value in state.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def names_in_files(path: Path) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(value.shape)
        for file in sorted(path.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def check_round_trips(directory: Path, families: dict[str, str]) -> None:
    """Saved by Transformers, read here; exported here, read by Transformers and here: always the same bits."""
    rank, _ = rank_and_size()
    for model_type, name in families.items():
        cls, path = model_class(model_type, name), directory / model_type
        expected = dict(build(model_type, name).state_dict())
        model, state = sharded_state(cls, path)
        assert_same(state, expected)
        export_hf(path / "export", model=model, max_shard_size=200_000)
        assert names_in_files(path / "export") == names_in_files(path), name
        if rank == 0:
            assert_same(dict(cls.from_pretrained(path / "export").state_dict()), expected)
        assert_same(sharded_state(cls, path / "export")[1], expected)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_what_transformers_renames_or_converts_comes_back_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    for model_type, name in FAMILIES.items():
        if world_size == 1 or model_type in SHARDED:
            save(build(model_type, name), tmp_path / model_type)
    if world_size == 1:
        check_round_trips(tmp_path, FAMILIES)
    else:
        run_ranks(check_round_trips, world_size, tmp_path, {key: FAMILIES[key] for key in SHARDED})


def _reload(model_type: str, name: str, path: Path) -> str | None:
    """What went wrong with a class; None if nothing."""
    expected = save(build(model_type, name), path)
    cls = model_class(model_type, name)
    try:
        model, state = sharded_state(cls, path)
        assert_same(state, expected)
        if not {model_type, name} & NOT_REREAD.keys():
            export_hf(path / "export", model=model)
            assert_same(sharded_state(cls, path / "export")[1], expected)
            assert_same(dict(cls.from_pretrained(path / "export").state_dict()), expected)
    except (CheckpointError, AssertionError) as error:
        return f"{model_type} {name}: {str(error)[:300]}"
    return None


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # Transformers', of sizes that are small, or zero
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_class_of_every_model_type_comes_back_bit_for_bit(chunk: int, tmp_path: Path) -> None:
    problems = []
    for model_type in model_types()[chunk::CHUNKS]:
        for name in class_names(model_type):
            if why_not(model_type, name) is None:
                problem = _reload(model_type, name, tmp_path / model_type / name)
                if problem and model_type not in NOT_REREAD and name != "MarianMTModel":
                    problems.append(problem)
    assert not problems, "\n".join(problems)


def test_names_with_and_without_the_prefix_of_the_base_model_are_not_exchanged(tmp_path: Path) -> None:
    expected = save(build("pixio", "PixioBackbone"), tmp_path)
    assert {"layernorm.weight", "pixio.layernorm.weight"} <= expected.keys()
    assert_same(sharded_state(model_class("pixio", "PixioBackbone"), tmp_path)[1], expected)


# -- what is missing or does not fit ------------------------------------------------------------------------------


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Put tensors into a safetensors file, or take them out; `__` stands for a dot."""
    tensors = load_file(path / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    save(LlamaForCausalLM(LLAMA), tmp_path)
    return tmp_path


def test_a_missing_weight_is_an_error_unless_it_may_be(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(llama, model__layers__1__mlp__up_proj__weight=None)
    for auto_class in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight is not in the files") as error:
            sharded_state(auto_class, llama)
        assert "score" not in str(error.value) and "ignore_missing" in str(error.value.hint)
    with caplog.at_level(logging.WARNING):
        sharded_state(AutoModelForCausalLM, llama, ignore_missing=True)
    assert "newly initialized: model.layers.1.mlp.up_proj.weight" in caplog.text


@pytest.mark.parametrize("architecture", [None, "SomebodysModel"])
def test_without_the_saved_class_a_head_is_what_is_outside_the_base(llama: Path, architecture: str | None) -> None:
    config = json.loads((llama / "config.json").read_text())
    config["architectures"] = None if architecture is None else [architecture]
    (llama / "config.json").write_text(json.dumps(config))
    sharded_state(LlamaForSequenceClassification, llama)
    edit(llama, model__norm__weight=None)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is not in the files"):
        sharded_state(LlamaForSequenceClassification, llama)


def test_a_base_model_takes_its_part_of_a_whole_one_and_gives_it(llama: Path, tmp_path: Path) -> None:
    head = LlamaForCausalLM.from_pretrained(llama).state_dict()
    base = {name.removeprefix("model."): value for name, value in head.items() if name != "lm_head.weight"}
    assert_same(sharded_state(LlamaModel, llama)[1], base)
    save(LlamaModel.from_pretrained(llama), tmp_path / "base")
    state = sharded_state(LlamaForCausalLM, tmp_path / "base")[1]
    assert_same({name: value for name, value in state.items() if name != "lm_head.weight"},
                {name: value for name, value in head.items() if name != "lm_head.weight"})  # fmt: skip


def test_other_shapes_are_errors_unless_they_may_be(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(llama, model__layers__0__mlp__up_proj__weight=torch.zeros(7, 32))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has shape \(64, 32\) in the model and \(7, 32\)"):
        sharded_state(AutoModelForCausalLM, llama)
    with caplog.at_level(logging.WARNING):
        _, state = sharded_state(AutoModelForCausalLM, llama, ignore_mismatched_sizes=True)
    assert "in another shape" in caplog.text and state["model.layers.0.mlp.up_proj.weight"].std() > 0


def test_an_expert_that_is_missing_is_an_error(tmp_path: Path) -> None:
    save(MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)), tmp_path)
    edit(tmp_path, model__layers__1__block_sparse_moe__experts__2__w2__weight=None)
    with pytest.raises(CheckpointError, match=r"experts\.down_proj has shape \(4, 32, 64\) .* \(3, 32, 64\)"):
        sharded_state(MixtralForCausalLM, tmp_path)
    edit(tmp_path, model__layers__1__block_sparse_moe__experts__2__w3__weight=None)
    with pytest.raises(CheckpointError, match=r"rule for model\.layers\.1\.\S+gate_up_proj"):
        sharded_state(MixtralForCausalLM, tmp_path)


def test_a_tensor_that_is_there_twice_with_different_values_is_an_error(tmp_path: Path) -> None:
    save(BertForMaskedLM(BertConfig(**SMALL, max_position_embeddings=16)), tmp_path)
    name = "bert.encoder.layer.0.output.LayerNorm"
    value = load_file(tmp_path / "model.safetensors")[f"{name}.weight"]
    edit(tmp_path, **{f"{name}.gamma".replace(".", "__"): value.clone()})
    sharded_state(BertForMaskedLM, tmp_path)
    edit(tmp_path, **{f"{name}.gamma".replace(".", "__"): value + 1})
    with pytest.raises(CheckpointError, match=r"LayerNorm\.gamma and \S+LayerNorm\.weight are both"):
        sharded_state(BertForMaskedLM, tmp_path)


def test_weights_that_are_tied_but_differ_are_not_tied(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with caplog.at_level(logging.WARNING):
        _, state = sharded_state(AutoModelForCausalLM, llama)
    assert "they are not tied" in caplog.text
    assert_same(state, dict(AutoModelForCausalLM.from_pretrained(llama).state_dict()))
    edit(llama, lm_head__weight=load_file(llama / "model.safetensors")["model.embed_tokens.weight"])
    model = fullshard.from_pretrained(AutoModelForCausalLM, llama)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_the_dtype_is_that_of_the_weights_where_the_configuration_has_none(llama: Path) -> None:
    tensors = {name: value.bfloat16() for name, value in load_file(llama / "model.safetensors").items()}
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    del config["dtype"]
    (llama / "config.json").write_text(json.dumps(config))
    expected = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    assert_same(sharded_state(AutoModelForCausalLM, llama)[1], dict(expected))


def test_modules_that_stay_in_fp32_do(tmp_path: Path) -> None:
    save(build("t5", "T5ForConditionalGeneration"), tmp_path)
    cls = model_class("t5", "T5ForConditionalGeneration")
    expected = dict(cls.from_pretrained(tmp_path, dtype=torch.float16).state_dict())
    assert {value.dtype for value in expected.values()} == {torch.float16, torch.float32}
    assert_same(sharded_state(cls, tmp_path, dtype=torch.float16)[1], expected)


def test_a_module_that_peft_trains_whole_starts_from_its_own_weights(llama: Path) -> None:
    peft = pytest.importorskip("peft")
    expected = load_file(llama / "model.safetensors")["lm_head.weight"]
    model: Any = fullshard.from_pretrained(AutoModelForCausalLM, llama)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    state = full_state_dict(Accelerator(cpu=True).prepare(model), rank0_only=False)
    heads = [value for name, value in state.items() if "lm_head" in name]
    assert len(heads) == 2 and all(torch.equal(value, expected) for value in heads)


# -- memory -------------------------------------------------------------------------------------------------------


class Counted:
    """A tensor of a directory that says when it is read."""

    coded = None

    def __init__(self, name: str, tensor: torch.Tensor, reads: list[str]) -> None:
        self.name, self.tensor, self.reads = name, tensor, reads
        self.shape, self.dtype, self.numel, self.where = tuple(tensor.shape), tensor.dtype, tensor.numel(), "test"

    def read(self, interval: Interval, out: torch.Tensor) -> None:
        self.reads.append(self.name)
        out.copy_(self.tensor.reshape(-1)[interval.start : interval.stop])


@pytest.fixture
def mixtral() -> Iterator[tuple[Any, dict[str, Any], list[str]]]:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=6))
    reads: list[str] = []
    stored: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        prefix, _, part = name.partition(".mlp.experts.")
        for expert, row in enumerate(value) if part else ():
            halves = zip(("w1", "w3"), row.chunk(2), strict=True) if part == "gate_up_proj" else [("w2", row)]
            for key, half in halves:
                key = f"{prefix}.block_sparse_moe.experts.{expert}.{key}.weight"
                stored[key] = Counted(key, half, reads)
        if not part:
            stored[name] = Counted(name, value, reads)
    yield model, stored, reads


def test_of_a_layer_of_experts_only_those_of_the_interval_are_read(mixtral: Any) -> None:
    model, stored, reads = mixtral
    outline = outline_of(model, model.state_dict())
    source = match(stored, loading_rules(model, outline)).sources["model.layers.1.mlp.experts.gate_up_proj"]
    assert not reads
    row = source.numel // 6
    out = torch.empty(2 * row)
    source.read(Interval(row + 5, 3 * row + 5), out)
    expected = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"].reshape(-1)
    assert torch.equal(out, expected[row + 5 : 3 * row + 5])
    assert {name.split(".experts.")[1][0] for name in reads} == {"1", "2", "3"}
