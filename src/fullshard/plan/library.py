"""Well-known models, and what a user may write for a model: a name, a `config.json`, or a number of parameters."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path
from fullshard.core.sizes import format_count, round_up
from fullshard.plan.families import from_config
from fullshard.plan.shapes import ModelShape


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int = 32000) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


def _qwen2(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool
) -> dict[str, Any]:
    values = _llama(hidden, inner, layers, heads, kv_heads, vocab)
    return {**values, "model_type": "qwen2", "tie_word_embeddings": tied}


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    values = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return {"model_type": "gpt2", **values}


MODELS: dict[str, dict[str, Any]] = {
    "Llama-2-7B": _llama(4096, 11008, 32, 32, 32),
    "Llama-2-13B": _llama(5120, 13824, 40, 40, 40),
    "Llama-2-70B": _llama(8192, 28672, 80, 64, 8),
    "Llama-3-8B": _llama(4096, 14336, 32, 32, 8, 128256),
    "Llama-3-70B": _llama(8192, 28672, 80, 64, 8, 128256),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32, 8, 128256),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64, 8, 128256),
    "Llama-3.1-405B": _llama(16384, 53248, 126, 128, 8, 128256),
    "Yi-34B": _llama(7168, 20480, 60, 56, 8, 64000),
    "CodeLlama-34B": _llama(8192, 22016, 48, 64, 8),
    "Mistral-7B": {**_llama(4096, 14336, 32, 32, 8), "model_type": "mistral"},
    "Mixtral-8x7B": {
        **_llama(4096, 14336, 32, 32, 8),
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4, 152064, tied=False),
    "GPT-2": _gpt2(768, 12, 12),
    "GPT-2-medium": _gpt2(1024, 24, 16),
    "GPT-2-large": _gpt2(1280, 36, 20),
    "GPT-2-XL": _gpt2(1600, 48, 25),
}
"""Dimensions from each model's published `config.json`."""


def load_model(text: str, shape: dict[str, int | None] | None = None) -> tuple[ModelShape, list[str]]:
    """The model a user names, and notes about it.

    Args:
        text: a `config.json` or a directory with one; a name of `MODELS` in any case; or a number such as `7B`.
        shape: with a number, any of `layers`, `hidden`, `heads`, `kv_heads`, `vocab`; what is missing is chosen.

    Raises:
        ConfigError: nothing of that kind, a file that cannot be read, or shape flags where they have no effect.
    """
    flags = {key: value for key, value in (shape or {}).items() if value is not None}
    count = _parameter_count(text)
    if count is not None:
        return _from_count(text, count, flags)
    if flags:
        raise ConfigError(
            f"{', '.join(flags)}: shape flags go with a number of parameters, not with {text!r}",
            hint="leave them out, or write --model 7B",
        )
    name, values = _configuration(text)
    return from_config(values, where=text, name=name)


def load_config(text: str) -> dict[str, Any] | None:
    """The `config.json` a user names, by a name of `MODELS` or a path; None for a number of parameters.

    Raises:
        ConfigError: as for `load_model`.
    """
    return None if _parameter_count(text) is not None else _configuration(text)[1]


def _configuration(text: str) -> tuple[str | None, dict[str, Any]]:
    path = local_path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return (path.parent.name if path.name == "config.json" else path.stem) or None, _read(path)
    by_key = {_key(name): name for name in MODELS}
    known_name = by_key.get(_key(text.rsplit("/", 1)[-1]))
    if known_name is None:
        close = difflib.get_close_matches(_key(text), by_key, n=3, cutoff=0.4)
        known = ", ".join(by_key[key] for key in close) if close else ", ".join(MODELS)
        raise ConfigError(
            f"no model {text!r}: not a file, not a directory with a config.json, not a known name, not a number",
            hint=f"{'did you mean ' if close else 'known names: '}{known}; or give the path of a config.json",
        )
    return known_name, MODELS[known_name]


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower()).removesuffix("hf")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: {error.msg}", hint="it must be JSON") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected an object of settings, got a {type(values).__name__}")
    return values


def _parameter_count(text: str) -> float | None:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)\s*", text, re.IGNORECASE)
    if match is None:
        return None
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2].lower()]


def _from_count(text: str, count: float, flags: dict[str, int]) -> tuple[ModelShape, list[str]]:
    """A Llama of `count` parameters.

    What is not given: width 128 x depth, which Kaplan et al. (arXiv 2001.08361, figure 5) found near the best and the
    Llama family follows, heads of 128 (64 in small models), a vocabulary of 32,000. The feed-forward width takes up
    what is left.
    """
    layers, hidden = flags.get("layers"), flags.get("hidden")
    if layers is None:
        # 12 parameters per layer and squared width.
        layers = max(1, round((count / (12 * 128**2)) ** (1 / 3) if hidden is None else count / (12 * hidden**2)))
    if hidden is None:
        hidden = round_up(round((count / (12 * layers)) ** 0.5), 64 if count < 1e8 else 128)
    heads = flags.get("heads", hidden // (64 if hidden % 128 else 128))
    vocab = flags.get("vocab", 32000)
    values = _llama(hidden, 1, layers, heads, flags.get("kv_heads", heads), vocab)
    rest = count - from_config(values, where=text)[0].numel
    inner = 1 + round(rest / (3 * hidden * layers))
    if inner < 1 or hidden % heads:
        problem = f"width {hidden} is no multiple of {heads} heads" if inner >= 1 else "the rest is larger already"
        raise ConfigError(
            f"{text}: no model of {format_count(count)} parameters has {layers} layers of width {hidden} and "
            f"a vocabulary of {vocab}: {problem}",
            hint="change --layers, --hidden, --heads or --vocab",
        )
    model, _ = from_config({**values, "intermediate_size": inner}, where=text, name=f"a Llama of {text.strip()}")
    chosen = f"{layers} layers of width {hidden}, {heads} heads, feed-forward {inner}, vocabulary {vocab}"
    return model, [f"{text}: planned as a Llama with {chosen}; a config.json is more exact"]
