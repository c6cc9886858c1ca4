"""A model directory or data that cannot be used is an error of one line, whatever other libraries make of it.

pytest tests/checkpoint/test_unusable_models.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.core.errors import CheckpointError, ConfigError, DataError
from fullshard.recipes.model import build_model, read_config

SMALL = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(SMALL | {"num_attention_heads": "four"}),
        json.dumps(SMALL | {"hidden_size": 33}),
        "[" * 100_000,
        "[]",
        "nothing",
    ],
    ids=["a word for a number", "does not divide", "deep", "a list", "no JSON"],
)
def test_a_configuration_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"cannot read the configuration of a model from '{tmp_path}': "):
        read_config(str(tmp_path))


class Tokenizer:
    def __len__(self) -> int:
        return 97

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(97)}


def test_pickled_weights_are_loaded_or_refused_never_made_up(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def build() -> Any:
        return build_model(str(tmp_path), tokenizer=Tokenizer(), seq_len=8, seed=0)

    saved = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in SMALL.items() if k != "model_type"}))
    saved.config.save_pretrained(tmp_path)
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    assert build()[1] == f"weights from {tmp_path}"
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin was not written by torch.save"):
        build()


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_data_for_sft_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import datasets

    from fullshard.recipes.sft import load_data
    from fullshard.recipes.sft_arguments import read_arguments

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / name).write_bytes(b'{"text": "fine"}\n{"text": [[[\n' * 3)
    words = ["--model_name_or_path", "m", "--dataset_name", str(tmp_path), "--report_to", "none", "--bf16", "False"]
    with pytest.raises(DataError, match=f"{tmp_path} cannot be read: "):
        load_data(read_arguments(words, print))
