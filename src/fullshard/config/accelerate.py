"""Accelerate's words: its YAML and JSON, the flags of its launcher and the variables that the launcher sets.

The keys of `fsdp_config` are also those of Transformers' `--fsdp_config`, so the table of that is made from this one.
"""

from __future__ import annotations

from typing import Any

from fullshard.config import values
from fullshard.config.dialect import Key, Settings, Status
from fullshard.core.errors import ConfigError
from fullshard.core.strategy import parse_strategy

DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""Parameters of a unit under SIZE_BASED_WRAP where none are given, as Accelerate has it."""

_NUMBERED = {
    "sharding.backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "checkpoint.state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
}
_WRAPS = {"TRANSFORMER_BASED_WRAP": "auto", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
_USED, _TRANSLATED, _NO_EFFECT, _REFUSED = Status


def _numbered(path: str, value: Any) -> Settings:
    """A name in any case, or its number from 1."""
    known = _NUMBERED[path]
    name = values.text(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(known):
        name = known[int(name) - 1]
    if name not in known:
        choices = ", ".join(f"{name} ({number})" for number, name in enumerate(known, 1))
        raise ConfigError(f"expected one of {choices}, got {value!r}", hint=_closest(name, known))
    if name == "LOCAL_STATE_DICT":
        raise ConfigError(
            "LOCAL_STATE_DICT could be loaded at the same world size only",
            hint="use SHARDED_STATE_DICT, which loads at any",
        )
    return {path: name}


def _closest(name: str, known: tuple[str, ...]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"


def _wrap(value: Any) -> Settings:
    name = values.text(value).upper()
    if name == "SIZED_BASED_WRAP":  # as a widely copied page has it
        name = "SIZE_BASED_WRAP"
    if name.isdigit() and 1 <= int(name) <= len(_WRAPS):
        name = list(_WRAPS)[int(name) - 1]
    if name not in _WRAPS:
        raise ConfigError(f"expected one of {', '.join(_WRAPS)}, got {value!r}", hint=_closest(name, tuple(_WRAPS)))
    return {"sharding.wrap": _WRAPS[name]}


def _strategy(value: Any) -> Settings:
    return {"sharding.strategy": parse_strategy(_no_bool(value)).name}


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ConfigError(f"expected a strategy's name or number, got {value!r}", hint="for example FULL_SHARD")
    return value


def _reshard(value: Any) -> Settings:
    """A truth value, or (version 1) the name of a strategy."""
    try:
        return {"sharding.reshard_after_forward": values.boolean(value) if str(value).strip() != "1" else True}
    except ValueError:
        try:
            return _strategy(value)
        except ConfigError:
            raise ConfigError(
                f"expected true or false, got {value!r}", hint="or, with fsdp_version 1, the name of a strategy"
            ) from None


def _prefetch(value: Any) -> Settings:
    return _numbered("sharding.backward_prefetch", value)


def _state_dict(value: Any) -> Settings:
    return _numbered("checkpoint.state_dict_type", value)


def _version(value: Any) -> Settings | None:
    if values.integer(value) not in (1, 2):
        raise ConfigError(f"expected 1 or 2, got {value!r}", hint="leave it out: both mean the same here")
    return None


def _checked(read: values.Read) -> Any:
    """Reader for a key without effect, whose value must be right all the same."""

    def check(value: Any) -> Settings | None:
        if not values.is_none(value):
            read(value)
        return None

    return check


FSDP_KEYS = (
    Key("fsdp_version", _NO_EFFECT, because="one engine has the interface of both versions", read=_version),
    Key("fsdp_sharding_strategy", target="sharding.strategy", read=_strategy),
    Key("fsdp_reshard_after_forward", target="sharding.reshard_after_forward", read=_reshard),
    Key("fsdp_offload_params", target="sharding.cpu_offload", spellings=("fsdp_cpu_offload",)),
    Key("fsdp_auto_wrap_policy", target="sharding.wrap", read=_wrap, spellings=("fsdp_wrap_policy",)),
    Key(
        "fsdp_transformer_layer_cls_to_wrap",
        target="sharding.wrap_classes",
        spellings=("fsdp_transformer_cls_names_to_wrap", "fsdp_transformer_cls_to_wrap"),
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
    ),
    Key("fsdp_min_num_params", target="sharding.wrap_min_numel", spellings=("fsdp_min_num_param",)),
    Key(
        "fsdp_backward_prefetch",
        target="sharding.backward_prefetch",
        spellings=("fsdp_backward_prefetch_policy",),
        read=_prefetch,
    ),
    Key("fsdp_forward_prefetch", target="sharding.forward_prefetch"),
    Key("fsdp_state_dict_type", target="checkpoint.state_dict_type", read=_state_dict),
    Key(
        "fsdp_use_orig_params",
        _NO_EFFECT,
        because="the original parameters are always kept",
        read=_checked(values.boolean),
    ),
    Key("fsdp_cpu_ram_efficient_loading", target="sharding.cpu_ram_efficient_loading"),
    Key("fsdp_sync_module_states", target="sharding.sync_module_states"),
    Key("fsdp_activation_checkpointing", target="sharding.activation_checkpointing"),
    Key(
        "fsdp_activation_checkpointing_offload",
        _REFUSED,
        because="activations are recomputed or kept, not moved to the host",
    ),
    Key("fsdp_ignored_modules", target="sharding.ignored_modules"),
    Key(
        "fsdp_limit_all_gathers",
        _NO_EFFECT,
        because="the engine bounds the units in flight itself",
        read=_checked(values.boolean),
    ),
)
