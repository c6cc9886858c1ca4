"""The fastest way to run a job: every switch of the engine that keeps its numbers, searched with bounds.

What is searched (`_meshes`, `_SWITCHES`): strategies and shard sizes, micro-batch and accumulation, checkpointing, what
is on the host, embeddings as units, stepping in backward, a loss in chunks; units kept unsharded, for the best. What is
never slower and never larger is switched on at once: a fused optimizer on accelerators.

A layer more adds the same work again, so what a model of n equal layers needs, and how long it takes, are maxima of
straight lines over n. Such a maximum lies above the line through two of its points: a model of 3 and one of 6 layers
say what the whole one needs and takes *at least*. Where layers take turns (windows, linear attention), whole turns do.
Candidates are looked at in the order of that bound, and the search ends when the bound of the next is worse than the
best that was found.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.sizes import GIB, format_nbytes
from fullshard.core.strategy import STRATEGIES, parse_strategy
from fullshard.plan.evaluate import MARGIN, Plan, changes_that_fit, evaluate
from fullshard.plan.hardware import Cluster
from fullshard.plan.job import Job
from fullshard.plan.shapes import ModelShape, UnitShape
from fullshard.plan.tiles import groups_of

_MICRO_BATCHES = (64, 32, 16, 8, 4, 2, 1)
_FEW = 3
_SLACK = 0.03
"""How much more memory a few layers may say than the whole: with everything on the host, the last gradients of a whole
model have left before its first layer's backward, which those of a short one have not."""
_SMALLER = 5
"""Plans besides the best that are worked out, for the list of those that are smaller."""

_SWITCHES: tuple[Mapping[str, Any], ...] = (
    {},
    {"step_in_backward": True},
    {"wrap_embeddings": True},
    {"step_in_backward": True, "wrap_embeddings": True},
    {"offload_activations": True},
    {"offload_optimizer_state": True},
    {"offload_main_weights": True},
    {"offload": True},
    {"offload": True, "wrap_embeddings": True},
)
"""What saves memory besides sharding and checkpointing, and a loss in chunks, which is tried with all of them."""
_WHOLE, _IN_CHUNKS = {"loss": "eager"}, {"loss": "fused"}


def search(
    model: ModelShape, job: Job, cluster: Cluster, *, fixed: Collection[str] = (), margin: float = MARGIN
) -> list[Plan]:
    """The fastest plans, the fastest first, that need at most `margin` of a device.

    Only what this engine runs: selective checkpointing uncompiled only. The sequences of an optimizer step stay those
    of `job`, as far as micro-batches divide them.

    Args:
        model: the shapes.
        job: what to train; what `fixed` names stays as it is there.
        cluster: on what.
        fixed: settings that are not searched.
        margin: the part of a device that may be filled.

    Raises:
        ConfigError: nothing fits.
    """
    kept = frozenset(fixed)
    job = _with_what_costs_nothing(job, cluster, kept)
    bounds = _Bounds(model, cluster, margin)
    waiting = [found for group in _groups(bounds, job, kept) for found in _first(group)]
    seen = [candidate for candidate, _ in waiting]
    plans: list[Plan] = []
    while waiting:
        candidate, group = waiting.pop(max(range(len(waiting)), key=lambda i: waiting[i][0].tokens_per_second))
        if plans and candidate.tokens_per_second <= max(plan.time.tokens_per_second for plan in plans):
            break
        plan = evaluate(model, candidate.job, cluster)
        if plan.is_within(margin):
            plans.append(plan)
        else:
            waiting += [(smaller, group) for line in group for smaller in itertools.islice(line, 1)]
    if not plans:
        raise _nothing_fits(model, job, cluster, margin)
    if "reshard_after_forward" not in kept:
        plans += _kept_unsharded(plans, margin)
    plans += _smaller(plans, seen, model, cluster, margin)
    return sorted(plans, key=lambda plan: (-plan.time.tokens_per_second, plan.memory.needed))


