"""Compares a running job with its plan: the events, the bytes on the wire and the bytes in memory of one step.

    check = PlanCheck(model, optimizer, job, at_step=3)
    ...                                     # three steps of training
    print(check.report())

The model shows its own layout; the job adds the rest (accumulation, optimizer). `PlanWatch` does this
for every model that an `Accelerator` prepares, and reports: `fullshard launch --check_plan`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.comm import torch_private
from fullshard.core.errors import LifecycleError
from fullshard.core.events import Event, EventKind
from fullshard.core.sizes import format_nbytes
from fullshard.engine.bucket import Bucket
from fullshard.engine.lookup import require_units, units_of
from fullshard.engine.parameter import ShardedParameter, local_gradients
from fullshard.engine.precision import dtype_name
from fullshard.engine.step.plain_tensors import as_local
from fullshard.engine.unit import Unit
from fullshard.features.matrices import sent_numel
from fullshard.optim import Muon
from fullshard.optim.with_adamw import MatricesWithAdamW
from fullshard.plan.buckets import CountedBucket
from fullshard.plan.dealing import deal, matrices_in
from fullshard.plan.job import Job
from fullshard.plan.layout import ModelLayout, UnitLayout
from fullshard.plan.schedule import predict_step
from fullshard.plan.traffic import Traffic, traffic_of

AT_STEP = 3
"""The optimizer step that is compared. The first has another schedule, and no optimizer state yet."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """One category, as it was planned and as it is. Bytes, but for the events, which are counted.

    Attributes:
        category: of the compared figures.
        planned: None where the plan does not know, such as the state of an optimizer it has no formula for.
        found: in this rank.
        detail: where it begins, if that can be said.
    """

    category: str
    planned: int | None
    found: int
    detail: str = ""

    @property
    def is_as_planned(self) -> bool:
        """Return whether there is nothing to report."""
        return self.planned in (None, self.found)

    def __str__(self) -> str:
        show = str if self.category == "events" else format_nbytes
        if self.planned is None:
            return f"{self.category}: not planned, found {show(self.found)}"
        off = f" ({self.found / self.planned - 1:+.1%})" if self.planned and not self.is_as_planned else ""
        return f"{self.category}: planned {show(self.planned)}, found {show(self.found)}{off}{self.detail}"


class PlanCheck:
    """Listens to a sharded model and looks at its memory at the end of one step.

    Args:
        model: sharded; one event sink can listen, and it is this one until the step is over.
        optimizer: of its parameters.
        job: as planned.
        at_step: which optimizer step to look at, from 1.
        is_state_planned: False if `job.optimizer` stands for one that the planner does not know.
        when_done: called with the report, within the step's `optimizer.step()`, before the update.

    Raises:
        LifecycleError: the model is not sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        job: Job,
        *,
        at_step: int = AT_STEP,
        is_state_planned: bool = True,
        when_done: Callable[[list[Deviation]], None] | None = None,
    ) -> None:
        units = require_units(model)
        self.model, self._units, self._optimizer, self._job = model, units, optimizer, job
        self._at_step, self._is_state_planned, self._when_done = at_step, is_state_planned, when_done
        self._schedule = units[-1].schedule
        self._before = self._schedule.event_sink
        self.steps = 0
        self._events: list[Event] = []
        self._most_gathered = self._most_gradients = 0
        self._found: list[Deviation] | None = None
        self._schedule.event_sink = self._receive

    @property
    def is_done(self) -> bool:
        """Return whether the step is over."""
        return self._found is not None

    def report(self) -> list[Deviation]:
        """Report every category, including those that are as planned.

        Raises:
            LifecycleError: the step is not over yet.
        """
        if self._found is None:
            raise LifecycleError(f"step {self._at_step} is not over yet ({self.steps} steps so far)")
        return self._found

    def _receive(self, event: Event) -> None:
        if self._before is not None:
            self._before(event)
        if self._found is not None:
            return
        self._events.append(event)
        if self.steps == self._at_step - 1:
            self._most_gathered = max(self._most_gathered, _gathered_nbytes(self._units))
            self._most_gradients = max(self._most_gradients, _main_gradients_nbytes(self._units))
        if event.kind is EventKind.OPTIMIZER_STEP:
            self.steps += 1
            if self.steps == self._at_step:
                self._found = self._compare()  # before the update: gradients are still there
                if self._schedule.event_sink == self._receive:
                    self._schedule.event_sink = self._before
                if self._when_done is not None:
                    self._when_done(self._found)
            self._events.clear()

    def _compare(self) -> list[Deviation]:
        moved = [event for event in self._events if event.what == "activations"]
        pieces = [event for event in self._events if event.kind is EventKind.PIECES_SENT]
        events = [e for e in self._events if e.what != "activations" and e.kind is not EventKind.PIECES_SENT]
        layout = _layout_of(self.model, self._units, events)
        predicted = self._predict(layout)
        planned, found = traffic_of(predicted, layout), traffic_of(events, layout)
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        trained = [bucket for bucket in buckets if bucket.has_gradient]
        state, state_nbytes = self._optimizer_state(trained)
        return [
            _compare_events(predicted, events),
            *_copies(planned, found),
            *([Deviation("activations copied", None, sum(event.nbytes for event in moved))] if moved else []),
            Deviation("sent to unshard", planned.gather_nbytes, found.gather_nbytes),
            Deviation("sent to reduce", planned.reduce_nbytes, found.reduce_nbytes),
            Deviation("sent between replicas", planned.replicate_nbytes, found.replicate_nbytes),
            *self._compare_pieces(layout, sum(event.nbytes for event in pieces)),
            Deviation(
                "main weights",
                sum(b.main_nbytes for b in layout.buckets),
                sum(tensor.nbytes for bucket in buckets for tensor in bucket.stored),
            ),
            Deviation("unsharded at once", _most_gathered(predicted, layout), self._most_gathered),
            self._compare_gradients(predicted, layout),
            Deviation("optimizer state", state, state_nbytes),
        ]

    def _predict(self, layout: ModelLayout) -> list[Event]:
        """Predict the step from one optimizer step to the next: state that leaves after a step comes first."""
        options = dataclasses.replace(self._job.schedule, shard_rank=self._units[-1].mesh.shard_rank)
        events = predict_step(layout, options)
        end = 1 + next(i for i, event in enumerate(events) if event.kind is EventKind.OPTIMIZER_STEP)
        return events[end:] + events[:end]

    def _compare_gradients(self, predicted: list[Event], layout: ModelLayout) -> Deviation:
        """Compare the gradients that the optimizer finds, or the most at any moment if it steps in backward."""
        planned = sum(b.main_nbytes for b in layout.buckets if b.trainable)
        if not self._job.schedule.steps_in_backward:
            parameters = [p for unit in self._units for bucket in unit.buckets for p in bucket.sharded_parameters]
            return Deviation("gradients", planned, storage_nbytes(local_gradients(parameters)))
        if self._job.accumulation == 1 or not self._job.sync_each_micro_batch:
            planned = max(event.nbytes for event in predicted if event.kind is EventKind.BUCKET_STEP)
        return Deviation("gradients at once", planned, self._most_gradients)

    def _compare_pieces(self, layout: ModelLayout, found: int) -> list[Deviation]:
        """Compare the bytes sent for whole matrices: dealt anew to the plan's buckets, as the planner deals them."""
        optimizer = self._optimizer
        if not isinstance(optimizer, MatricesWithAdamW):
            return []
        buckets = dict(zip((b for unit in self._units for b in unit.buckets), layout.buckets, strict=True))
        groups = [group for group in optimizer.param_groups if group["algorithm"] != "adamw"]
        own = [(p, group["flatten"]) for group in groups for p in group["params"] if isinstance(p, ShardedParameter)]
        trained = [(p, flatten) for p, flatten in own if p.requires_grad]
        if any(p.bucket not in buckets for p, _ in trained):
            return [Deviation("pieces of matrices sent", None, found)]  # another model's are dealt with them
        numbers = {bucket: n for n, bucket in enumerate(dict.fromkeys(p.bucket for p, _ in trained))}
        layouts = [buckets[bucket].layout for bucket in numbers]
        matrices = []
        for p, flatten in trained:
            bucket = p.bucket
            matrices += matrices_in(numbers[bucket], buckets[bucket].layout, p._index, flatten=flatten)
        sizes = {"replicate_size": layout.replicate_size, "shard_size": layout.shard_size}
        mesh = self._units[-1].mesh
        there, *others = sent_numel(deal(layouts, matrices, **sizes), mesh.replicate_rank, mesh.shard_rank)
        planned = (there * optimizer.width + sum(others)) * optimizer.sent_as.itemsize
        return [Deviation("pieces of matrices sent", planned, found)] if planned or found else []

    def _state_nbytes(self, parameter: ShardedParameter) -> float:
        """Return the bytes of state per element."""
        row = self._job.planned_optimizer
        if row.matrix is None:
            return row.state_nbytes(dtype_name(parameter.dtype))
        groups = (group for group in self._optimizer.param_groups if group["algorithm"] != "adamw")
        is_matrix = any(parameter is other for group in groups for other in group["params"])
        return (row.matrix if is_matrix else row).state_nbytes(dtype_name(parameter.dtype))

    def _optimizer_state(self, trained: list[Bucket]) -> tuple[int | None, int]:
        """Return planned and found state of this model's parameters in this optimizer, which may hold others, too."""
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        own = [p for bucket in trained for p in bucket.sharded_parameters if id(p) in held]
        planned = round(sum(p.interval.numel * self._state_nbytes(p) for p in own))
        found = storage_nbytes(
            value
            for parameter in own
            for value in as_local(self._optimizer.state.get(parameter, {})).values()
            if isinstance(value, torch.Tensor) and value.ndim > 0
        )
        return planned if self._is_state_planned else None, found


