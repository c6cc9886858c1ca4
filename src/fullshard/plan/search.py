"""The fastest way to run a job: every switch of the engine that keeps its numbers, searched with bounds.

The search covers (`_meshes`, `_SAVING`): strategies and shard sizes, micro-batch and accumulation, checkpointing,
embeddings as units, and all options that save memory, alone and together: a loss in chunks, stepping in backward,
activations on the host, and optimizer state, main weights or everything there; for the best plans also units kept
unsharded. An option that is never slower and never larger is switched on at once: a fused optimizer on accelerators.

Each further layer adds the same work again, so the memory and time of a model of n equal layers are maxima of straight
lines over n. Such a maximum lies above the line through two of its points: a model of 3 and one of 6 layers give the
*least* memory and time of the whole one. If layers take turns (windows, linear attention), the two models have whole
turns; layers of another kind that come first (DeepSeek's dense ones) are in both.

Saving memory costs time, so a way is no faster than the same way with fewer options switched on. The search visits ways
in the order of their best possible speed. It evaluates a way that may fit; it replaces a way that does not by those
with one more option switched on. It ends when the next way cannot be better than the best one found.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.sizes import GIB, format_nbytes
from fullshard.core.strategy import STRATEGIES, Axis, parse_strategy
from fullshard.plan.evaluate import MARGIN, Plan, changes_that_fit, evaluate
from fullshard.plan.hardware import Cluster
from fullshard.plan.job import KEEP_WHAT_FITS, Job
from fullshard.plan.shapes import ModelShape, UnitShape
from fullshard.plan.tiles import groups_of
from fullshard.plan.time import CONTENTION

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_FEW = 3
_SLACK = 0.03
"""How much more memory a few layers may say than the whole: with everything on the host, the last gradients of a whole
model have left before its first layer's backward, which those of a short one have not."""
_SMALLER = 5
"""Most plans that are evaluated for the list of plans smaller than the best."""

_SAVING: Mapping[str, Mapping[str, Any]] = {
    "chunks": {"loss": "fused"},
    "step": {"step_in_backward": True},
    "activations": {"offload_activations": True},
    "state": {"offload_optimizer_state": True},
    "main": {"offload_main_weights": True},
    "all": {"offload": True},
}
"""Options that save memory besides sharding and checkpointing, and are never faster."""
_PACKED = {"gather_as": "int8", "reduce_as": "int8"}
_ONE_OF = frozenset({"state", "main", "all"})
"""Each of these has the one before it."""


def search(
    model: ModelShape,
    job: Job,
    cluster: Cluster,
    *,
    fixed: Collection[str] = (),
    margin: float = MARGIN,
    may_round: bool = False,
) -> list[Plan]:
    """Return the fastest plans, the fastest first, that need at most `margin` of a device.

    The search has only plans that this engine runs: selective checkpointing is uncompiled only. The sequences of an
    optimizer step stay those of `job`, if micro-batches divide them.

    Args:
        model: the shapes.
        job: what to train; what `fixed` names stays as it is there.
        cluster: the devices.
        fixed: settings that are not searched.
        margin: the part of a device that may be filled.
        may_round: also use options that change the numbers, if they help: optimizer state in 8 bits, messages in int8.

    Raises:
        ConfigError: nothing fits.
    """
    kept = frozenset(fixed)
    if job.optimizer == "adamw" and "optimizer" not in kept and not cluster.device.is_cpu:
        job = job.model_copy(update={"optimizer": "adamw-fused"})  # which costs nothing
    rounded = _rounded(job, kept) if may_round else job
    plans = _search(model, rounded, cluster, kept, margin)
    if rounded != job:
        best = _with_less_rounding(plans[0], job, margin)
        plans = [best, *(plan for plan in plans[1:] if plan.time.total > best.time.total)]
    return plans


def _search(model: ModelShape, job: Job, cluster: Cluster, kept: frozenset[str], margin: float) -> list[Plan]:
    """Search with everything that is not searched as it is in `job`."""
    waiting = _Waiting(_Bounds(model, cluster, margin), job, kept)
    plans: list[Plan] = []
    for place, candidate in waiting:
        if plans and candidate.tokens_per_second <= max(plan.time.tokens_per_second for plan in plans):
            break
        plan = evaluate(model, candidate.job, cluster)
        if plan.is_within(margin):
            plans.append(plan)
        else:
            waiting.save_more(place, candidate)
    if not plans:
        raise _nothing_fits(model, job, cluster, margin)
    plans += _smaller(plans, waiting.seen, model, cluster, margin)
    if not KEEP_WHAT_FITS.keys() & kept:
        plans += _kept_unsharded(plans, margin)
    return sorted(plans, key=_fastest_first)


