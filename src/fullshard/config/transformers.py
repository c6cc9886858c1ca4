"""Transformers' dialect: `--fsdp` and the keys of `--fsdp_config` (versions 4 and 5, with or without `fsdp_`)."""

import dataclasses
import re
from typing import Any

from fullshard.config.dialect import Dialect, Key, Problem, Reading, Setting, Settings
from fullshard.config.fsdp import finish_fsdp, renamed
from fullshard.config.origin import Origin
from fullshard.config.settings import closest
from fullshard.config.xla import XLA_KEYS
from fullshard.core.errors import ConfigError

TRANSFORMERS = Dialect(
    "a Transformers fsdp_config",
    (*renamed({"fsdp_offload_params": "fsdp_cpu_offload"}), *XLA_KEYS),
    prefix="fsdp_",
    finish=finish_fsdp,
)


def _read_words(value: Any) -> Settings:
    reading = read_fsdp_words(" ".join(value) if isinstance(value, list) else value, Origin.argument("fsdp"))
    if reading.problems:
        raise ConfigError(reading.problems[0].message, hint=reading.problems[0].hint)
    return {setting.path: setting.value for setting in reading.settings}


def _finish(reading: Reading) -> None:
    """Apply the rules of `fsdp_config`. Remove its two top-level entries, because their contents have been read."""
    finish_fsdp(reading)
    for name in ("fsdp", "fsdp_config"):
        reading.entries.pop(name, None)


FSDP_ARGUMENTS = Dialect(
    "a file of fsdp and fsdp_config",
    (
        Key("fsdp", target="sharding.strategy", read=_read_words),
        Key("fsdp_config", section=dataclasses.replace(TRANSFORMERS, finish=None)),
    ),
    finish=_finish,
)
"""The two arguments of a Trainer in one file, as in ms-swift's presets."""

_WORDS: dict[tuple[str, ...], tuple[str, Any] | None] = {
    ("hybrid", "shard", "zero2"): ("sharding.strategy", "HYBRID_SHARD_ZERO2"),
    ("hybrid", "shard"): ("sharding.strategy", "HYBRID_SHARD"),
    ("full", "shard"): ("sharding.strategy", "FULL_SHARD"),
    ("shard", "grad", "op"): ("sharding.strategy", "SHARD_GRAD_OP"),
    ("no", "shard"): ("sharding.strategy", "NO_SHARD"),
    ("auto", "wrap"): None,  # units are always determined, by fsdp_config's policy if it has one
    ("offload",): ("sharding.cpu_offload", True),
    ("true",): ("sharding.strategy", "FULL_SHARD"),  # version 5 has a boolean
    ("false",): ("sharding.strategy", "NO_SHARD"),
}
_KNOWN = "full_shard, shard_grad_op, no_shard, hybrid_shard, hybrid_shard_zero2, auto_wrap, offload"


def read_fsdp_words(text: Any, origin: Origin) -> Reading:
    """Read the settings of `--fsdp "full_shard auto_wrap offload"`: options with spaces or commas, or a boolean."""
    reading = Reading()
    words = [word for word in re.split(r"[\s,_'\"-]+", str(text).lower()) if word]
    while words:
        option = next((option for option in _WORDS if tuple(words[: len(option)]) == option), None)
        if option is None:
            pieces = re.split(r"[\s,'\"]+", str(text))
            written = next((piece for piece in pieces if re.split("[_-]", piece.lower())[0] == words[0]), words[0])
            message = f"unknown option {written!r} in {str(text)!r}"
            close = closest(written.lower(), _KNOWN.split(", "), 0.6)
            reading.problems.append(Problem((origin,), message, f"did you mean {close}?" if close else f"use {_KNOWN}"))
            return reading
        name, meaning = "_".join(option), _WORDS[option]
        if meaning is not None:
            reading.settings.append(Setting(*meaning, origin, name))
        del words[: len(option)]
    if reading.setting("sharding.cpu_offload") and not reading.setting("sharding.strategy"):
        message = "offload has no effect without a sharding strategy"
        reading.problems.append(Problem((origin,), message, 'write "full_shard offload"'))
    reading.find_contradictions()
    return reading
