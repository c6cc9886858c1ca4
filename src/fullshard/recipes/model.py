"""The model of a run: a small Llama by default, or whatever a configuration or checkpoint of Hugging Face describes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import from_pretrained
from fullshard.checkpoint.weight_files import weights_file
from fullshard.core.errors import ConfigError, FullshardError
from fullshard.recipes.tokenizer import count_ids, transformers


def build_model(
    source: str | None, *, tokenizer: Any, seq_len: int, seed: int, is_loaded_later: bool = False
) -> tuple[nn.Module, str]:
    """Return the model in fp32, the same on every rank, and its weights' source, which is read when it is sharded.

    Args:
        source: a config.json, a Hugging Face directory with or without weights, a hub name, or None for the default.
        tokenizer: its ids and its end-of-text token must fit the model.
        seq_len: must fit the model's positions.
        seed: fixes random weights, on any number of ranks alike.
        is_loaded_later: no random weights are made, which takes long; what they are instead is undefined.

    Raises:
        CheckpointError: weights of a format that is not read.
        ConfigError: no such model, not a causal language model, or one that does not fit the tokenizer or `seq_len`.
        MissingExtraError: without the `hf` extra.
    """
    library = transformers()
    config = default_config(tokenizer, seq_len=seq_len) if source is None else read_config(source)
    _check_fits(config, source, tokenizer=tokenizer, seq_len=seq_len)
    if source is not None and _has_weights(source):
        with own_errors(f"cannot load the model {source!r}"):
            loaded = from_pretrained(library.AutoModelForCausalLM, source, dtype=torch.float32)
        return loaded, f"weights from {source}"
    torch.manual_seed(seed)
    with own_errors(f"{source!r} is not a causal language model"):
        with _no_random_weights() if is_loaded_later else contextlib.nullcontext():
            model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if is_loaded_later:
            model.tie_weights()
            return model, "weights of the run so far"
    return model, f"random weights of seed {seed}"


def default_config(tokenizer: Any, *, seq_len: int) -> Any:
    """Return the configuration of a Llama of about 12 M parameters."""
    return transformers().LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=max(512, seq_len),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def read_config(source: str) -> Any:
    """Return the configuration that a file, a directory or a hub name holds.

    Raises:
        ConfigError: there is none, or Transformers does not know its kind.
    """
    path = Path(source)
    if path.suffix == ".json" and not path.is_file():
        raise ConfigError(f"no file {source!r}", hint="check --model")
    hint = "--model takes a config.json, a Hugging Face directory or a hub name"
    with own_errors(f"cannot read the configuration of a model from {source!r}", hint):
        return transformers().AutoConfig.from_pretrained(source)


def _no_random_weights() -> contextlib.AbstractContextManager[None]:
    """Make Transformers build models without initialising or tying weights within the block."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before Transformers 5
        from transformers.modeling_utils import no_init_weights
    return no_init_weights()  # type: ignore[no-any-return]


@contextlib.contextmanager
def own_errors(what: str, hint: str | None = None) -> Iterator[None]:
    """Turn any error that Transformers raises on faulty files of a user into one line."""
    try:
        yield
    except FullshardError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {error}", hint=hint) from error


def _check_fits(config: Any, source: str | None, *, tokenizer: Any, seq_len: int) -> None:
    name = "the default model" if source is None else repr(source)
    if (ids := count_ids(tokenizer)) > config.vocab_size:
        raise ConfigError(f"the tokenizer has ids up to {ids - 1}, {name} only {config.vocab_size} embeddings")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise ConfigError(
            f"--seq-len {seq_len} is more than the {positions} positions of {name}", hint=f"use at most {positions}"
        )


def _has_weights(source: str) -> bool:
    path = Path(source)
    if path.is_dir():
        return weights_file(path) is not None
    return not path.exists()  # a hub name; a config.json brings none
