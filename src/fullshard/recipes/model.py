"""Build the model to train: a small Llama, or a model from a Hugging Face configuration or checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import from_pretrained
from fullshard.checkpoint.weight_files import weights_file
from fullshard.core.errors import ConfigError, own_errors
from fullshard.core.imports import import_extra
from fullshard.optim import MatrixRule, Muon

_SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
"""The default Llama, of about 1 M parameters, which learns the look of code in three minutes on two processors."""


def build_model(source: str | None, *, tokenizer: Any, seq_len: int, seed: int) -> tuple[nn.Module, str]:
    """Build the model in fp32, and return it with a description of where its weights come from.

    The model is identical on every rank. Pretrained weights are only read when the model is sharded. `source` is a
    config.json, a Hugging Face directory with or without weights, a hub name, or None for the default model. Random
    weights depend only on `seed`. Raise `ConfigError` if the tokenizer or `seq_len` does not fit the model.
    """
    library, name = transformers(), "the default model" if source is None else repr(source)
    ids = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))  # ids may have gaps
    if source is None:
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        sizes = _SMALL | {"vocab_size": len(tokenizer), "max_position_embeddings": max(512, seq_len)}
        config = library.LlamaConfig(tie_word_embeddings=True, **sizes, **ends)
    else:
        config = read_config(source)
    if ids > config.vocab_size:
        raise ConfigError(f"the tokenizer has ids up to {ids - 1}, but {name} has only {config.vocab_size} embeddings")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise ConfigError(
            f"--seq-len {seq_len} is more than the {positions} positions of {name}", hint=f"use at most {positions}"
        )
    path = Path(source or "config.json")
    if source is not None and (weights_file(path) is not None if path.is_dir() else not path.exists()):
        with own_errors(f"cannot load the model {name}"):
            loaded = from_pretrained(library.AutoModelForCausalLM, source, dtype=torch.float32, dequantize=True)
        return loaded, f"weights from {source}"
    torch.manual_seed(seed)
    with own_errors(f"{name} is not a causal language model"):
        return library.AutoModelForCausalLM.from_config(config, dtype=torch.float32), f"random weights of seed {seed}"


def read_config(source: str) -> Any:
    """Return the configuration from a file, a directory or a hub name."""
    hint = "--model takes a config.json, a Hugging Face directory or, if the hub can be reached, a hub name"
    with own_errors(f"cannot read the configuration of a model from {source!r}", hint):
        config = transformers().AutoConfig.from_pretrained(source)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise ConfigError(f"the configuration of {source!r} has no vocab_size", hint=hint)
    return config


def transformers() -> Any:
    """Return the `transformers` module. Raise `MissingExtraError` if it is not installed."""
    return import_extra("transformers", extra="hf", purpose="training a language model")


def muon(model: nn.Module, say: Callable[[str], None], **options: Any) -> Muon:
    """Create a Muon optimizer without weight decay for norms and biases, and say which parameters Muon updates."""
    rule = MatrixRule.of(model)
    say(f"optimizer: {rule}")
    # scaled so that a learning rate for AdamW works
    return Muon(rule.groups(decays_vectors=False), adjust_lr_fn="match_rms_adamw", **options)
