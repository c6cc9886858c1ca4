"""The keys of `fsdp_config`, which are shared by Accelerate, its plugin, and Transformers' `--fsdp_config`.

There are two versions of these keys. Version 1 has a named strategy, and version 2 has the boolean
`reshard_after_forward`. This dialect accepts the keys of both versions, as long as they do not contradict each other.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from fullshard.config import values
from fullshard.config.dialect import Dialect, Key, Note, Problem, Reading, Setting, Settings, Status, checked, rows
from fullshard.core.errors import ConfigError
from fullshard.core.strategy import STRATEGIES, Axis, parse_strategy

DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""Accelerate's default for the number of parameters of a unit with SIZE_BASED_WRAP."""

_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATE_DICT = "checkpoint.state_dict_type"
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_BY_CLASS = ("auto", "class")
_WRAPS = {"TRANSFORMER_BASED_WRAP": "auto", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}


def _wrap(value: Any) -> Settings:
    if values.text(value).upper() == "SIZED_BASED_WRAP":  # the spelling of a widely copied page
        value = "SIZE_BASED_WRAP"
    return {"sharding.wrap": _WRAPS[values.one_of(value, tuple(_WRAPS), numbered=True)]}


def _min_num_params(value: Any) -> Settings | str:
    # Transformers writes 0 for "not set".
    number = values.integer(value)
    return {"sharding.wrap_min_numel": number} if number != 0 else "0 asks for no size"


def _strategy(value: Any) -> Settings:
    if isinstance(value, bool):
        raise ConfigError(
            f"expected the name or number of a strategy, got {value!r}", hint="use a strategy, for example FULL_SHARD"
        )
    return {"sharding.strategy": parse_strategy(value).name}


def _reshard(value: Any) -> Settings:
    """Read a boolean, `auto`, or, as in version 1, the name or number of a strategy. The number 1 always means true."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return {"sharding.reshard_after_forward": "auto"}
    try:
        return _strategy(value)
    except ConfigError:
        pass
    try:
        return {"sharding.reshard_after_forward": values.boolean(value)}
    except ValueError:
        raise ConfigError(
            f"expected true, false or auto, got {value!r}",
            hint="with fsdp_version 1, you can also use the name of a strategy",
        ) from None


def _named(path: str, known: tuple[str, ...]) -> Any:
    return lambda value: {path: values.one_of(value, known, numbered=True)}


def _version(value: Any) -> None:
    if values.integer(value) not in (1, 2):
        raise ConfigError(
            f"expected 1 or 2, got {value!r}", hint="remove this setting; versions 1 and 2 behave the same here"
        )


FSDP_KEYS = (
    Key("fsdp_version", Status.NO_EFFECT, because="the engine has the interface of both versions", read=_version),
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
    Key(
        "fsdp_min_num_params", target="sharding.wrap_min_numel", read=_min_num_params, spellings=("fsdp_min_num_param",)
    ),
    Key(
        "fsdp_backward_prefetch",
        target="sharding.backward_prefetch",
        spellings=("fsdp_backward_prefetch_policy",),
        read=_named("sharding.backward_prefetch", _PREFETCH),
    ),
    Key("fsdp_state_dict_type", target=_STATE_DICT, read=_named(_STATE_DICT, _STATE_DICTS)),
    Key("fsdp_offload_activations", target="sharding.offload_activations", spellings=("fsdp_activation_cpu_offload",)),
    *rows("fsdp_booleans", checked(values.boolean)),
    *rows("fsdp"),
)


def renamed(names: Mapping[str, str]) -> Iterator[Key]:
    """Yield the rows with new names for some keys. Their names in Accelerate remain as alternative spellings."""
    for key in FSDP_KEYS:
        name = names.get(key.name, key.name)
        others = tuple(other for other in (key.name, *key.spellings) if other != name)
        yield dataclasses.replace(key, name=name, spellings=others)


def finish_fsdp(reading: Reading) -> None:
    """Apply the rules that depend on several keys: the choice of units, and the two ways to set a strategy."""
    _finish_wrap(reading)
    _finish_strategy(reading)


def _finish_wrap(reading: Reading) -> None:
    wrap, size = reading.setting("sharding.wrap"), reading.setting("sharding.wrap_min_numel")
    classes = reading.setting("sharding.wrap_classes")
    if classes is not None and classes.value and (other := wrap or size) is not None and other.value not in _BY_CLASS:
        message = f"{classes.key} selects units by class, but {other.key} selects them in another way"
        hint = "use TRANSFORMER_BASED_WRAP, or remove one of the two"
        reading.problems.append(Problem((classes.origin, other.origin), message, hint))
    elif wrap is not None and wrap.value != "size":
        reading.drop("sharding.wrap_min_numel", f"it only applies to SIZE_BASED_WRAP, but {wrap.key} has another value")
    elif wrap is not None and size is None:
        reading.settings.append(Setting("sharding.wrap_min_numel", DEFAULT_MIN_NUM_PARAMS, wrap.origin, wrap.key))
        text = f"uses units of {DEFAULT_MIN_NUM_PARAMS:,} parameters because fsdp_min_num_params is not set"
        reading.notes.append(Note(wrap.origin, wrap.key, Status.TRANSLATED, text))


def _finish_strategy(reading: Reading) -> None:
    strategy, reshard = reading.setting("sharding.strategy"), reading.setting("sharding.reshard_after_forward")
    if strategy is None or reshard is None or reshard.value is None:
        return
    row = parse_strategy(strategy.value)
    if reshard.value == "auto" or row.with_reshard(reshard.value) in (None, row):
        return  # the schema refuses combinations that a row does not support
    said = f"{reshard.key} = {str(reshard.value).lower()}"
    version = reading.entries.get("fsdp_version")
    if version is not None and str(version.value).strip() == "2":
        text = f"means {row.name} with {said}, which takes precedence in version 2"
        reading.notes.append(Note(strategy.origin, strategy.key, Status.TRANSLATED, text))
        return
    message = f"{strategy.key} = {row.name} and {said} contradict each other"
    hint = f"remove {reshard.key}, or set the strategy that you want"
    reading.problems.append(Problem((strategy.origin, reshard.origin), message, hint))


def make_hybrid(reading: Reading, because: Setting) -> None:
    """Replace the reading's strategy with its hybrid version, which has the same behavior after forward."""
    old = reading.setting("sharding.strategy")
    row = STRATEGIES["FULL_SHARD"] if old is None else parse_strategy(old.value)
    if old is not None and not row.shards:
        message = f"{because.key} divides the ranks into shard groups, but {old.key} means {row.name}"
        problem = Problem((because.origin, old.origin), message, f"remove {because.key}, or use a strategy that shards")
        reading.problems.append(problem)
        return
    if row.is_hybrid:
        return
    name = row.with_axes(*Axis).name
    reading.settings = [setting for setting in reading.settings if setting.path != "sharding.strategy"]
    reading.settings.append(Setting("sharding.strategy", name, because.origin, because.key))
    text = f"makes the strategy {name}, which shards within a group and replicates across groups"
    reading.notes.append(Note(because.origin, because.key, Status.TRANSLATED, text))


FSDP = Dialect("fsdp_config", FSDP_KEYS, prefix="fsdp_", finish=finish_fsdp)
