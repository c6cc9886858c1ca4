"""Comparison of a running job with its plan: the events, the traffic and the memory of one step.

    check = PlanCheck(model, optimizer, job)
    ...                                     # three steps of training
    print(check.report())

The layout comes from the model, and the other settings (accumulation, optimizer) come from the job.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.comm import torch_private
from fullshard.core.errors import LifecycleError
from fullshard.core.events import Event, EventKind
from fullshard.core.sizes import format_nbytes
from fullshard.engine.lookup import require_units
from fullshard.engine.parameter import ShardedParameter, local_gradients
from fullshard.engine.precision import dtype_name
from fullshard.engine.step.plain_tensors import as_local
from fullshard.engine.unit import Unit
from fullshard.plan.buckets import CountedBucket
from fullshard.plan.job import Job
from fullshard.plan.layout import ModelLayout, UnitLayout
from fullshard.plan.schedule import predict_step
from fullshard.plan.traffic import traffic_of

AT_STEP = 3
"""The optimizer step that is compared, counted from 1. Step 1 has a different schedule and no optimizer state."""

_SENT = {
    "to_device_nbytes": "copied to the device",
    "to_host_nbytes": "copied to the host",
    "gather_nbytes": "sent to unshard",
    "reduce_nbytes": "sent to reduce",
    "replicate_nbytes": "sent between replicas",
}


@dataclass(frozen=True, slots=True)
class Deviation:
    """The planned and the actual value of one category.

    The values are bytes, except for the category of events, whose values are counts.
    """

    category: str
    planned: int
    found: int
    detail: str = ""

    @property
    def is_as_planned(self) -> bool:
        """Return whether the actual value is equal to the planned value."""
        return self.planned == self.found

    def __str__(self) -> str:
        show = str if self.category == "events" else format_nbytes
        off = f" ({self.found / self.planned - 1:+.1%})" if self.planned and not self.is_as_planned else ""
        return f"{self.category}: planned {show(self.planned)}, found {show(self.found)}{off}{self.detail}"


class PlanCheck:
    """Records the events of a sharded model, and compares one step and its memory with the plan.

    Args:
        model: a sharded model. A model has only one event sink, which is this object until the step ends.

    Raises:
        LifecycleError: the model is not sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Job,
    ) -> None:
        units = require_units(model)
        self.model, self._units, self._optimizer, self.job = model, units, optimizer, job
        self._schedule = units[-1].schedule
        self._before = self._schedule.event_sink
        self.steps = self._most_gathered = 0
        self._events: list[Event] = []
        self.found: list[Deviation] | None = None  # set at the end of the compared step
        self._schedule.event_sink = self._receive

    def report(self) -> list[Deviation]:
        """Return the deviations of all categories, including those that match the plan.

        Raises:
            LifecycleError: the step has not ended.
        """
        if self.found is None:
            raise LifecycleError(
                f"the plan can only be compared after step {AT_STEP}, but only {self.steps} steps have ended"
            )
        return self.found

    def _receive(self, event: Event) -> None:
        if self._before is not None:
            self._before(event)
        if self.found is not None:
            return
        if event.what != "activations" and event.kind is not EventKind.PIECES_SENT:  # a plan does not list these
            self._events.append(event)
        if self.steps == AT_STEP - 1:
            gathered = sum(bucket.buffer.nbytes for unit in self._units for bucket in unit.buckets)
            self._most_gathered = max(self._most_gathered, gathered)
        if event.kind is EventKind.OPTIMIZER_STEP:
            self.steps += 1
            if self.steps == AT_STEP:
                self.found = self._compare()  # before the update, while the gradients exist
                if self._schedule.event_sink == self._receive:
                    self._schedule.event_sink = self._before
            self._events.clear()

    def _compare(self) -> list[Deviation]:
        layout = _layout_of(self.model, self._units, self._events)
        options = dataclasses.replace(self.job.schedule, shard_rank=self._units[-1].mesh.shard_rank)
        predicted = predict_step(layout, options)
        end = 1 + next(i for i, event in enumerate(predicted) if event.kind is EventKind.OPTIMIZER_STEP)
        predicted = predicted[end:] + predicted[:end]  # offloading after a step counts at the start of the next
        planned, found = traffic_of(predicted, layout), traffic_of(self._events, layout)
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        named = {unit.name: unit for unit in layout.units}
        gathered = itertools.accumulate(_gathered(event, named[event.unit]) for event in predicted)
        sent = [Deviation(what, getattr(planned, name), getattr(found, name)) for name, what in _SENT.items()]
        gradients = local_gradients([p for bucket in buckets for p in bucket.sharded_parameters])
        trained = sum(bucket.main_nbytes for bucket in layout.buckets if bucket.trainable)
        return [
            _compare_events(predicted, self._events),
            *(each for each in sent if each.planned or each.found or each.category.startswith("sent")),
            Deviation(
                "main weights",
                sum(bucket.main_nbytes for bucket in layout.buckets),
                sum(tensor.nbytes for bucket in buckets for tensor in bucket.stored),
            ),
            Deviation("unsharded at once", max(gathered), self._most_gathered),
            Deviation("gradients", 0 if options.steps_in_backward else trained, _storage_nbytes(gradients)),
            self._compare_state(),
        ]

    def _compare_state(self) -> Deviation:
        """Compare the optimizer state of this model's parameters."""
        row, groups = self.job.planned_optimizer, self._optimizer.param_groups
        held = {id(p) for group in groups for p in group["params"]}
        matrices = {id(p) for group in groups if group.get("algorithm") != "adamw" for p in group["params"]}
        trained = [bucket for unit in self._units for bucket in unit.buckets if bucket.has_gradient]
        planned, states = 0.0, list[Any]()
        for parameter in (p for bucket in trained for p in bucket.sharded_parameters if id(p) in held):
            own = row.matrix if row.matrix is not None and id(parameter) in matrices else row
            planned += parameter.interval.numel * own.state_nbytes(dtype_name(parameter.dtype))
            states += as_local(self._optimizer.state.get(parameter, {})).values()
        found = _storage_nbytes(value for value in states if isinstance(value, torch.Tensor) and value.ndim > 0)
        return Deviation("optimizer state", round(planned), found)


