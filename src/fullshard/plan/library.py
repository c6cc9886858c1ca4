"""Find the shapes of a model from a well-known name, a `config.json`, or a number of parameters."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.files import read_object
from fullshard.core.paths import local_path
from fullshard.core.sizes import format_count, parse_count, round_up
from fullshard.plan.families import from_config
from fullshard.plan.known_models import ALIASES, MODELS, llama
from fullshard.plan.shapes import ModelShape


def load_model(text: str) -> tuple[ModelShape, list[str]]:
    """Return the model for a known name, the path of a `config.json`, or a number such as `7B`, with notes about it."""
    if (count := parse_count(text)) is not None:
        return _from_count(text, count)
    name, values = _configuration(text)
    return from_config(values, where=text, name=name)


def load_config(text: str) -> dict[str, Any] | None:
    """Return the fields of the `config.json` at a path or of a known model, or None for a number of parameters."""
    return None if parse_count(text) is not None else _configuration(text)[1]


def _configuration(text: str) -> tuple[str | None, dict[str, Any]]:
    path = local_path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return (path.parent.name if path.name == "config.json" else path.stem) or None, _read(path)
    known_name = _known_name(text)
    if known_name is None:
        raise ConfigError(
            f"unknown model {text!r}: it is not a file, a directory with a config.json, a known name or a number",
            hint=f"{_suggestion(text)}; or pass the path of a config.json (hf download ORGANIZATION/NAME config.json)",
        )
    return known_name, MODELS[known_name]


_TUNING = re.compile(
    r"meta|google|instruct|chat|base|it|pt|sft|dpo|rl|hf|unsloth|bnb|gptq|awq|gguf|mlx|fp8|bf16|fp16|[48]bit|int[48]|"
    r"think|thinking|reasoning|preview|coder|math|deduped|uncased|cased|\d{4}"
)
"""Parts of a name that do not affect shapes: tuning, format and date."""
_VERSION = re.compile(r"v\d+(\.\d+)?")


def _known_name(text: str) -> str | None:
    """Return the name in `MODELS` that matches `text`, ignoring organization, tuning, format, date and version."""
    by_key = {_key(name): name for name in MODELS} | {_key(name): known for name, known in ALIASES.items()}
    name = text.rsplit("/", 1)[-1]
    words = [word for word in re.split(r"[-_: ]+", name.lower()) if not _TUNING.fullmatch(word)]
    plain = [word for word in words if not _VERSION.fullmatch(word)]
    spellings = (name, "".join(words), "".join(plain))
    return next((by_key[_key(spelling)] for spelling in spellings if _key(spelling) in by_key), None)


def _suggestion(text: str) -> str:
    """Return a hint that lists known models with similar names or, if there are none, one model of each family."""
    known = {_key(other): other for other in MODELS}
    if close := difflib.get_close_matches(_key(text.rsplit("/", 1)[-1]), known, n=3, cutoff=0.6):
        return "did you mean " + ", ".join(known[key] for key in close)
    one_of_each = {re.split(r"[-0-9]", other)[0].lower(): other for other in MODELS}
    return f"known names: {', '.join(one_of_each.values())} and others of these families"


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower()).removesuffix("hf")


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}:{error.colno}: the file is not valid JSON: {error.msg}", hint="correct the file"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the file cannot be read: {error}") from None


def _from_count(text: str, count: float) -> tuple[ModelShape, list[str]]:
    """Return a Llama model with about `count` parameters, and a note that describes its shape.

    The width is 128 times the number of layers, which Kaplan et al. (arXiv 2001.08361, figure 5) found to be nearly
    optimal and which the Llama family follows. Heads have a size of 128 (64 in small models), and the vocabulary has
    32,000 entries. The feed-forward width is chosen so that the number of parameters comes close to `count`.
    """
    layers = max(1, round((count / (12 * 128**2)) ** (1 / 3)))  # 12 parameters per layer and squared width
    hidden = round_up(max(1, round((count / (12 * layers)) ** 0.5)), 64 if count < 1e8 else 128)
    heads = hidden // (64 if hidden % 128 else 128)
    values = llama(hidden, 1, layers, heads, heads)
    inner = 1 + round((count - from_config(values, where=text)[0].numel) / (3 * hidden * layers))
    if inner < 1:
        raise ConfigError(
            f"{text}: a Llama of {layers} layers and width {hidden} has more than {format_count(count)} parameters",
            hint="use a config.json",
        )
    model, _ = from_config({**values, "intermediate_size": inner}, where=text, name=f"a Llama of {text.strip()}")
    chosen = f"{layers} layers of width {hidden}, {heads} heads, feed-forward {inner}, vocabulary {model.vocab}"
    return model, [f"{text}: planned as a Llama with {chosen}; a config.json is more exact"]
