"""Settings of a whole model: they may be set on any unit, and pass from a part to the model around it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

_PATHS = (
    *("event_sink", "forward_prefetch", "backward_prefetch", "is_last_backward"),
    "reducer.order.in_flight",
)
"""Attributes of a model's schedule."""


def settings_of(schedule: object) -> list[object]:
    """Return the current settings."""
    return [operator.attrgetter(path)(schedule) for path in _PATHS]


def take_settings(schedule: object, earlier: object, defaults: Sequence[object]) -> None:
    """Take over the settings that were made on a part before the model around it was sharded."""
    for path, value, default in zip(_PATHS, settings_of(earlier), defaults, strict=True):
        if value != default:
            owner, _, name = path.rpartition(".")
            setattr(operator.attrgetter(owner)(schedule) if owner else schedule, name, value)
