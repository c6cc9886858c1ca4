"""Compares a running job with its plan: the events, the bytes on the wire and the bytes in memory of one step.

    check = PlanCheck(model, optimizer, job, at_step=3)
    ...                                     # three steps of training
    print(check.report())

The model shows its own layout; the job says what the model does not (accumulation, optimizer).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.core.errors import LifecycleError
from fullshard.core.events import Event, EventKind
from fullshard.core.sizes import format_nbytes
from fullshard.engine.bucket import Bucket
from fullshard.engine.module import units_of
from fullshard.engine.unit import Unit
from fullshard.plan.job import Job
from fullshard.plan.layout import BucketPlan, ModelLayout, UnitLayout
from fullshard.plan.memory import STATE_NBYTES
from fullshard.plan.schedule import predict_step
from fullshard.plan.traffic import traffic_of


@dataclass(frozen=True, slots=True)
class Difference:
    """One category, as it was planned and as it is. Bytes, but for the events, which are counted."""

    category: str
    planned: int
    found: int

    def __str__(self) -> str:
        off = f" ({self.found / self.planned - 1:+.1%})" if self.planned else ""
        if self.category == "events":
            return f"events: planned {self.planned}, found {self.found}{off}"
        return f"{self.category}: planned {format_nbytes(self.planned)}, found {format_nbytes(self.found)}{off}"


class PlanCheck:
    """Listens to a sharded model and looks at its memory at the end of one step.

    Args:
        model: sharded; one event sink can listen, and it is this one until the step is over.
        optimizer: of its parameters.
        job: what was planned.
        at_step: which optimizer step to look at, from 1. The first has another schedule, and no optimizer state yet.

    Raises:
        LifecycleError: the model is not sharded.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, job: Job, *, at_step: int = 3) -> None:
        units = units_of(model)
        if not units:
            raise LifecycleError(f"{type(model).__name__} is not sharded", hint="shard it before checking its plan")
        self._units, self._optimizer, self._job, self._at_step = units, optimizer, job, at_step
        self._schedule = units[-1].schedule
        self._before = self._schedule.event_sink
        self._steps = 0
        self._events: list[Event] = []
        self._found: list[Difference] | None = None
        self._schedule.event_sink = self._receive

    @property
    def is_done(self) -> bool:
        """Whether the step is over."""
        return self._found is not None

    def report(self) -> list[Difference]:
        """Every category, those that are as planned included.

        Raises:
            LifecycleError: the step is not over yet.
        """
        if self._found is None:
            raise LifecycleError(f"step {self._at_step} is not over yet ({self._steps} steps so far)")
        return self._found

    def _receive(self, event: Event) -> None:
        if self._before is not None:
            self._before(event)
        if self._found is not None:
            return
        self._events.append(event)
        if event.kind is EventKind.OPTIMIZER_STEP:
            self._steps += 1
            if self._steps == self._at_step:
                self._found = self._compare()  # before the update: gradients are still there
            self._events.clear()

    def _compare(self) -> list[Difference]:
        layout = _layout_of(self._units, self._events)
        predicted = predict_step(layout, dataclasses.replace(self._job.schedule, is_first_step=False))
        planned, found = traffic_of(predicted, layout), traffic_of(self._events, layout)
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        trained = [bucket for bucket in buckets if bucket.gradient is not None]
        owned = sum(p.numel() for bucket in trained for p in bucket.sharded_parameters)
        return [
            Difference("events", len(predicted), sum(a == b for a, b in zip(self._events, predicted, strict=False))),
            Difference("sent to unshard", planned.gather_nbytes, found.gather_nbytes),
            Difference("sent to reduce", planned.reduce_nbytes, found.reduce_nbytes),
            Difference("sent between replicas", planned.replicate_nbytes, found.replicate_nbytes),
            Difference(
                "main weights",
                sum(b.main_nbytes for b in layout.buckets),
                sum(bucket.main.nbytes for bucket in buckets),
            ),
            Difference(
                "gradients",
                sum(b.layout.shard_numel for b in layout.buckets if b.trainable) * 4,
                _storage_nbytes(p.grad for bucket in trained for p in bucket.sharded_parameters),
            ),
            Difference(
                "optimizer state",
                round(owned * STATE_NBYTES[self._job.optimizer]),
                _storage_nbytes(
                    value
                    for state in self._optimizer.state.values()
                    for value in state.values()
                    if isinstance(value, torch.Tensor) and value.ndim > 0
                ),
            ),
        ]


def _storage_nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = {s._cdata: s.nbytes() for t in tensors if t is not None for s in [t.untyped_storage()]}
    return sum(storages.values())


def _layout_of(units: list[Unit], events: list[Event]) -> ModelLayout:
    """The layout of a model that is sharded already, its calls in the order the events have them."""
    plans = {unit.name: _unit_layout(unit, is_root=unit is units[-1]) for unit in units}
    order = list(dict.fromkeys(event.unit for event in events if event.kind is EventKind.FORWARD_BEGIN))
    mesh = units[-1].mesh
    return ModelLayout(
        tuple(plans.values()), tuple(plans[name] for name in order), mesh.shard_size, mesh.replicate_size
    )


def _unit_layout(unit: Unit, *, is_root: bool) -> UnitLayout:
    trains_embedding = any(
        isinstance(module, nn.Embedding) and parameter.requires_grad
        for bucket in unit.buckets
        for slot, parameter in zip(bucket.slots, bucket.sharded_parameters, strict=True)
        for module, _ in slot.owners
    )
    return UnitLayout(
        unit.name,
        tuple(_bucket_plan(bucket) for bucket in unit.buckets),
        unit.reshard_after_forward,
        feeds_units=is_root and trains_embedding,
        takes_ids=is_root,
        block=None,
    )


def _bucket_plan(bucket: Bucket) -> BucketPlan:
    stored, compute, reduce = (
        str(dtype).removeprefix("torch.") for dtype in (bucket.dtype, bucket.compute_dtype, bucket.reduce_dtype)
    )
    largest = max(spec.numel for spec in bucket.layout.specs)
    return BucketPlan(bucket.layout, stored, compute, reduce, bucket.gradient is not None, largest)
