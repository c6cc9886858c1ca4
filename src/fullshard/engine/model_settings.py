"""What is set for a whole model, whichever unit it is set on, and goes over from a part to the model around it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

_PATHS = (
    *("event_sink", "forward_prefetch", "backward_prefetch", "is_last_backward", "post_optim_event"),
    *("reducer.order.in_flight", "checkup.every", "checkup.replicas.policy"),
)
"""Attributes of a model's schedule."""


def settings_of(schedule: object) -> list[object]:
    """As they are now."""
    return [operator.attrgetter(path)(schedule) for path in _PATHS]


def take_settings(schedule: object, earlier: object, defaults: Sequence[object]) -> None:
    """What was set on a part before the model around it was sharded holds for the model."""
    for path, value, default in zip(_PATHS, settings_of(earlier), defaults, strict=True):
        if value != default:
            owner, _, name = path.rpartition(".")
            setattr(operator.attrgetter(owner)(schedule) if owner else schedule, name, value)