def _fastest_first(plan: Plan) -> tuple[float, int]:
    """Return a sort key: the fastest first, and of equally fast plans the smallest."""
    return -plan.time.tokens_per_second, plan.memory.needed


def _rounded(job: Job, fixed: frozenset[str]) -> Job:
    """Add every option that rounds and reduces what is held, moved or sent, as long as they go together."""
    for name, value in {"optimizer": job.planned_optimizer.in_8_bits, **_PACKED}.items():
        if value is not None and name not in fixed:
            with contextlib.suppress(ConfigError):
                job = Job.of({**job.model_dump(), name: value})
    return job


def _with_less_rounding(plan: Plan, job: Job, margin: float) -> Plan:
    """Remove the rounding options that gain less than a hundredth."""
    for name in (*_PACKED, "optimizer"):
        values = {**plan.job.model_dump(), name: getattr(job, name)}
        exact = evaluate(plan.model, Job.of(values), plan.cluster)
        if exact.is_within(margin) and exact.time.total <= 1.01 * plan.time.total:
            plan = exact
    return plan


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to run a job, except for its micro-batch.

    Attributes:
        values: mesh, checkpointing and whether embeddings are units, as settings.
        saving: what of `_SAVING` is switched on.
    """

    values: tuple[tuple[str, Any], ...]
    saving: frozenset[str] = frozenset()

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of this way, in one dictionary."""
        chosen = dict(self.values)
        for name in sorted(self.saving):
            chosen |= _SAVING[name]
        return chosen

    def with_more(self, names: Collection[str]) -> Iterator[_Way]:
        """Yield this way with one more of `names` switched on."""
        for name in names:
            if name not in self.saving and not (name in _ONE_OF and self.saving & _ONE_OF):
                yield dataclasses.replace(self, saving=self.saving | {name})


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A job with its least memory and its highest speed, from models of a few layers.

    Attributes:
        job: what to run.
        plans: of those models, and the share of each in the whole.
    """

    job: Job
    plans: Sequence[tuple[float, Plan]]

    def may_fit(self, available: float) -> bool:
        """Return whether that is enough for its least memory."""
        most = available / (1 - _SLACK)
        return self._few[1] <= most and self.needed <= most

    @functools.cached_property
    def needed(self) -> float:
        """Least number of bytes."""
        amounts = [self._few, *(_amounts(plan) for _, plan in self.plans[1:])]
        parts = [(share, *amount) for (share, _), amount in zip(self.plans, amounts, strict=True)]
        phases = range(len(self._few[0]))
        whole = [sum(share * peaks[phase] for share, peaks, _ in parts) for phase in phases]
        return max(*whole, sum(share * needed for share, _, needed in parts))

    @functools.cached_property
    def _few(self) -> tuple[list[int], int]:
        return _amounts(self.plans[0][1])

    @functools.cached_property
    def tokens_per_second(self) -> float:
        """Highest speed."""
        return self.plans[0][1].time.tokens / sum(share * plan.time.total for share, plan in self.plans)

    @functools.cached_property
    def unhindered(self) -> float:
        """Highest speed if no rank waited for communication, and no communication took a part of the device."""
        seconds = sum(share * (plan.time.total - plan.time.exposed) for share, plan in self.plans)
        return self.plans[0][1].time.tokens / seconds * (1 + CONTENTION)


def _amounts(plan: Plan) -> tuple[list[int], int]:
    """Return the bytes of its phases at their fullest, and of all of it.

    The rest of the ledger is dropped: thousands of ledgers would be much work for the garbage collector.
    """
    memory = dataclasses.replace(plan).memory
    return [memory.peak_of(phase) for phase in memory.phases], memory.needed


class _Bounds:
    """A job's least memory and highest speed, from models of a few of the layers."""

    def __init__(self, model: ModelShape, cluster: Cluster, margin: float) -> None:
        self.cluster, self._available = cluster, margin * cluster.device.memory
        self._models = [(1.0, model)]
        layers = [unit for unit in model.units if unit.block is not None]
        # An encoder and a decoder are two parts, which are shortened alike.
        parts = [list(part) for _, part in itertools.groupby(layers, lambda unit: unit.name.rstrip("0123456789"))]
        few, more, beyond = zip(*map(_shortened, parts), strict=True) if parts else ((), (), ())
        if len(set(beyond)) == 1 and beyond[0] > 0:
            shorter = (_with_layers(model, itertools.chain(*kept)) for kept in (few, more))
            self._models = list(zip((-beyond[0], 1 + beyond[0]), shorter, strict=True))

    def of(self, job: Job) -> _Candidate | None:
        """Return the bounds of a job; None if it cannot run."""
        plans = []
        try:
            for share, model in self._models:
                plans.append((share, evaluate(model, job, self.cluster)))
        except ConfigError:
            return None
        return _Candidate(job, plans)

    def may_fit(self, candidate: _Candidate | None) -> bool:
        """Return whether there is enough for its least memory."""
        return candidate is not None and candidate.may_fit(self._available)