def _gathered(event: Event, unit: UnitLayout) -> int:
    """Return how many bytes of unsharded parameters an event adds, as a negative number if it frees them."""
    match event.kind:
        case EventKind.UNSHARD_ISSUED:
            return unit.gathered_nbytes - unit.decoded_nbytes + unit.coded_nbytes
        case EventKind.UNSHARD_READY:
            return unit.decoded_nbytes - unit.coded_nbytes
        case EventKind.RESHARDED:
            return -unit.gathered_nbytes
    return 0


def _compare_events(planned: list[Event], found: list[Event]) -> Deviation:
    """Compare the events. The actual value is the number of events before the first mismatch."""
    pairs = enumerate(itertools.zip_longest(planned, found))
    same, (first, other) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (len(planned), (None, None)))
    if first is other:
        return Deviation("events", len(planned), same)
    words = ["the end" if e is None else f"{e.kind} of {e.unit or 'the root'}" for e in (first, other)]
    return Deviation("events", len(planned), same, f"; after them {words[0]} was planned, and {words[1]} came")


def _storage_nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the total size in bytes of the storages of `tensors`. A shared storage counts once."""
    storages = {
        torch_private.storage_id(s): s.nbytes() for t in tensors if t is not None for s in [t.untyped_storage()]
    }
    return sum(storages.values())


def _layout_of(model: nn.Module, units: list[Unit], events: list[Event]) -> ModelLayout:
    """Return the layout of a sharded model, with the units in the order of their forward calls in `events`."""
    output: Any = getattr(model, "get_output_embeddings", lambda: None)
    head, root, mesh = output(), units[-1], units[-1].mesh
    plans = {
        unit.name: UnitLayout(
            unit.name,
            # A bucket may have been frozen when it was made.
            tuple(CountedBucket.like(bucket.plan, trainable=bucket.has_gradient) for bucket in unit.buckets),
            unit.reshards_after_forward,
            feeds_units=unit is root and any(p.requires_grad for p in _embeddings_of(unit)),
            takes_ids=unit is root or isinstance(unit.modules[0], nn.Embedding),
            block=None,
            is_head=unit is not root and head in unit.modules,
        )
        for unit in units
    }
    begun = [event.unit for event in events if event.kind is EventKind.BACKWARD_BEGIN]
    order = list(dict.fromkeys(event.unit for event in events if event.kind is EventKind.FORWARD_BEGIN))
    return ModelLayout(
        tuple(plans.values()),
        tuple(plans[name] for name in order),
        mesh.shard_size,
        mesh.replicate_size,
        returns_head=bool(begun) and plans[begun[0]].is_head,
        keeps_parameters=not any(unit.reshards_after_backward for unit in units),
        keeps_gradients=root.schedule.keeps_gradients,
    )


def _embeddings_of(unit: Unit) -> list[ShardedParameter]:
    slots = [pair for b in unit.buckets for pair in zip(b.slots, b.sharded_parameters, strict=True)]
    return [p for slot, p in slots if any(isinstance(module, nn.Embedding) for module, _ in slot.owners)]
