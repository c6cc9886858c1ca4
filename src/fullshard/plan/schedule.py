"""Predict the events that the engine will emit in one optimizer step, without running the step.

The order of events comes from `core.schedule`, which the engine follows too. Predicted and recorded steps have the same
layout and event types, so a test can check `predict_step(...) == recorded`. Where they are equal, the memory, traffic
and time that are computed from the prediction also apply to the recorded step.

Some facts cannot be derived from a model's shapes. The schedule assumes that every unit runs once per forward, one
after another, and that the root computes something after the last unit (a norm, a head). If the head is a unit whose
output the root returns (`ModelLayout.returns_head`), backward reaches the head first.
"""

from dataclasses import dataclass

from fullshard.core.events import Event, EventKind
from fullshard.core.schedule import REDUCTIONS_IN_FLIGHT, BackwardPrefetch, Reductions, gathered_ahead
from fullshard.plan.buckets import CountedBucket
from fullshard.plan.layout import ModelLayout, UnitLayout
from fullshard.plan.optimizers import OPTIMIZERS, OptimizerRow

_Place = tuple[str, int]
"""A bucket, identified by the name of its unit and its number in the unit. (Buckets of equal layers compare equal.)"""


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """The options that determine the order of operations, in addition to the layout."""

    accumulation: int = 1
    prefetches_in_forward: bool = True
    backward_prefetch: str = "BACKWARD_PRE"
    sync_each_micro_batch: bool = True  # reduce after every micro-batch; otherwise, all but the last use `no_sync`
    steps_in_backward: bool = False  # whether the optimizer updates each bucket during the last micro-batch's backward
    is_first_step: bool = False  # whether its forward does not prefetch, because the ranks have not agreed on an order
    optimizer: OptimizerRow = OPTIMIZERS["none"]  # only matters if its state is copied to the device for each step
    shard_rank: int = 0  # the rank whose step is predicted. It matters because the last ranks may hold padding only.


def predict_step(model: ModelLayout, options: ScheduleOptions) -> list[Event]:
    """Return the events that one rank emits in one step."""
    run = _Run(model, options)
    for number in range(options.accumulation):
        ahead = options.prefetches_in_forward and not (options.is_first_step and number == 0)
        is_last = number == options.accumulation - 1
        run.forward(ahead=ahead)
        run.steps = options.steps_in_backward and is_last
        run.backward(reduces=is_last or (options.sync_each_micro_batch and not model.keeps_gradients))
    run.reshard_all()
    run.move_state(EventKind.TO_DEVICE)
    run.emit(EventKind.OPTIMIZER_STEP, model.root)
    run.move_state(EventKind.TO_HOST)
    return run.events


