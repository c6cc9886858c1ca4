"""Search for the best way to run a job, over all options of the engine that do not change numerical results.

The best plan is the fastest, unless one without data in host memory is less than 25 % slower (`Plan.worth`).

It covers strategies and shard sizes, micro-batch size and accumulation, checkpointing, and all options that save memory
(`_SAVING`), alone and combined. For the best plans, it also tries to keep units unsharded after forward. With some
strategies (`_WITH_AXES`), it also divides long sequences, shorter ones if nothing else fits, and experts.

Most options that save memory cost time. The search therefore starts without them, and always looks at the fastest
candidate first. If a candidate does not fit, it is replaced by one with all options without which it cannot fit, or
else by candidates that each use one more of these options.
Candidates are compared by estimates from two models with few layers. Each additional layer adds the same work, so
memory and time are maxima of straight lines over the number of layers, and the line through two points is a lower
bound. If layers alternate (windows, linear attention), both models contain complete periods. Both also contain the
layers at the beginning that differ from the others, such as DeepSeek's dense layers.
"""

import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from fullshard.core.errors import ConfigError
from fullshard.core.progress import advance, progress
from fullshard.core.sizes import GIB
from fullshard.core.strategy import STRATEGIES, parse_strategy
from fullshard.plan.evaluate import MARGIN, Plan, evaluate
from fullshard.plan.hardware import Cluster
from fullshard.plan.job import KEEP_WHAT_FITS, Job
from fullshard.plan.shapes import ModelShape, UnitShape
from fullshard.plan.tiles import groups_of

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_BATCH = ("micro_batch", "accumulation")
"""Fields of which only the product stays as the user gives it: the sequences per rank and optimizer step."""

_SAVING: Mapping[str, Mapping[str, Any]] = {
    "chunks": {"loss": "fused"},
    "embeddings": {"wrap_embeddings": True},
    "step": {"step_in_backward": True},
    "activations": {"offload_activations": True},
    "state": {"offload_optimizer_state": True},
    "main": {"offload_main_weights": True},
    "all": {"offload": True},
}
"""Options that save memory, in addition to sharding and checkpointing."""
_ONE_OF = frozenset({"step", "state", "main", "all"})
"""Options of which at most one is used. Of the last three, each includes the previous one."""
_WITH_AXES = ("FULL_SHARD", "SHARD_GRAD_OP")
"""Strategies with which sequences and experts are divided."""
_LONG = 32768
"""Tokens of a sequence from which on it is divided among ranks even if it fits."""
_FEW = 3
_SLACK = 0.03
"""How far the estimate from a few layers may exceed the memory of the complete model. With everything on the host, the
last gradients of a complete model have left the device before backward of its first layer, but those of a short model
have not."""
_SMALLER = 5
"""The most plans to evaluate for the list of plans that are smaller than the best one."""


def search(
    model: ModelShape, job: Job, cluster: Cluster, *, fixed: Collection[str] = (), margin: float = MARGIN
) -> list[Plan]:
    """Return the plans that need at most the fraction `margin` of a device's and a host's memory, the best first.

    The result is empty if no plan does.

    The search only proposes plans that this engine can run. For example, it does not combine selective checkpointing
    with compilation. The number of sequences per optimizer step stays as in `job`, unless it is 1 and `fixed` does not
    contain `micro_batch`.
    """
    if job.optimizer == "adamw" and "optimizer" not in fixed and not cluster.device.is_cpu:
        job = job.model_copy(update={"optimizer": "adamw-fused"})  # a fused optimizer costs nothing
    return _Search(model, job, cluster, frozenset(fixed), margin).plans()


def _best_first(plan: Plan) -> tuple[float, int]:
    """Return a sort key that puts the best plan first and, among equally good plans, the smallest."""
    return -plan.worth, plan.memory.needed


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A way to run a job, with its plans for models of few layers and their shares in the estimates. Sorts by speed."""

    number: int
    plans: Sequence[tuple[float, Plan]]
    way: Mapping[str, Any]
    saving: frozenset[str]

    @functools.cached_property
    def key(self) -> float:
        """The negative upper bound of the worth."""
        first = self.plans[0][1]
        speed = first.time.tokens / sum(share * plan.time.total for share, plan in self.plans)
        return -speed * first.worth / first.time.tokens_per_second

    @functools.cached_property
    def host_needed(self) -> float:
        """An estimate of each host's memory."""
        return sum(share * plan.host_needed for share, plan in self.plans)

    @functools.cached_property
    def needed(self) -> float:
        """The lower bound of the memory."""
        peaks = (
            sum(share * p.memory.peak_of(phase) for share, p in self.plans) for phase in self.plans[0][1].memory.phases
        )
        return max(sum(share * plan.memory.needed for share, plan in self.plans), *peaks)

    def __lt__(self, other: Self) -> bool:
        return (self.key, self.number) < (other.key, other.number)