def _turns(layers: Sequence[UnitShape]) -> tuple[int, int]:
    """Return (layers that come first, period after which the rest repeat): (0, 1) if all are alike.

    (0, 6) if every sixth layer sees everything, (3, 1) if the first three have no experts.
    """
    kinds = [(unit.block, tuple(p.shape for p in unit.parameters)) for unit in layers]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    row = [numbers[kind] for kind in kinds]

    def reaches_back(period: int) -> int:
        """Return the index from which each layer equals the one `period` before it."""
        at = len(row)
        while at > period and row[at - 1] == row[at - 1 - period]:
            at -= 1
        return at - period

    pairs = ((max(0, reaches_back(period)), period) for period in range(1, len(row)))
    return min(pairs, key=sum, default=(0, max(1, len(row))))


def _shortened(layers: Sequence[UnitShape]) -> tuple[Sequence[UnitShape], Sequence[UnitShape], float]:
    """Return a few layers, twice as many that repeat, and how many more repeats the whole has; 0 or less: no more."""
    first, period = _turns(layers)
    few = period * -(-_FEW // period)
    return layers[: first + few], layers[: first + 2 * few], (len(layers) - first) / few - 2


def _with_layers(model: ModelShape, kept: Iterable[UnitShape]) -> ModelShape:
    """Return the model without its other layers."""
    names = {unit.name for unit in kept}
    dropped = {unit.name for unit in model.units if unit.block is not None and unit.name not in names}
    return dataclasses.replace(
        model,
        units=tuple(unit for unit in model.units if unit.name not in dropped),
        calls=tuple(name for name in model.calls if name not in dropped),
    )


@dataclass(order=True, slots=True)
class _Place:
    """A way and a micro-batch that wait to be looked at.

    Attributes:
        key: minus its highest possible speed, so that the fastest comes first.
        number: a serial number, so that the first of equal ones comes first.
        is_known: whether that is its own bound, not the bound of a way with fewer options.
    """

    key: float
    number: int
    way: _Way = field(compare=False)
    size: int = field(compare=False)
    is_known: bool = field(compare=False)


def _over_all_ranks(way: _Way) -> _Way:
    """Return the way with one shard group. It needs no more: it gathers the same, and a rank keeps less."""
    values = dict(way.values)
    row = parse_strategy(values["strategy"])
    if not row.is_hybrid:
        return way
    values |= {"strategy": row.with_axes(Axis.SHARD).name, "shard_size": None}
    return dataclasses.replace(way, values=tuple(values.items()))


class _Waiting:
    """Ways to run a job, the potentially fastest first.

    Attributes:
        seen: the ways looked at so far that may fit.
    """

    def __init__(self, bounds: _Bounds, job: Job, fixed: frozenset[str]) -> None:
        self._bounds, self._job = bounds, job
        is_cpu = bounds.cluster.device.is_cpu  # its memory is the host's
        self._saving = [
            name
            for name, values in _SAVING.items()
            if not fixed & values.keys() and not (is_cpu and any("offload" in setting for setting in values))
        ]
        sequences = job.micro_batch * job.accumulation
        self._sizes = [size for size in _MICRO_BATCHES if size <= sequences or sequences == 1]
        self._places: list[_Place] = []
        self._numbers = itertools.count()
        self._known: dict[tuple[_Way, int], _Candidate | None] = {}
        self._pushed: set[tuple[_Way, int]] = set()
        self.seen: list[_Candidate] = []
        for values in _values(bounds.cluster, job, fixed):
            self._begin(values, may_wrap="wrap_embeddings" not in fixed)

    def __iter__(self) -> Iterator[tuple[_Place, _Candidate]]:
        """Yield those that may fit, the potentially fastest first."""
        while self._places:
            place = heapq.heappop(self._places)
            if not place.is_known and self._is_too_large(place.way, place.size):
                self._push_more(place.way, place.size, self._saving, -place.key)
                continue
            candidate = self._bound(place.way, place.size)
            if candidate is None:
                continue
            if place.is_known:
                yield place, candidate
            elif self._bounds.may_fit(candidate):
                self.seen.append(candidate)
                self._push(place.way, place.size, candidate.tokens_per_second, is_known=True)
            else:
                self.save_more(place, candidate)

    def save_more(self, place: _Place, candidate: _Candidate) -> None:
        """Replace a way that does not fit by ways with one more option switched on."""
        self._push_more(place.way, place.size, self._saving, candidate.tokens_per_second)

    def _push_more(self, way: _Way, size: int, names: Collection[str], most: float) -> None:
        """Add ways with one more of `names`. As far as known, none is faster than without one of its options."""
        for more in way.with_more(names):
            if (more, size) in self._pushed:
                continue
            self._pushed.add((more, size))
            fewer = (dataclasses.replace(more, saving=more.saving - {name}) for name in more.saving)
            known = (candidate for way in fewer if (candidate := self._known.get((way, size))) is not None)
            self._push(more, size, min(most, *(candidate.tokens_per_second for candidate in known), most))

    def _begin(self, values: Mapping[str, Any], *, may_wrap: bool) -> None:
        """Begin with a mesh and a way to checkpoint, nothing switched on, up to the largest micro-batch that can fit.

        A way that fits only with a part on the host begins with that part there.
        """
        plain = _Way(tuple(values.items()))
        wrapped = _Way((*plain.values, ("wrap_embeddings", True)))
        ways = [plain, wrapped] if may_wrap and self._bound(wrapped, self._sizes[0]) is not None else [plain]
        parts = [name for name in self._saving if name in _ONE_OF]
        without = self._reach_of(ways[-1], "chunks", "activations", "step")
        most = self._reach_of(ways[-1], "chunks", "activations", *parts[-1:])
        for place, size in enumerate(self._sizes[: max(without, most)]):
            candidate = self._bound(plain, size)
            if candidate is None:
                continue
            # On slow links a root that is sent in three parts, beside computing, is faster.
            for way, speed in zip(ways, (candidate.tokens_per_second, candidate.unhindered), strict=False):
                if place < without:
                    self._push(way, size, speed)
                else:
                    self._push_more(way, size, parts, speed)

    def _reach_of(self, way: _Way, *names: str) -> int:
        """Return how many of the micro-batches may fit with these switched on, as long as they go together."""
        way, saving = _over_all_ranks(way), frozenset(names) & frozenset(self._saving)
        fullest = [dataclasses.replace(way, saving=saved) for saved in (saving, saving - {"step"} - _ONE_OF)]
        known = [way for way in fullest if self._bound(way, self._sizes[0]) is not None]
        if not known:
            return len(self._sizes)
        # A larger one needs more.
        return bisect.bisect_left(
            self._sizes, True, key=lambda size: not self._bounds.may_fit(self._bound(known[0], size))
        )

    def _is_too_large(self, way: _Way, size: int) -> bool:
        """Return whether it would be too large with one shard group: one bound for shard groups of any size."""
        wider = _over_all_ranks(way)
        bound = None if wider == way else self._bound(wider, size)
        return bound is not None and not self._bounds.may_fit(bound)

    def _push(self, way: _Way, size: int, most: float, *, is_known: bool = False) -> None:
        heapq.heappush(self._places, _Place(-most, next(self._numbers), way, size, is_known))

    def _bound(self, way: _Way, size: int) -> _Candidate | None:
        if (way, size) not in self._known:
            sequences = self._job.micro_batch * self._job.accumulation
            more = {"micro_batch": size, "accumulation": max(1, sequences // size)}
            try:
                job = Job.of({**self._job.model_dump(), **way.settings, **more})
            except ConfigError:
                self._known[way, size] = None  # this does not go together
            else:
                self._known[way, size] = self._bounds.of(job)
        return self._known[way, size]


def _values(cluster: Cluster, job: Job, fixed: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Yield meshes with ways to checkpoint."""
    kinds = ("none", "full") if job.compile else ("none", "selective", "full")
    loss = {} if "loss" in fixed else {"loss": "eager"}
    for mesh in _meshes(cluster, job, fixed):
        for checkpointing in (job.checkpointing,) if "checkpointing" in fixed else kinds:
            reentrant = job.reentrant and checkpointing == "full"
            yield {**mesh, **loss, "checkpointing": checkpointing, "reentrant": reentrant}


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
    """Return the three fastest plans with as many units kept unsharded after forward as the margin holds."""
    found = []
    for plan in sorted(plans, key=_fastest_first)[:3]:
        spare = int(10 * (margin * plan.cluster.device.memory - plan.memory.needed) / GIB) / 10
        if spare <= 0 or not plan.job.row.frees_after_forward or plan.setting.layout.shard_size == 1:
            continue
        more = {**KEEP_WHAT_FITS, "unsharded_memory_gib": spare}
        kept = evaluate(plan.model, Job.of({**plan.job.model_dump(), **more}), plan.cluster)
        if kept.is_within(margin) and kept.time.total < plan.time.total:
            found.append(kept)
    return found


def _smaller(
    plans: Sequence[Plan], seen: Sequence[_Candidate], model: ModelShape, cluster: Cluster, margin: float
) -> list[Plan]:
    """Return plans that need less than the best, unless the bounds say that nothing else is faster and smaller."""
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
    """Return the plans that no other beats in both speed and memory, fastest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=_fastest_first):
        if not front or plan.memory.needed < front[-1].memory.needed:
            front.append(plan)
    return front
