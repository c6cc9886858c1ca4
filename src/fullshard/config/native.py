"""Fullshard's own YAML: the groups of `RunConfig` as sections, their fields as keys."""

from __future__ import annotations

from fullshard.config.dialect import Dialect, Key
from fullshard.config.schema import GROUPS

NATIVE = Dialect(
    "a fullshard configuration",
    tuple(
        Key(
            group,
            section=Dialect(
                f"the section {group!r}", tuple(Key(name, target=f"{group}.{name}") for name in model.model_fields)
            ),
        )
        for group, model in GROUPS.items()
    ),
)
