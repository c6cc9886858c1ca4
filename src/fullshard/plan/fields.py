"""Read the fields of a model's `config.json`, with defaults and type checks."""

from collections.abc import Mapping
from typing import Any

from fullshard.core.errors import ConfigError


class Fields:
    """The fields of a model's `config.json`.

    The names of some fields differ between model families. A method that takes several names returns the value of the
    first one that is set, or the default if none is. It raises `ConfigError` if the value has the wrong type, or if the
    field is missing and has no default.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the value of a field that is a positive whole number."""
        number: int = self._read(names, default, int, "a positive whole number", least=1)
        return number

    def flag(self, name: str, default: bool) -> bool:
        """Return the value of a field that is true or false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool | int):
            raise ConfigError(f"{self.where}: {name} is {value!r}, expected true or false")
        return default if value is None else bool(value)

    def items(self, name: str) -> tuple[Any, ...]:
        """Return the value of a field that is a list, or an empty tuple if it is not set."""
        return tuple(self._read((name,), (), list | tuple, "a list"))

    def text(self, *names: str, default: str) -> str:
        """Return the value of a field that is a string."""
        return str(self._read(names, default, str, "a word"))

    def is_dropped(self, *names: str, default: float = 0.0) -> bool:
        """Return whether a field that holds a dropout probability is greater than 0."""
        return bool(self._read(names, default, int | float, "a number") > 0)

    def is_set(self, name: str) -> bool:
        """Return whether the field is present."""
        return self.values.get(name) is not None

    def _read(self, names: tuple[str, ...], default: Any, kind: Any, expected: str, *, least: int | None = None) -> Any:
        name = next((name for name in names if self.is_set(name)), None)
        if name is None:
            if default is not None:
                return default
            raise ConfigError(
                f"{self.where}: the field {' or '.join(names)} is missing", hint="use the model's complete config.json"
            )
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, kind) or (least is not None and value < least):
            raise ConfigError(f"{self.where}: {name} is {value!r}, expected {expected}")
        return value

    def heads(self) -> tuple[int, int, int]:
        """Return the number of query heads, the number of key and value heads, and the width of a head."""
        heads, hidden = self.number("num_attention_heads"), self.number("hidden_size")
        kv_heads = self.number("num_key_value_heads", default=heads)
        return heads, kv_heads, self.number("head_dim", default=hidden // heads)

    def window(self, index: int, *, period: int) -> int:
        """Return how many keys a query of layer `index` sees, or 0 if it sees all keys before it.

        The field `layer_types` says whether each layer has a window. Older files contain a pattern instead, or neither.
        `period` is the default pattern of the model family: every layer except one in `period` has a window. If
        `period` is 1, every layer has a window; if it is 0, no layer has one.
        """
        width, kinds = self.values.get("sliding_window"), self.items("layer_types")
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            return 0
        if index < len(kinds):
            return width if kinds[index] == "sliding_attention" else 0
        period = self.number("sliding_window_pattern", default=period) if period else 0
        return width if period == 1 or (period and (index + 1) % period) else 0
