"""Readers that convert values as users write them (`'no'`, `True`, `1e8`, `"A, B"`) to the type of a setting.

A value that cannot be read raises a `ValueError` with a message that gives the expected and the actual value.
"""

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from fullshard.config.schema import SETTINGS
from fullshard.config.settings import closest
from fullshard.core.errors import ConfigError

_TRUE = {"true", "yes", "on", "y", "1"}
_FALSE = {"false", "no", "off", "n", "0"}
_NONE = {"", "none", "null", "~"}

Read = Callable[[Any], Any]


def boolean(value: Any) -> bool:
    """Read a boolean in any of the spellings used in YAML and environment variables."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"expected true or false, got {value!r}")


def integer(value: Any) -> int:
    """Read an integer. `1e8` and `100_000` are accepted."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a whole number, got {value!r}")
    try:
        number = float(value)
        if number.is_integer():
            return int(value) if isinstance(value, int) or str(value).strip().lstrip("+-").isdigit() else int(number)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"expected a whole number, got {value!r}")


def number(value: Any) -> float:
    """Read a number. Refuse NaN, which comparisons with bounds cannot detect."""
    try:
        if not isinstance(value, bool) and not math.isnan(found := float(value)):
            return found
    except (TypeError, ValueError):
        pass
    raise ValueError(f"expected a number, got {value!r}")


def text(value: Any) -> str:
    """Read text and strip surrounding spaces."""
    if isinstance(value, bool | list | tuple | Mapping):
        raise ValueError(f"expected text, got {value!r}")
    return str(value).strip()


def names(value: Any) -> tuple[str, ...]:
    """Read names from a list or comma-separated text, stripping spaces. A single number may be the name of a device."""
    items = value.split(",") if isinstance(value, str) else [value] if type(value) is int else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str | int) for item in items):
        raise ValueError(f"expected names separated by commas, got {value!r}")
    return tuple(name for item in items if (name := str(item).strip()))


def one_of(value: Any, known: Sequence[str], *, numbered: bool = False) -> str:
    """Read one of the uppercase names. Accept any case, `-` or a space for `_`, and, if `numbered`, its number."""
    name = text(value).upper().replace("-", "_").replace(" ", "_")
    if numbered and name.isdigit() and 1 <= int(name) <= len(known):
        return known[int(name) - 1]
    if name in known:
        return name
    choices = ", ".join(f"{item} ({number})" if numbered else item for number, item in enumerate(known, 1))
    close = closest(name, known)
    raise ConfigError(
        f"expected one of {choices}, got {value!r}", hint=f"did you mean {close}?" if close else f"use {known[0]}"
    )


def is_none(value: Any) -> bool:
    """Return whether the value counts as unset."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _NONE)


def coerce(path: str, value: Any) -> Any:
    """Convert a value to the type of the setting at `path`. Raise `ValueError` if it cannot be converted."""
    kinds = _members(SETTINGS[path].annotation)
    if type(None) in kinds and is_none(value):
        return None
    if kinds & {"names"}:
        return names(value)
    if {bool, str} <= kinds and isinstance(value, str) and value.strip().lower() not in _TRUE | _FALSE:
        return text(value).lower()
    for kind, read in ((bool, boolean), (int, integer), (float, number)):
        if kind in kinds:
            return read(value)
    if isinstance(value, bool):
        return value  # YAML reads `mode: no` as false; the schema handles it
    return text(value)


def _members(annotation: Any) -> set[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*(_members(member) for member in get_args(annotation)))
    if get_origin(annotation) is Literal:
        return {str}
    if get_origin(annotation) is tuple:
        return {"names"}
    return {annotation}
