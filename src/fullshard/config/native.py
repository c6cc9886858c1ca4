"""Fullshard's own YAML: the groups of `RunConfig` as sections, their fields as keys."""

from __future__ import annotations

from typing import Any

from fullshard.config.dialect import Dialect, Key
from fullshard.config.schema import SECTIONS, RunConfig


def _section(group: str) -> Key:
    model: Any = RunConfig.model_fields[group].annotation
    rows = tuple(Key(name, target=f"{group}.{name}") for name in model.model_fields)
    return Key(group, section=Dialect(f"the section {group!r}", rows))


NATIVE = Dialect("a fullshard configuration", tuple(_section(group) for group in SECTIONS))
