"""What may lie in a model's directory: read, or refused with what it is.

pytest tests/checkpoint/test_weight_files.py
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import fullshard
from fullshard.checkpoint import full_state_dict
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.features import shard_model
from fullshard.recipes.model import build_model
from tests.distributed import run_ranks

CONFIG = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    tie_word_embeddings=True,
)  # fmt: skip
TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({str(token): token for token in range(90)}, unk_token="0"))
)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory, and the state of the model in it."""
    torch.manual_seed(5)
    model = LlamaForCausalLM(CONFIG)
    model.save_pretrained(tmp_path)
    return tmp_path, dict(model.state_dict())


def to_pickle(path: Path, state: dict[str, torch.Tensor], *, files: int = 1) -> None:
    """What Transformers 4 wrote: tied weights under both of their names."""
    (path / "model.safetensors").unlink()
    names = list(state)
    if files == 1:
        torch.save(state, path / "pytorch_model.bin")
        return
    weight_map: dict[str, str] = {}
    for number in range(files):
        file = f"pytorch_model-{number + 1:05}-of-{files:05}.bin"
        torch.save({name: state[name] for name in names[number::files]}, path / file)
        weight_map |= dict.fromkeys(names[number::files], file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def loaded(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    model = fullshard.from_pretrained(AutoModelForCausalLM, path, **options)
    blocks = list(model.model.layers)  # type: ignore[union-attr, arg-type]
    return full_state_dict(shard_model(model, unit_modules=blocks), rank0_only=False)


def check(path: Path, state: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    found = loaded(path, **options)
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(("files", "ranks"), [(1, 2), (3, 1)])
def test_pickled_weights_are_read(saved: tuple[Path, dict[str, torch.Tensor]], files: int, ranks: int) -> None:
    to_pickle(*saved, files=files)
    if ranks == 1:
        check(*saved, {})
    else:
        run_ranks(check, ranks, *saved, {})


def test_training_starts_from_pickled_weights(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    to_pickle(path, state)
    model, origin = build_model(str(path), tokenizer=TOKENIZER, seq_len=16, seed=0)
    assert origin == f"weights from {path}"
    whole = full_state_dict(shard_model(model, unit_modules=()), rank0_only=False)
    assert all(torch.equal(whole[name], state[name]) for name in state)


def test_a_configuration_alone_is_trained_from_random_weights_and_said(saved: Any) -> None:
    (saved[0] / "model.safetensors").unlink()
    (saved[0] / "training_args.bin").write_bytes(b"")
    assert build_model(str(saved[0]), tokenizer=TOKENIZER, seq_len=16, seed=4)[1] == "random weights of seed 4"


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_pickled_code_is_not_run(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, state = saved
    to_pickle(path, state)
    torch.save({**state, "model.norm.weight": Evil()}, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="contains more than tensors and plain values, so it was not"):
        loaded(path)
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Evil()}))
    with pytest.raises(CheckpointError, match="was not written by torch"):
        loaded(path)
    torch.save({**state, "step": 3}, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="'step' is a int, not a tensor"):
        loaded(path)
    torch.save([1], path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds a list, expected a dict of tensors"):
        loaded(path)
    assert not Path("evil").exists()


@pytest.mark.parametrize(
    "name",
    [
        None, "adapter_config.json", "model.fp16.safetensors", "model.safetensors.index.fp16.json", "tf_model.h5",
        "model-00001-of-00002.safetensors", "flax_model.msgpack", "model-q4.gguf", "manifest.json", "__0_0.distcp",
        "consolidated.00.pth",
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(saved: Any, name: str | None) -> None:
    path, _ = saved
    (path / "model.safetensors").unlink()
    message = "holds none of" if name is None else f"holds {re.escape(name)}, but neither"
    if name is not None:
        (path / name).write_bytes(b"")
        with pytest.raises(CheckpointError, match=message):
            build_model(str(path), tokenizer=TOKENIZER, seq_len=16, seed=0)
    with pytest.raises(CheckpointError, match=message) as error:
        loaded(path)
    assert error.value.hint
    with pytest.raises(ConfigError, match="does not support variant, subfolder"):
        loaded(path, variant="fp16", subfolder="inner")


def test_an_index_that_names_a_file_that_is_not_there_is_refused(saved: Any) -> None:
    path, state = saved
    to_pickle(path, state, files=2)
    (path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"lists pytorch_model-00002-of-00002\.bin, but this file does not exist"):
        loaded(path)


def test_one_file_comes_before_an_index_that_was_left_there(saved: Any) -> None:
    path, state = saved
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    check(path, state, {})


def test_a_file_of_the_old_format_is_refused(saved: Any) -> None:
    path, state = saved
    to_pickle(path, state)
    torch.save(state, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="was written before torch 1") as error:
        loaded(path)
    assert "save it again" in str(error.value.hint)


def test_a_hub_name_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="it cannot be downloaded from the hub"):
        fullshard.from_pretrained(AutoModelForCausalLM, "nobody/nothing-of-this-name", local_files_only=True)


def test_safetensors_come_before_pickles(saved: Any) -> None:
    path, state = saved
    torch.save({}, path / "pytorch_model.bin")
    check(path, state, {})
    save_file(load_file(path / "model.safetensors"), path / "other.safetensors", {"format": "pt"})
    check(path, state, {})