class _Search:
    """The state of a search. Options that are not searched keep their values from `job`."""

    def __init__(self, model: ModelShape, job: Job, cluster: Cluster, fixed: frozenset[str], margin: float) -> None:
        self._model, self._job, self._cluster, self._fixed, self._margin = model, job, cluster, fixed, margin
        self._models, self._numbers = few_layers(model), itertools.count()
        self._divides = job.seq_len >= _LONG
        no_units = model.tied or not any(p.role == "head" for p in model.root.parameters)
        self._saving = [
            name
            for name, values in _SAVING.items()
            if not fixed & values.keys() and not (name == "embeddings" and no_units)
        ]
        self._saving = [name for name in self._saving if self._has_room(name)]

    def _has_room(self, name: str) -> bool:
        """Return whether the hosts have room for what an option puts on them, in the smallest case.

        Small micro-batches leave smaller activations there. A single one needs no buffers to sum gradients.
        """
        if not any("offload" in setting for setting in _SAVING[name]):
            return True
        if not self._cluster.device.can_offload:
            return False
        ways = ({**closest(self._job, self._fixed), **batch} for batch in self._batches({}))
        known = (self._candidate(way, frozenset({name})) for way in ways)
        return any(candidate is None or self._host_may_fit(candidate) for candidate in known)

    def plans(self) -> list[Plan]:
        """Run the search, and return the plans that fit, the fastest first."""
        ways = [*itertools.product(self._axes(), _meshes(self._cluster, self._job, self._fixed))]
        with progress("searching", len(ways)):
            waiting, pushed = list(self._first(ways)), set[tuple[int, frozenset[str]]]()
        heapq.heapify(waiting)
        found, best = list[Plan](), 0.0
        while waiting and -waiting[0].key > best:
            candidate = heapq.heappop(waiting)
            if not self._host_may_fit(candidate):
                continue
            if self._may_fit(candidate.needed):
                plan = evaluate(self._model, self._job_of(candidate.way, candidate.saving), self._cluster)
                if plan.is_within(self._margin):
                    found.append(plan)
                    best = max(best, plan.worth)
                    continue
                if not plan.fits_host(self._margin):
                    continue  # further options need even more of it
            must = frozenset() if candidate.saving else self._indispensable(candidate.way)
            for more in [must] if must else [candidate.saving | {name} for name in self._saving]:
                if more == candidate.saving or len(more & _ONE_OF) > 1:
                    continue
                if (id(candidate.way), more) not in pushed:
                    pushed.add((id(candidate.way), more))
                    if (child := self._candidate(candidate.way, more)) is not None:
                        heapq.heappush(waiting, child)
        if not found and not self._divides:
            self._divides = True
            return self.plans()
        if not found:
            return []
        found += self._smaller(waiting, min(plan.memory.needed for plan in found))
        found.sort(key=_best_first)
        return sorted([*found, *self._tuned(found[:3])], key=_best_first)

    def _first(self, ways: Iterable[tuple[dict[str, int], dict[str, Any]]]) -> Iterator[_Candidate]:
        """Yield all meshes, checkpointing modes and batch sizes that can fit once memory-saving options are added."""
        job, fixed = self._job, self._fixed
        kinds = ("none", "full") if job.compile else ("none", "selective", "full")
        loss = {} if "loss" in fixed else {"loss": "eager"}
        for axes, mesh in ways:
            advance(1)
            if axes and "strategy" not in fixed and mesh["strategy"] not in _WITH_AXES:
                continue  # the others save little time where memory is short
            for checkpointing in (job.checkpointing,) if "checkpointing" in fixed else kinds:
                more = {"checkpointing": checkpointing, "reentrant": job.reentrant and checkpointing == "full"}
                known = self._by_batch({**axes, **mesh, **loss, **more}, frozenset(), self._may_be_made_to_fit)
                yield from (candidate for candidate, fits in known if fits)

    def _may_be_made_to_fit(self, candidate: _Candidate) -> bool:
        return self._may_fit(candidate.needed) or self._may_ever_fit(candidate.way)

    def _axes(self) -> list[dict[str, int]]:
        """Return the ways to divide sequences and experts among ranks that are tried, of which the first is none."""
        found: list[dict[str, int]] = [{}]
        if self._divides and self._fixed.isdisjoint(("cp", "sp")):
            found += [axes for kind in ("cp", "sp") for axes in self._best_sizes(kind, {})]
        if "ep" not in self._fixed and any(block.experts for block in self._model.blocks):
            found += [
                axes for beside in {1: found[0], 2: found[-1]}.values() for axes in self._best_sizes("ep", beside)
            ]
        return [axes for number, axes in enumerate(found) if axes not in found[:number]]

    def _best_sizes(self, kind: str, beside: Mapping[str, int]) -> list[dict[str, int]]:
        """Return the two fastest sizes of a kind of group that fit with a loss in chunks, or the smallest."""
        ranks = groups_of(self._cluster, self._job.tp)[0]
        sizes = [2**power for power in range(1, 7) if ranks % 2**power == 0]
        ways = [{}] if "strategy" in self._fixed else [{"strategy": name, "shard_size": None} for name in _WITH_AXES]
        saving = frozenset({"chunks", "embeddings"} & {*self._saving})
        known = list[_Candidate]()
        for way, checkpointing, size in itertools.product(ways, ("none", "selective", "full"), sizes):
            values = {**beside, kind: size, **way, "checkpointing": checkpointing}
            known += [found for found, _ in self._by_batch(values, saving, lambda found: self._may_fit(found.needed))]
        fitting = sorted(candidate for candidate in known if self._may_fit(candidate.needed))
        least = sorted(known, key=lambda candidate: candidate.needed)[:1]
        best = dict.fromkeys(candidate.way[kind] for candidate in fitting or least)
        return [{**beside, kind: size} for size in list(best)[:2]]

    def _batches(self, axes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """Yield the micro-batches that are tried, the smallest first, for the same number of sequences per step."""
        job = self._job
        sequences = job.micro_batch * job.accumulation * math.prod(axes.get(axis, 1) for axis in ("cp", "sp"))
        divisors = (n for n in range(1, max(*_MICRO_BATCHES, job.micro_batch) + 1) if sequences % n == 0)
        is_free = sequences == 1 and "micro_batch" not in self._fixed
        for size in _MICRO_BATCHES if is_free else divisors:
            yield {"micro_batch": size, "accumulation": max(1, sequences // size)}

    def _by_batch(
        self, way: Mapping[str, Any], saving: frozenset[str], fits: Callable[[_Candidate], bool]
    ) -> Iterator[tuple[_Candidate, bool]]:
        """Yield a candidate for each micro-batch, and whether it fits, without those larger than one that does not."""
        too_large = set[bool]()  # by whether micro-batches are accumulated: a single one has no sums of gradients
        for batch in self._batches(way):
            adds_up = batch["accumulation"] > 1
            candidate = None if adds_up in too_large else self._candidate({**way, **batch}, saving)
            if candidate is not None:
                yield candidate, (enough := fits(candidate))
                too_large |= set() if enough else {adds_up}

    def _indispensable(self, way: Mapping[str, Any]) -> frozenset[str]:
        """Return the options without which a candidate cannot fit, even with all others."""
        return frozenset(name for name in {*self._saving} - _ONE_OF if not self._may_ever_fit(way, without=name))

    def _may_ever_fit(self, way: Mapping[str, Any], *, without: str = "") -> bool:
        """Return whether a candidate can fit when all compatible memory-saving options but one are added."""
        most = frozenset(self._saving) - _ONE_OF - {without}
        last = [name for name in self._saving if name in _ONE_OF][-1:]
        fullest = (self._candidate(way, most | options) for options in ({*last}, {"step"} & {*self._saving}))
        is_known = False
        for candidate in fullest:  # the second is built only if the first does not fit
            if candidate is not None and self._may_fit(candidate.needed):
                return True
            is_known |= candidate is not None
        return not is_known

    def _may_fit(self, needed: float) -> bool:
        return needed * (1 - _SLACK) <= self._margin * self._cluster.device.memory

    def _host_may_fit(self, candidate: _Candidate) -> bool:
        limit = self._cluster.device.host_memory
        return not limit or candidate.host_needed * (1 - _SLACK) <= self._margin * limit

    def _job_of(self, way: Mapping[str, Any], saving: frozenset[str]) -> Job:
        values = {**self._job.model_dump(), **way}
        for name in sorted(saving):
            values |= _SAVING[name]
        return Job.of(values)

    def _candidate(self, way: Mapping[str, Any], saving: frozenset[str]) -> _Candidate | None:
        """Estimate a candidate's speed and memory from few layers. Return None if the options cannot be combined."""
        try:
            job = self._job_of(way, saving)
            plans = [(share, evaluate(model, job, self._cluster)) for share, model in self._models]
        except ConfigError:
            return None
        return _Candidate(next(self._numbers), plans, way, saving)

    def _smaller(self, waiting: Sequence[_Candidate], needed: float) -> Iterator[Plan]:
        """Yield plans that need less memory than those found so far, starting with the fastest."""
        left = _SMALLER
        for candidate in sorted(waiting):
            if left and candidate.needed < 0.95 * needed:
                plan = evaluate(self._model, self._job_of(candidate.way, candidate.saving), self._cluster)
                if plan.is_within(self._margin):
                    needed, left = min(needed, plan.memory.needed), left - 1
                    yield plan

    def _tuned(self, plans: Sequence[Plan]) -> Iterator[Plan]:
        """Yield faster variants of plans, with embeddings as units or with more units that stay unsharded."""
        for plan in plans:
            if "embeddings" in self._saving and not plan.job.wrap_embeddings:
                values = {**plan.job.model_dump(), "wrap_embeddings": True}
                with contextlib.suppress(ConfigError):
                    wrapped = evaluate(plan.model, Job.of(values), plan.cluster)
                    if wrapped.is_within(self._margin) and wrapped.time.total < plan.time.total:
                        yield wrapped
                        plan = wrapped
            spare = int(10 * (self._margin * plan.cluster.device.memory - plan.memory.needed) / GIB) / 10
            frees = plan.job.row.reshards_after_forward and plan.setting.layout.shard_size > 1
            if spare > 0 and frees and not KEEP_WHAT_FITS.keys() & self._fixed:
                more = {**KEEP_WHAT_FITS, "unsharded_memory_gib": spare}
                kept = evaluate(plan.model, Job.of({**plan.job.model_dump(), **more}), plan.cluster)
                if kept.is_within(self._margin) and kept.time.total < plan.time.total:
                    yield kept


def few_layers(model: ModelShape) -> list[tuple[float, ModelShape]]:
    """Return models with few layers and their weights in the extrapolation, or only a small or irregular model."""
    layers = [unit for unit in model.units if unit.block is not None]
    # An encoder and a decoder are two parts, which are shortened in the same way.
    parts = [list(part) for _, part in itertools.groupby(layers, lambda unit: unit.name.rstrip("0123456789"))]
    few, more, beyond = zip(*map(_shortened, parts), strict=True) if parts else ((), (), ())
    if len(set(beyond)) != 1 or beyond[0] <= 0:
        return [(1.0, model)]
    shorter = (_with_layers(model, itertools.chain(*kept)) for kept in (few, more))
    return list(zip((-beyond[0], 1 + beyond[0]), shorter, strict=True))


def _turns(layers: Sequence[UnitShape]) -> tuple[int, int]:
    """Return (number of different first layers, period of the others). (0, 1) means that all layers are the same."""
    kinds = [(unit.block, tuple(p.shape for p in unit.parameters)) for unit in layers]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    row = [numbers[kind] for kind in kinds]

    def reaches_back(period: int) -> int:
        """Return the smallest index from which on each layer equals the layer `period` places after it."""
        at = len(row)
        while at > period and row[at - 1] == row[at - 1 - period]:
            at -= 1
        return at - period

    pairs = ((max(0, reaches_back(period)), period) for period in range(1, len(row)))
    return min(pairs, key=sum, default=(0, max(1, len(row))))


def _shortened(layers: Sequence[UnitShape]) -> tuple[Sequence[UnitShape], Sequence[UnitShape], float]:
    """Return two shortened lists of layers, and how many more repeats the model has than the longer list."""
    first, period = _turns(layers)
    few = period * -(-_FEW // period)
    return layers[: first + few], layers[: first + 2 * few], (len(layers) - first) / few - 2


def _with_layers(model: ModelShape, kept: Iterable[UnitShape]) -> ModelShape:
    """Return the model without the layers that are not in `kept`."""
    names = {unit.name for unit in kept}
    dropped = {unit.name for unit in model.units if unit.block is not None and unit.name not in names}
    return dataclasses.replace(
        model,
        units=tuple(unit for unit in model.units if unit.name not in dropped),
        calls=tuple(name for name in model.calls if name not in dropped),
    )


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


def closest(job: Job, fixed: Collection[str]) -> dict[str, Any]:
    """Return the settings that need the least memory without any of `_SAVING`, except the fields in `fixed`."""
    strategy = "HYBRID_SHARD" if "shard_size" in fixed else "FULL_SHARD"
    least: dict[str, Any] = {"strategy": strategy, "shard_size": None, "checkpointing": "full", "micro_batch": 1}
    least["accumulation"] = job.accumulation * job.micro_batch
    return {name: value for name, value in least.items() if name not in fixed or name in _BATCH}


def pareto(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans that no other plan beats in both speed and memory, the fastest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=_best_first):
        if not front or plan.memory.needed < front[-1].memory.needed:
            front.append(plan)
    return front
