"""The places where values were set, as reported in messages and by `fullshard config explain`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self


class Precedence(IntEnum):
    """The kinds of sources in ascending order of precedence. An argument is a value that the script passes."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3
    ARGUMENT = 4


@dataclass(frozen=True, slots=True)
class Origin:
    """A place where a value was written, such as `run.yaml:7:3`, `--fsdp_offload_params`, or `$FSDP_OFFLOAD_PARAMS`."""

    precedence: Precedence
    text: str

    @classmethod
    def variable(cls, name: str) -> Self:
        """Return the origin of a value that was read from an environment variable."""
        return cls(Precedence.ENVIRONMENT, f"${name}")

    @classmethod
    def flag(cls, name: str) -> Self:
        """Return the origin of a value that was set by a command-line flag. The name includes the dashes."""
        return cls(Precedence.FLAG, name)

    @classmethod
    def argument(cls, name: str) -> Self:
        """Return the origin of an argument that a script passes."""
        return cls(Precedence.ARGUMENT, name)

    def __str__(self) -> str:
        return self.text


DEFAULT = Origin(Precedence.DEFAULT, "default")


@dataclass(frozen=True, slots=True, repr=False)
class Entry:
    """A key as written, with its value: a scalar, a list, or a tuple of entries if the value is a mapping."""

    key: str
    value: Any
    origin: Origin

    def __repr__(self) -> str:
        """Return the key and value as written, including nested keys, because error messages quote them."""
        return f"{self.key}: {self.value!r}"

    @property
    def is_mapping(self) -> bool:
        """Return whether the value is a mapping."""
        return isinstance(self.value, tuple)

    @property
    def plain(self) -> Any:
        """Return the value, with mappings as dictionaries."""
        return {inner.key: inner.plain for inner in self.value} if self.is_mapping else self.value


def entries_of(mapping: Mapping[str, Any], what: str) -> tuple[Entry, ...]:
    """Return the entries of a mapping that a script passes. Messages refer to the mapping as `what`."""
    found = []
    for key, value in mapping.items():
        inner = entries_of(value, f"{what}.{key}") if isinstance(value, Mapping) else value
        found.append(Entry(str(key), inner, Origin.argument(what)))
    return tuple(found)