class _Run:
    """A copy of the engine's state from which the next events follow. Units are identified by name."""

    def __init__(self, model: ModelLayout, options: ScheduleOptions) -> None:
        self.model, self.options, self.steps = model, options, False
        self.units = {unit.name: unit for unit in model.units}
        self.events: list[Event] = []
        self.gathering: set[str] = set()
        self.unsharded: set[str] = set()
        self.awaiting: set[str] = set()
        self.ready: set[str] = set()
        self.updated: set[str] = set()
        self.reductions: Reductions[_Place] = Reductions()
        self.pages: list[UnitLayout] = []
        self.wanted: UnitLayout | None = None

    def emit(self, kind: EventKind, unit: UnitLayout, nbytes: int = 0) -> None:
        self.events.append(Event(kind, unit.name, nbytes))

    def issue(self, unit: UnitLayout) -> None:
        if unit.name not in self.gathering and unit.name not in self.unsharded:
            self.gathering.add(unit.name)
            self.emit(EventKind.UNSHARD_ISSUED, unit, unit.full_nbytes)
            for number, bucket in enumerate(unit.buckets):
                # A compute shard on the device is created again after main weights have changed.
                if bucket.is_gathered_from_host or (bucket.main_is_on_host and unit.name not in self.updated):
                    self.move(EventKind.TO_DEVICE, (unit.name, number), bucket.compute_shard_nbytes, "compute shard")
            self.updated.add(unit.name)

    def move(self, way: EventKind, place: _Place, nbytes: int, what: str) -> None:
        self.events.append(Event(way, place[0], nbytes, what, place[1]))

    def turn(self, unit: UnitLayout) -> None:
        """Record that forward has left `unit`, so that its activations are copied to the host."""
        if unit.page_nbytes:
            self.pages.append(unit)
            self.events.append(Event(EventKind.TO_HOST, unit.name, unit.page_nbytes, "activations"))

    def bring(self, unit: UnitLayout) -> None:
        """Record that backward has reached `unit`, which needs its activations, and start the previous unit's copy."""
        last = self.model.calls[-1]  # the root's activations stay with the last unit's, which never leave the device
        wanted = last if unit is self.model.root else unit
        if wanted is self.wanted:
            return
        self.wanted = wanted
        times = int(wanted in self.pages) + (self.options.backward_prefetch == BackwardPrefetch.BACKWARD_PRE)
        for page in [self.pages.pop() for _ in range(min(times, len(self.pages)))]:
            self.events.append(Event(EventKind.TO_DEVICE, page.name, page.page_nbytes, "activations"))

    def move_state(self, way: EventKind) -> None:
        for unit in self.model.units:
            for place in _trainable(unit):
                bucket = self.bucket(place)
                if not bucket.state_visits_device:
                    continue
                owned = (bucket.layout.interval(i, self.options.shard_rank) for i in range(len(bucket.layout.specs)))
                each = self.options.optimizer.state_nbytes(bucket.dtype)
                nbytes = round(each * sum(interval.numel for interval in owned))
                if nbytes:
                    self.move(way, place, nbytes, "optimizer state")

    def bucket(self, place: _Place) -> CountedBucket:
        return self.units[place[0]].buckets[place[1]]

    def unshard(self, unit: UnitLayout) -> None:
        if unit.name in self.unsharded:
            return
        self.issue(unit)
        self.gathering.discard(unit.name)
        self.unsharded.add(unit.name)
        self.emit(EventKind.UNSHARD_READY, unit, unit.full_nbytes)

    def reshard(self, unit: UnitLayout) -> None:
        if unit.name in self.gathering or unit.name in self.unsharded:
            self.gathering.discard(unit.name)
            self.unsharded.discard(unit.name)
            self.emit(EventKind.RESHARDED, unit, unit.full_nbytes)

    def forward(self, *, ahead: bool) -> None:
        calls = self.model.calls
        _, gives = _gradient_flow(self.model)
        self.pages, self.wanted = [], None
        for position, unit in enumerate(calls):
            if position and gives[calls[position - 1].name]:
                self.turn(calls[position - 1])
            self.unshard(unit)
            following = gathered_ahead(calls, position + 1, unit) if ahead else None
            if following is not None:
                self.issue(following)
            self.emit(EventKind.FORWARD_BEGIN, unit)
            if unit is not self.model.root:
                self.end_forward(unit)
        self.end_forward(self.model.root)

    def end_forward(self, unit: UnitLayout) -> None:
        self.emit(EventKind.FORWARD_END, unit)
        if unit.reshards_after_forward:
            self.reshard(unit)

    def backward(self, *, reduces: bool) -> None:
        root, calls = self.model.root, self.model.calls
        inner = calls[1:]
        wants, gives = _gradient_flow(self.model)
        self.awaiting = {unit.name for unit in calls if gives[unit.name]}
        self.reductions.clear()
        self.reductions.expect(place for unit in reversed(calls) for place in _trainable(unit))
        self.ready = set()
        head = inner[-1] if inner and inner[-1].is_head and gives[inner[-1].name] else None
        has_begun = head is not None and self.model.returns_head
        if head is not None and has_begun:
            self.begin_backward(head, previous=calls[-2])
        if root.name in self.awaiting:
            self.begin_backward(root, previous=calls[-1])
            if head is None and not root.feeds_units:
                self.complete(root, reduces=reduces)
        for position in range(len(inner) - 1, -1, -1):
            unit, previous = inner[position], calls[position]
            if not gives[unit.name]:
                continue
            if unit is not head or not has_begun:
                self.begin_backward(unit, previous)
            self.complete(unit, reduces=reduces, has_input_gradient=wants[unit.name])
            if wants[unit.name]:
                self.emit(EventKind.BACKWARD_END, unit)
                self.leave(unit)
                if self.options.backward_prefetch == BackwardPrefetch.BACKWARD_POST:
                    self.prefetch(previous)
                self.step_when_final()
            if unit is head and root.name in self.awaiting and not root.feeds_units:
                self.complete(root, reduces=reduces)  # its norm is between the head and the last layer
        if root.name in self.awaiting and root.feeds_units:
            self.complete(root, reduces=reduces)
        self.finish(reduces=reduces)

    def begin_backward(self, unit: UnitLayout, previous: UnitLayout | None) -> None:
        self.unshard(unit)
        if self.options.backward_prefetch == BackwardPrefetch.BACKWARD_PRE:
            self.prefetch(previous)
        self.bring(unit)
        self.emit(EventKind.BACKWARD_BEGIN, unit)

    def prefetch(self, unit: UnitLayout | None) -> None:
        if unit is not None and unit.name in self.awaiting:
            self.issue(unit)

    def complete(self, unit: UnitLayout, *, reduces: bool, has_input_gradient: bool = False) -> None:
        """Record that all gradients of the unit's parameters have been computed."""
        self.ready.add(unit.name)
        for place in _trainable(unit):
            for due in self.reductions.complete(place):
                self.launch(due, reduces=reduces)
        if not has_input_gradient and unit.trainable and unit.trainable == unit.buckets:
            # Nothing else shows that backward has left the unit.
            self.leave(unit)
        self.step_when_final()

    def leave(self, unit: UnitLayout) -> None:
        """Record that backward has left `unit`."""
        self.awaiting.discard(unit.name)
        if not self.model.keeps_parameters:
            self.reshard(unit)

    def launch(self, place: _Place, *, reduces: bool) -> None:
        if reduces:
            self.emit(EventKind.REDUCE_ISSUED, self.units[place[0]], self.bucket(place).reduce_nbytes)
            oldest = self.reductions.launch(place)
            if oldest is not None:
                self.send_gradient(oldest)
            self.step_when_final()

    def send_gradient(self, place: _Place) -> None:
        """Record that a reduction has finished. Its gradient is copied to the host if the main weights are there."""
        bucket = self.bucket(place)
        if bucket.main_is_on_host:
            self.move(EventKind.TO_HOST, place, bucket.reduced_nbytes, "gradient")

    def step_when_final(self) -> None:
        """Step the optimizer for buckets whose gradients are final, by the rule of the engine's method of this name."""
        if not self.steps:
            return
        sizes = self.model.shard_size, self.model.replicate_size
        for place in list(self.reductions.waiting):
            unit = place[0]
            is_left = unit not in self.gathering | self.unsharded | self.awaiting
            if self.reductions.is_over(place, *sizes) and is_left and unit in self.ready:
                self.finish_reduction(place)

    def finish_reduction(self, place: _Place) -> None:
        del self.reductions.waiting[place]
        self.emit(EventKind.REDUCE_DONE, self.units[place[0]])
        if self.steps:
            self.emit(EventKind.BUCKET_STEP, self.units[place[0]], self.bucket(place).main_gradient_nbytes)

    def finish(self, *, reduces: bool) -> None:
        if self.steps:
            self.awaiting.clear()
            self.reshard_all()
        for place in self.reductions.remaining():
            self.launch(place, reduces=reduces)
        for place in self.reductions.launched[-REDUCTIONS_IN_FLIGHT:]:
            self.send_gradient(place)
        for place in list(self.reductions.waiting):
            self.finish_reduction(place)
        if not self.model.keeps_parameters:
            self.reshard_all()

    def reshard_all(self) -> None:
        for unit in reversed(self.model.calls):  # inner units come before outer ones, as in the engine
            self.reshard(unit)


def _trainable(unit: UnitLayout) -> list[_Place]:
    return [(unit.name, number) for number, bucket in enumerate(unit.buckets) if bucket.trainable]


def _gradient_flow(model: ModelLayout) -> tuple[dict[str, bool], dict[str, bool]]:
    """Return which units need a gradient of an input, and which of their output, as dicts keyed by unit name."""
    wants, gives = {model.root.name: False}, {}
    flowing = model.root.feeds_units
    for unit in model.calls[1:]:
        wants[unit.name] = flowing and not unit.takes_ids
        gives[unit.name] = flowing = wants[unit.name] or bool(unit.trainable) or (unit.takes_ids and flowing)
    gives[model.root.name] = flowing or bool(model.root.trainable)
    return wants, gives
