"""Add the engine's events as marks to the traces of torch's profiler."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fullshard.core.events import Event
from fullshard.engine.lookup import units_of


@contextlib.contextmanager
def marked(models: Iterable[nn.Module]) -> Iterator[None]:
    """Mark the events of sharded models in a profile, such as `fullshard: unshard_issued layers.0`."""
    schedules = [units[-1].schedule for model in models if (units := units_of(model))]
    before = [schedule.event_sink for schedule in schedules]
    sinks = []
    for schedule, other in zip(schedules, before, strict=True):

        def mark(event: Event, other: Any = other) -> None:
            with torch.profiler.record_function(f"fullshard: {event.kind} {event.unit}".strip()):
                pass
            if other is not None:
                other(event)

        schedule.event_sink = mark
        sinks.append(mark)
    try:
        yield
    finally:
        for schedule, mark, other in zip(schedules, sinks, before, strict=True):
            if schedule.event_sink is mark:
                schedule.event_sink = other
