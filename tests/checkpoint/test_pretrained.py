"""Hugging Face directories read straight into shards.

pytest tests/checkpoint/test_pretrained.py
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BitsAndBytesConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
)

import fullshard
from fullshard import Accelerator
from fullshard.checkpoint import full_state_dict
from fullshard.core.errors import CheckpointError, ConfigError, LifecycleError
from fullshard.features import ShardedParameter
from tests.differential import is_same_product
from tests.distributed import run_ranks
from tests.trainers import keep_layout
from tests.traps import rank_and_size

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA = LlamaConfig(**SMALL, num_key_value_heads=2)
FAMILIES = {
    "llama": LLAMA,
    "tied": LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL, num_key_value_heads=2, use_sliding_window=False),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}


def save(config: Any, path: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A model with random weights in a directory, its biases not zero."""
    torch.manual_seed(1)
    model: nn.Module = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(path, **options)  # type: ignore[operator]
    return model


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(rank))


def load_and_compare(path: Path, **options: Any) -> tuple[int, int]:
    rank, _ = rank_and_size()
    reference = AutoModelForCausalLM.from_pretrained(path, **options)
    model = fullshard.from_pretrained(AutoModelForCausalLM, path, **options)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = Accelerator(cpu=True).prepare(model)
    whole, expected = full_state_dict(model, rank0_only=False), reference.state_dict()
    assert list(whole) == list(expected)
    for name, value in whole.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
    with torch.no_grad():
        ids = tokens(rank)
        assert is_same_product(model(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert model.generation_config.to_dict() == reference.generation_config.to_dict()
    mine = sum(p.interval.numel for p in model.parameters() if isinstance(p, ShardedParameter))
    return mine, sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    save(FAMILIES[family], tmp_path)
    parts = run_ranks(load_and_compare, 2, tmp_path)
    assert sum(mine for mine, _ in parts) == parts[0][1]
    assert max(mine for mine, _ in parts) <= parts[0][1] * 0.55


def test_many_files_and_three_ranks(tmp_path: Path) -> None:
    save(LLAMA, tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    run_ranks(load_and_compare_with, 3, tmp_path, "float32")


def load_and_compare_with(path: Path, dtype: str) -> None:
    load_and_compare(path, dtype=getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_are_converted_on_the_way(dtype: str, tmp_path: Path) -> None:
    save(LLAMA, tmp_path, dtype=torch.float32 if dtype == "bfloat16" else torch.bfloat16)
    run_ranks(load_and_compare_with, 2, tmp_path, dtype)


def check_head(path: Path) -> None:
    model = fullshard.from_pretrained(AutoModelForSequenceClassification, path)
    reference = BertModel.from_pretrained(path).state_dict()
    sharded = Accelerator(cpu=True).prepare(model)
    whole = full_state_dict(sharded, rank0_only=False)
    for name, value in whole.items():
        if name.removeprefix("bert.") in reference and "pooler" not in name:
            assert torch.equal(value, reference[name.removeprefix("bert.")]), name
    assert whole["classifier.weight"].std() > 0 and whole["classifier.weight"].abs().max() < 1


def test_a_new_head_is_initialized_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**SMALL, max_position_embeddings=32)).save_pretrained(tmp_path)
    run_ranks(check_head, 2, tmp_path)
    with caplog.at_level(logging.WARNING):
        check_head(tmp_path)
    assert "newly initialized: bert.pooler.dense.bias" in caplog.text and "classifier.weight" in caplog.text
    assert "not used: cls." in caplog.text


def test_options_reach_the_configuration_and_the_model(tmp_path: Path) -> None:
    save(LLAMA, tmp_path)
    model: Any = fullshard.from_pretrained(
        AutoModelForSequenceClassification, tmp_path, num_labels=3, attn_implementation="eager", dtype="bfloat16"
    )
    assert model.config.num_labels == 3 and model.score.weight.shape == (3, 32)
    assert model.config._attn_implementation == "eager" and model.dtype is torch.bfloat16


def check_resized(path: Path) -> list[float]:
    model: Any = fullshard.from_pretrained(AutoModelForCausalLM, path)
    with pytest.raises(ConfigError, match="needs the old rows"):
        model.resize_token_embeddings(105, mean_resizing=True)
    model.resize_token_embeddings(105)
    old = LlamaForCausalLM.from_pretrained(path).model.embed_tokens.weight
    sharded = Accelerator(cpu=True).prepare(model)
    weight = full_state_dict(sharded, rank0_only=False)["model.embed_tokens.weight"]
    assert weight.shape == (105, 32) and torch.equal(weight[:97], old)
    assert 0.005 < weight[97:].std() < 0.05
    return [float(x) for x in weight[97:].flatten()[:20]]


def test_resized_embeddings_keep_their_rows(tmp_path: Path) -> None:
    save(LLAMA, tmp_path)
    added = [*run_ranks(check_resized, 2, tmp_path), *run_ranks(check_resized, 3, tmp_path)]
    assert all(values == added[0] for values in added)


def check_quantized(path: Path, bits: int, storage: torch.dtype) -> tuple[int, int]:
    rank, _ = rank_and_size()
    if bits == 4:
        quantized = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_storage=storage,
        )  # fmt: skip
    else:
        quantized = BitsAndBytesConfig(load_in_8bit=True)
    model: Any = fullshard.from_pretrained(
        AutoModelForCausalLM, path, quantization_config=quantized, dtype=torch.float32
    )
    assert (model.is_loaded_in_4bit, model.is_loaded_in_8bit) == (bits == 4, bits == 8)
    sharded = Accelerator(cpu=True).prepare(add_adapter(model))
    # After it, so that nothing bitsandbytes has made for the reference is of help.
    reference = AutoModelForCausalLM.from_pretrained(path, quantization_config=quantized, dtype=torch.float32)
    expected = keep_layout(add_adapter(reference))
    ids = tokens(rank)
    # B is zero, so the adapters change nothing yet.
    assert is_same_product(sharded(input_ids=ids).logits, expected(input_ids=ids).logits)
    whole = full_state_dict(sharded, rank0_only=False)
    a = next(value for name, value in whole.items() if "lora_A" in name)
    b = next(value for name, value in whole.items() if "lora_B" in name)
    assert float(b.abs().max()) == 0 and 0.01 < float(a.std()) < 1
    frozen = [p for p in sharded.parameters() if not p.requires_grad]
    mine = sum(p.to_local().nbytes for p in frozen)
    loss = sharded(input_ids=ids, labels=ids).loss
    loss.backward()
    assert all(p.grad is not None for p in sharded.parameters() if p.requires_grad and p.interval.numel)
    return mine, sum(p.nbytes for p in reference.parameters() if not p.requires_grad)


def add_adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))