class PlanWatch:
    """Checks every pair of a model and an optimizer of its parameters, and reports.

    Args:
        job: as planned, except for the optimizer, which is read from the object itself.
        say: called with a line for the user, on every rank.
    """

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._checks: dict[tuple[int, int], PlanCheck] = {}

    def watch(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Listen to the pairs that are not listened to yet.

        Args:
            models: sharded.
            optimizers: as torch has them, re-pointed.
        """
        for model in models:
            own = {id(p) for unit in units_of(model) for b in unit.buckets for p in b.sharded_parameters}
            for optimizer in optimizers:
                pair = (id(model), id(optimizer))
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                if pair not in self._checks and own & held:
                    self._checks[pair] = self._check(model, optimizer)

    def _check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> PlanCheck:
        kind = planned_optimizer(optimizer)
        job = self._job.model_copy(update={"optimizer": kind or "none"})

        def say(found: list[Deviation]) -> None:
            title = f"check_plan: {type(model).__name__} with {type(optimizer).__name__}, step {AT_STEP}"
            wrong = sum(not difference.is_as_planned for difference in found)
            lines = [f"{title}: {f'{wrong} of {len(found)} categories differ' if wrong else 'as planned'}"]
            self._say("\n  ".join([*lines, *map(str, found)]))

        return PlanCheck(model, optimizer, job, is_state_planned=kind is not None, when_done=say)

    def close(self) -> None:
        """End the run: name the categories that were not compared, and why."""
        if not self._checks:
            self._say("check_plan: nothing was compared, because no optimizer of a sharded model was prepared")
        for check in self._checks.values():
            if not check.is_done:
                steps = f"{check.steps} optimizer step{'' if check.steps == 1 else 's'}"
                self._say(
                    f"check_plan: {type(check.model).__name__}: nothing was compared, because the run ended after "
                    f"{steps}; step {AT_STEP} is compared"
                )


def planned_optimizer(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the planner's name for `optimizer`; None if it has no formula for its state."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    if isinstance(optimizer, Muon):
        return "muon"
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd-momentum" if any(group["momentum"] for group in groups) else "sgd"
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and not any(group["amsgrad"] for group in groups):
        return "adamw-fused" if any(group["fused"] for group in groups) else "adamw"
    return "adamw-8bit" if name in ("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW8bit") else None


def _copies(planned: Traffic, found: Traffic) -> list[Deviation]:
    """Compare the copies between host and device, if there are any."""
    both = [
        Deviation("copied to the device", planned.to_device_nbytes, found.to_device_nbytes),
        Deviation("copied to the host", planned.to_host_nbytes, found.to_host_nbytes),
    ]
    return [difference for difference in both if difference.planned or difference.found]


def _compare_events(planned: list[Event], found: list[Event]) -> Deviation:
    """Compare the events: count those that come as planned, up to the first that does not."""
    same = next(
        (i for i, (a, b) in enumerate(zip(planned, found, strict=False)) if a != b), min(map(len, (planned, found)))
    )
    if same == len(planned) == len(found):
        return Deviation("events", len(planned), same)
    first, other = (
        f"{e[same].kind} of {e[same].unit or 'the root'}" if same < len(e) else "the end" for e in (planned, found)
    )
    return Deviation("events", len(planned), same, f"; after them {first} was planned, and {other} came")


def _gathered_nbytes(units: list[Unit]) -> int:
    """Return the bytes of unsharded parameters that exist right now."""
    return sum(bucket.buffer.nbytes for unit in units for bucket in unit.buckets)


def _main_gradients_nbytes(units: list[Unit]) -> int:
    """Return the bytes of main gradients that exist right now."""
    return sum(bucket.gradient.held_nbytes for unit in units for bucket in unit.buckets if bucket.has_gradient)


def _most_gathered(events: list[Event], layout: ModelLayout) -> int:
    """Return the bytes gathered at the fullest event, by the plan."""
    nbytes = {unit.name: unit.gathered_nbytes for unit in layout.units}
    now = most = 0
    for event in events:
        if event.kind is EventKind.UNSHARD_ISSUED:
            now += nbytes[event.unit]
        elif event.kind is EventKind.RESHARDED:
            now -= nbytes[event.unit]
        most = max(most, now)
    return most


def storage_nbytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of the storages behind `tensors`, each counted once."""
    storages = {
        torch_private.storage_id(s): s.nbytes() for t in tensors if t is not None for s in [t.untyped_storage()]
    }
    return sum(storages.values())


def _layout_of(model: nn.Module, units: list[Unit], events: list[Event]) -> ModelLayout:
    """Return the layout of a model that is sharded already, its calls in the order the events have them."""
    output: Any = getattr(model, "get_output_embeddings", lambda: None)
    head, root = output(), units[-1]
    plans = {
        unit.name: _unit_layout(unit, is_root=unit is root, is_head=unit is not root and head in unit.modules)
        for unit in units
    }
    begun = [event.unit for event in events if event.kind is EventKind.BACKWARD_BEGIN]
    order = list(dict.fromkeys(event.unit for event in events if event.kind is EventKind.FORWARD_BEGIN))
    mesh = units[-1].mesh
    return ModelLayout(
        tuple(plans.values()),
        tuple(plans[name] for name in order),
        mesh.shard_size,
        mesh.replicate_size,
        returns_head=bool(begun) and plans[begun[0]].is_head,
        keeps_parameters=not any(unit.reshard_after_backward for unit in units),
        keeps_gradients=root.schedule.keeps_gradients,
    )


def _unit_layout(unit: Unit, *, is_root: bool, is_head: bool) -> UnitLayout:
    embeddings = [
        parameter
        for bucket in unit.buckets
        for slot, parameter in zip(bucket.slots, bucket.sharded_parameters, strict=True)
        if any(isinstance(module, nn.Embedding) for module, _ in slot.owners)
    ]
    return UnitLayout(
        unit.name,
        tuple(_bucket_plan(bucket) for bucket in unit.buckets),
        unit.frees_after_forward,
        feeds_units=is_root and any(parameter.requires_grad for parameter in embeddings),
        takes_ids=is_root or isinstance(unit.modules[0], nn.Embedding),
        block=None,
        is_head=is_head,
    )


def _bucket_plan(bucket: Bucket) -> CountedBucket:
    """Return the bucket's plan as it is now: the bucket may have been frozen when it was made."""
    return CountedBucket.like(bucket.plan, trainable=bucket.has_gradient)