def _with_what_costs_nothing(job: Job, cluster: Cluster, fixed: frozenset[str]) -> Job:
    better: dict[str, Any] = {}
    if job.optimizer == "adamw" and not cluster.device.is_cpu:
        better["optimizer"] = "adamw-fused"
    return job.model_copy(update={name: value for name, value in better.items() if name not in fixed})


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A job with what it needs at least and how fast it is at most."""

    job: Job
    needed: float
    tokens_per_second: float


class _Bounds:
    """What a job needs at least and how fast it is at most, from models of a few of the layers."""

    def __init__(self, model: ModelShape, cluster: Cluster, margin: float) -> None:
        self.cluster, self._available = cluster, margin * cluster.device.memory
        self._models = [(1.0, model)]
        layers = [unit for unit in model.units if unit.block is not None]
        few_layers = _period(layers) * -(-_FEW // _period(layers)) if layers else 0
        if 0 < 2 * few_layers < len(layers):
            few, more = (_with_layers(model, count) for count in (few_layers, 2 * few_layers))
            beyond = len(layers) / few_layers - 2
            self._models = [(-beyond, few), (1 + beyond, more)]

    def of(self, job: Job) -> _Candidate | None:
        """None: it needs more than there is, or cannot be run."""
        plans: list[tuple[float, Plan]] = []
        for share, model in self._models:
            try:
                plans.append((share, evaluate(model, job, self.cluster)))
            except ConfigError:
                return None
            if plans[-1][1].memory.needed * (1 - _SLACK) > self._available:
                return None
        needed = max(
            sum(share * plan.memory.needed for share, plan in plans),
            *(sum(share * plan.memory.peak_of(phase) for share, plan in plans) for phase in plans[0][1].memory.phases),
        )
        if needed * (1 - _SLACK) > self._available:
            return None
        seconds = sum(share * plan.time.total for share, plan in plans)
        time = plans[0][1].time
        return _Candidate(job, needed, time.tokens / seconds)


def _period(layers: Sequence[UnitShape]) -> int:
    """After how many layers they are the same again: 1 where all are alike, 6 where every sixth sees everything."""
    kinds = [(unit.block, tuple(p.shape for p in unit.parameters)) for unit in layers]
    same = (p for p in range(1, len(kinds)) if all(kind == kinds[at % p] for at, kind in enumerate(kinds)))
    return next(same, len(kinds))


def _with_layers(model: ModelShape, count: int) -> ModelShape:
    layers = [unit for unit in model.units if unit.block is not None]
    dropped = {unit.name for unit in layers[count:]}
    return dataclasses.replace(
        model,
        units=tuple(unit for unit in model.units if unit.name not in dropped),
        calls=tuple(name for name in model.calls if name not in dropped),
    )


class _Line:
    """Jobs that differ in the micro-batch alone: those that may fit, the largest first.

    Attributes:
        is_of_embeddings: whether embeddings are units in them.
    """

    def __init__(self, bounds: _Bounds, job: Job, values: Mapping[str, Any]) -> None:
        self._bounds, self._job, self._values = bounds, job, values
        self.is_of_embeddings = bool(values.get("wrap_embeddings")) and not values.get("offload")
        self._sequences = job.micro_batch * job.accumulation
        self._left = [size for size in _MICRO_BATCHES if size <= self._sequences or self._sequences == 1]
        self._known: dict[int, _Candidate | None] = {}

    def __iter__(self) -> Iterator[_Candidate]:
        """Each once, however often it is asked."""
        return self.above(0)

    def above(self, least: int) -> Iterator[_Candidate]:
        """Those of larger micro-batches than that."""
        sizes = [size for size in self._left if size > least]
        # A larger one needs more, so the sizes that fit are found by halves.
        fitting = bisect.bisect_left(sizes[::-1], True, key=lambda size: self._bound(size) is None)
        self._left = self._left[len(sizes) - fitting :]
        while self._left and self._left[0] > least:
            candidate = self._bound(self._left.pop(0))
            if candidate is not None:
                yield candidate

    def _bound(self, size: int) -> _Candidate | None:
        if size not in self._known:
            more = {"micro_batch": size, "accumulation": max(1, self._sequences // size)}
            try:
                job = Job.of({**self._job.model_dump(), **self._values, **more})
            except ConfigError:
                self._known[size] = None  # this does not go together
            else:
                self._known[size] = self._bounds.of(job)
        return self._known[size]


_Group = list[_Line]
"""The lines of one mesh and one way to checkpoint: nothing switched on, then each of the switches."""


def _groups(bounds: _Bounds, job: Job, fixed: frozenset[str]) -> Iterator[_Group]:
    kinds = ("none", "full") if job.compile else ("none", "selective", "full")
    is_cpu = bounds.cluster.device.is_cpu
    for mesh in _meshes(bounds.cluster, job, fixed):
        for checkpointing in (job.checkpointing,) if "checkpointing" in fixed else kinds:
            values = {**mesh, "checkpointing": checkpointing, "reentrant": job.reentrant and checkpointing == "full"}
            yield [
                _Line(bounds, job, {**values, **switches})
                for switches in _switches(fixed)
                if not fixed & switches.keys() and not (is_cpu and any("offload" in name for name in switches))
            ]


def _switches(fixed: frozenset[str]) -> Iterator[Mapping[str, Any]]:
    """With whole logits nothing, or embeddings as units, which may be faster; in chunks any."""
    if "loss" in fixed:
        yield from _SWITCHES
        return
    yield _WHOLE
    yield {**_WHOLE, "wrap_embeddings": True}
    yield from ({**_IN_CHUNKS, **switches} for switches in _SWITCHES)


def _first(group: _Group) -> Iterator[tuple[_Candidate, _Group]]:
    """The two largest micro-batches with nothing switched on, and what the switches make room for beyond them.

    With embeddings as units the largest as it is, too: where links are slow, a root that is sent in three parts beside
    computing is faster than one that is sent at once.
    """
    plain, *switched = group
    found = list(itertools.islice(plain, 2))
    yield from ((candidate, group) for candidate in found)
    reached = found[0].job.micro_batch if found else 0
    for line in switched:
        least = reached - 1 if line.is_of_embeddings else reached
        yield from ((candidate, group) for candidate in itertools.islice(line.above(least), 1))


def _meshes(cluster: Cluster, job: Job, fixed: frozenset[str]) -> Iterator[dict[str, Any]]:
    count, per_host = groups_of(cluster, job.tp)
    sizes = [size for size in (2**power for power in range(1, 13)) if size < count and not count % size]
    useful = [size for size in sizes if size % per_host == 0 or per_host % size == 0]
    for strategy in (job.strategy,) if "strategy" in fixed else STRATEGIES:
        if not parse_strategy(strategy).is_hybrid:
            if count > 1 or strategy == "FULL_SHARD" or "strategy" in fixed:
                yield {"strategy": strategy, "shard_size": None}
        elif "shard_size" in fixed:
            yield {"strategy": strategy, "shard_size": job.shard_size}
        else:
            yield from ({"strategy": strategy, "shard_size": size} for size in useful)


def _kept_unsharded(plans: Sequence[Plan], margin: float) -> list[Plan]:
    """The three fastest with as many units unsharded between forward and backward as the margin holds."""
    found = []
    for plan in sorted(plans, key=lambda plan: -plan.time.tokens_per_second)[:3]:
        spare = int(10 * (margin * plan.cluster.device.memory - plan.memory.needed) / GIB) / 10
        if spare <= 0 or not plan.job.row.reshard_after_forward or plan.setting.layout.shard_size == 1:
            continue
        more = {"reshard_after_forward": "auto", "unsharded_memory_gib": spare}
        kept = evaluate(plan.model, Job.of({**plan.job.model_dump(), **more}), plan.cluster)
        if kept.is_within(margin) and kept.time.total < plan.time.total:
            found.append(kept)
    return found


def _smaller(
    plans: Sequence[Plan], seen: Sequence[_Candidate], model: ModelShape, cluster: Cluster, margin: float
) -> list[Plan]:
    """Plans that need less than the best, as far as the bounds say that nothing else is faster and smaller."""
    known = [plan.job for plan in plans]
    needed = min(plan.memory.needed for plan in plans)
    found: list[Plan] = []
    for candidate in sorted(seen, key=lambda candidate: -candidate.tokens_per_second):
        if candidate.needed < 0.95 * needed and candidate.job not in known and len(found) < _SMALLER:
            plan = evaluate(model, candidate.job, cluster)
            if plan.is_within(margin):
                found.append(plan)
                needed = min(needed, plan.memory.needed)
    return found


def _nothing_fits(model: ModelShape, job: Job, cluster: Cluster, margin: float) -> ConfigError:
    least = {"strategy": "FULL_SHARD", "shard_size": None, "checkpointing": "full", "micro_batch": 1}
    closest = evaluate(model, job.model_copy(update=least), cluster)
    changes = changes_that_fit(closest, margin=margin)
    needs = f"{format_nbytes(closest.memory.needed)} of {format_nbytes(cluster.device.memory)}"
    return ConfigError(
        f"nothing fits: {model.name} on {cluster} needs {needs} per {cluster.device.name}, "
        f"and {margin:.0%} of that may be filled (--margin)",
        hint=" or ".join(change.words for change in changes) or "use more or larger devices",
    )


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Those that no other beats in speed and memory both, fastest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (-p.time.tokens_per_second, p.memory.needed)):
        if not front or plan.memory.needed < front[-1].memory.needed:
            front.append(plan)
    return front