@pytest.mark.parametrize(
    ("bits", "storage"),
    [
        (4, torch.uint8),
        (8, torch.uint8),
        *(pytest.param(4, dtype, marks=pytest.mark.full) for dtype in (torch.bfloat16, torch.int8, torch.float64)),
    ],
    ids=str,
)
def test_weights_are_quantized_as_they_are_read(bits: int, storage: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    save(LlamaConfig(**{**SMALL, "hidden_size": 64, "intermediate_size": 128}, num_key_value_heads=4), tmp_path)
    run_ranks(check_quantized, 2, tmp_path, bits, storage)


@pytest.mark.parametrize(
    "options", [{"init_lora_weights": "orthogonal"}, {"init_lora_weights": False, "use_dora": True}], ids=str
)
def test_adapters_that_need_whole_weights_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    save(LLAMA, tmp_path)
    model: Any = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], **options))
    with pytest.raises(ConfigError, match="unsharded base weights") as error:
        Accelerator(cpu=True).prepare(model)
    assert error.value.hint is not None


def test_a_model_does_not_run_before_its_weights_are_read(tmp_path: Path) -> None:
    """It is on the meta device, where a forward would compute nothing."""
    save(LLAMA, tmp_path)
    model = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path)
    with pytest.raises(LifecycleError, match="the weights of LlamaForCausalLM have not been read"):
        model(tokens(0))
    for shard in (lambda model: fullshard.accelerate(model)[0], Accelerator(cpu=True).prepare):
        sharded = shard(fullshard.from_pretrained(AutoModelForCausalLM, tmp_path))
        assert sharded(tokens(0)).logits.isfinite().all()
    fullshard.fully_shard(model).load_state_dict(save(LLAMA, tmp_path).state_dict())
    assert model(tokens(0)).logits.isfinite().all()


def test_shapes_that_differ_are_all_listed(tmp_path: Path) -> None:
    save(LLAMA, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    model = fullshard.from_pretrained(AutoModelForCausalLM, tmp_path)
    with pytest.raises(CheckpointError) as error:
        Accelerator(cpu=True).prepare(model)
    assert str(error.value).count("_proj.weight has shape") == 6


def test_damaged_files_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    """By the reader whose refusals `test_offline_damage` has."""
    save(LLAMA, tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="is at bytes"):
        fullshard.from_pretrained(AutoModelForCausalLM, tmp_path)


def check_peak_memory(path: Path) -> tuple[int, int, int]:
    """Peak resident bytes while loading, bytes of this rank's shard, bytes of the largest tensor."""
    accelerator = Accelerator(cpu=True)  # imports and process group come first
    model = fullshard.from_pretrained(AutoModelForCausalLM, path)
    largest = max(p.nbytes for p in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    model = accelerator.prepare(model)
    return _status("VmHWM") - before, sum(p.nbytes for p in model.parameters()), largest


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory figures of Linux")
def test_no_rank_holds_more_than_its_shard_and_one_tensor(tmp_path: Path) -> None:
    large = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    save(LlamaConfig(**{**SMALL, **large}), tmp_path)
    for peak, shard, largest in run_ranks(check_peak_memory, 2, tmp_path):
        assert peak <= 1.1 * (shard + largest), (peak, shard, largest)
