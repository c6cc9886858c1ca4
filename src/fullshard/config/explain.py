"""Every setting of a resolved configuration: its value, its source and its default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fullshard.config.resolve import Resolved
from fullshard.config.schema import SETTINGS

DERIVED = "follows from other settings"
"""Source of a value that is neither written anywhere nor the default: `wrap` where classes or a size are given."""


@dataclass(frozen=True, slots=True)
class Explained:
    """One setting.

    Attributes:
        path: `group.name`.
        value: its final value.
        default: its value without any source.
        source: where the value was written, `default`, or `DERIVED`.
        written_as: the key there, if it differs from the setting's name; else None.
        description: what the setting is.
    """

    path: str
    value: Any
    default: Any
    source: str
    written_as: str | None
    description: str

    @property
    def is_set(self) -> bool:
        """Return whether the value comes from anywhere but its default."""
        return self.source != "default"


def explain(resolved: Resolved) -> Iterator[Explained]:
    """Return all settings, in the order of the schema."""
    for path, field in SETTINGS.items():
        value, setting = resolved.value(path), resolved.settings.get(path)
        source = resolved.origin(path).text
        if setting is None and value != field.default:
            source = DERIVED
        written_as = setting.key if setting is not None and setting.key not in (path.split(".")[1], path) else None
        yield Explained(path, value, field.default, source, written_as, " ".join((field.description or "").split()))
