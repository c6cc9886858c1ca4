"""Time of a step: the predicted events on two clocks, one for computing and one per wire.

Computing advances the first clock. A collective starts when it is issued or when the wire is free, whichever is later.
Its unit's `unshard ready` (or the next reduction) waits for it, and only that wait is *exposed*.

    forward of a unit     2 FLOP per parameter and token, and attention's own (`plan/attention`)
    backward              twice the forward; with full recomputation again a forward, which ends where nothing more is
                          needed: without a layer's last product (not reentrant); with selective a part of it, but all
                          of attention that is written out
    everything else       bytes / memory bandwidth: each operation's that is not fused (`plan/activations`), and at
                          least what a layer saves, written and read once in forward; backward reads it, and writes and
                          reads its gradient
    casts                 own intervals before they are gathered, gradients before they are reduced
    all-gather, reduce-scatter of n bytes over S ranks of one host         n (S - 1)/S / link
    over h hosts                                                           n (1 - 1/h) / (ranks per host) / network
    all-reduce            twice a reduce-scatter
    what is on the host   bytes / 25 GB/s, either way beside computing; the optimizer reads the host's memory
    latency of a ring     14 microseconds, and (S - 1) steps of 3; of an all-reduce twice, or up and down a tree
    host                  of each operation (`plan/host`), 0.4 ms per unit; the device waits where that is longer
    loss                  the float32 logits, read or written six times; in chunks the head's product once more, and
                          what is cast, added and made again (`plan/losses`)
    optimizer             bytes read and written / memory bandwidth

On a CPU nothing overlaps: the processor that computes also copies messages, so a collective takes its time in full.
Ranks that share memory send nothing to unshard. Four more things count on a CPU, at speeds that `--calibrate` measures:
weights are read from memory for every product; an operation costs some microseconds however small it is; so do a unit's
hooks; and buffers of more than 32 MiB are new to the process each time, so that the kernel clears them page by page.

Sources: Kaplan et al. (arXiv 2001.08361, table 1) and Chowdhery et al. (arXiv 2204.02311, appendix B) for FLOP counts
and the definition of MFU, which counts no recomputation, but attention whole (`mfu_unmasked`); nccl-tests'
PERFORMANCE.md for collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.core.events import Event, EventKind
from fullshard.plan.hardware import Cluster
from fullshard.plan.host import HostCosts
from fullshard.plan.losses import moved_nbytes, new_nbytes, recomputed_flops
from fullshard.plan.setting import PlanSetting
from fullshard.plan.tiles import messages_of_head, messages_of_layer
from fullshard.plan.traffic import carried, gather_message_nbytes, reduce_message_nbytes
from fullshard.plan.work import (
    PCIE,
    attention_seconds,
    backward_factor,
    cast_seconds,
    copied_once_seconds,
    forward_flops,
    fresh_nbytes,
    head_flops,
    last_product,
    masked_flops,
    optimizer_seconds,
    pass_seconds,
    recomputed_part,
    step_flops,
    written_again_seconds,
)

BASE_LATENCY = 14e-6
"""Seconds of the smallest collective: NCCL's own figure for a ring (`baseLat` in its `tuning.cc`)."""

STEP_LATENCY = 3e-6
"""Seconds per step of a ring, assumed: a few microseconds on NVLink and InfiniBand alike. It matters for small units on
many ranks: 3 milliseconds at 1,024."""

CONTENTION = 0.1
"""Part of the computing speed that a collective takes while it runs beside it: its kernels occupy some of the
processors (PyTorch issue 179937 reports 30 to 40 % in single products; over a step it is a tenth)."""


HOST_UNIT = 4e-4
"""Seconds of the engine's own per unit and micro-batch, hooks and starting collectives, measured on 64 ranks
(`docs/performance.md`)."""

COMPILED_OPS = 0.15
"""The part of `LAYER_OPS` that a compiled layer launches: products, attention, and a fused kernel between each two."""


LAYER_KERNELS, LAYER_VIEWS = (34, 67), (39, 71)
"""ATen operations of a layer's forward and of its backward, with a kernel and without, counted in a Llama layer
(`tests/plan/test_plan_time.py`)."""

LAYER_OPS = tuple(map(sum, zip(LAYER_KERNELS, LAYER_VIEWS, strict=True)))
"""All of them."""


def steps(ranks: int, *, times: int) -> int:
    """Return the sequential steps of a collective over `ranks` ranks.

    Args:
        ranks: in its group.
        times: 1: an all-gather or a reduce-scatter, around a ring; 2: an all-reduce, which is both, or goes up and down
            a tree, whichever is shorter (NCCL's double binary trees, since 2.4: as many bytes, log2(ranks) steps).
    """
    ring = times * (ranks - 1)
    return ring if times == 1 else min(ring, 2 * math.ceil(math.log2(ranks)))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, and what follows from them.

    Attributes:
        compute: forward and backward.
        exposed: waiting for communication.
        copies: casting and copying parameters and gradients in device memory, and transfers to and from the host once
            per step.
        optimizer: the update.
        communication: all communication, hidden or not.
        tokens: of all ranks.
        model_flops: FLOP of the whole step over all ranks, without recomputation; what a mask leaves out of attention
            is not counted.
        masked_flops: FLOP that the mask leaves out.
        peak_flops: FLOP/s of all devices at their peak.
    """

    compute: float
    exposed: float
    copies: float
    optimizer: float
    communication: float
    tokens: int
    model_flops: float
    masked_flops: float
    peak_flops: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.exposed + self.copies + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens / self.total

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation, 0 to 1: FLOP that the model needs."""
        return self.model_flops / self.total / self.peak_flops

    @property
    def mfu_unmasked(self) -> float:
        """Utilisation with attention counted whole, masked or not, as PaLM's appendix B and most papers count."""
        return (self.model_flops + self.masked_flops) / self.total / self.peak_flops


def time_of(events: Sequence[Event], setting: PlanSetting, cluster: Cluster, *, repeats: int = 1) -> StepTime:
    """Run the clocks over one step, in which these events come `repeats` times."""
    compute, exposed, communication, cast = _repeated(events, _Clock(setting, cluster), repeats)
    job = setting.job
    return StepTime(
        compute,
        exposed,
        cast + copied_once_seconds(setting),
        optimizer_seconds(setting, cluster),
        communication,
        job.tokens * job.accumulation * (cluster.count // job.tp),
        step_flops(setting.model, job) * cluster.count,
        masked_flops(setting.model, job) * cluster.count,
        cluster.device.peak(job.compute_dtype) * cluster.count,
    )


_Passed = tuple[float, float, float, float]


def _repeated(events: Sequence[Event], clock: _Clock, repeats: int) -> _Passed:
    """Return seconds of computing, of exposed communication, of both and of casts, once all repetitions are over.

    A repetition may begin with the host ahead of the device, so the first one differs; once two are alike, so are all
    others.
    """
    passed = known = (0.0, 0.0, 0.0, 0.0)
    for left in reversed(range(repeats)):
        for event in events:
            clock.apply(event)
        before, passed = passed, (clock.compute, clock.exposed, clock.communication, clock.cast)
        taken: _Passed = tuple(b - a for a, b in zip(before, passed, strict=True))  # type: ignore[assignment]
        if left and all(math.isclose(*pair, rel_tol=1e-10, abs_tol=1e-12) for pair in zip(taken, known, strict=True)):
            whole: _Passed = tuple(a + left * b for a, b in zip(passed, taken, strict=True))  # type: ignore[assignment]
            return whole
        known = taken
    return passed


class _Clock:
    def __init__(self, setting: PlanSetting, cluster: Cluster) -> None:
        self.setting, self.cluster = setting, cluster
        self.now = self.compute = self.exposed = self.communication = self.cast = self.host = self.page_left = 0.0
        self.wires: dict[str, float] = {}
        self.copied: dict[str, float] = {}
        self.pages: dict[str, float] = {}
        self.gathered: dict[str, float] = {}
        self.reduced: list[tuple[str, float]] = []
        model, job, device = setting.model, setting.job, cluster.device
        self.layouts = {unit.name: unit for unit in setting.layout.units}
        self.shapes = {unit.name: unit for unit in model.units}
        speed, bandwidth = device.peak(job.compute_dtype) * device.efficiency, device.memory_speed
        self.forwards = {unit.name: forward_flops(unit, job) / speed for unit in model.units}
        self.forwards[model.root.name] += head_flops(model, job) / speed
        blocks = {unit.name: unit.block for unit in model.units if unit.block is not None}
        each = {
            block: (
                attention_seconds(block, job, device),
                pass_seconds(block, job, device),
                written_again_seconds(block, job, device),
            )
            for block in set(blocks.values())
        }
        none = (0.0, 0.0), (0.0, 0.0), 0.0
        costs = {unit.name: each[unit.block] if unit.block else none for unit in model.units}
        self.attention = {name: cost[0] for name, cost in costs.items()}
        self.passes = {name: cost[1] for name, cost in costs.items()}
        self.written = {name: cost[2] for name, cost in costs.items()}
        self.ops = {unit.name: device.op_seconds if unit.block else 0.0 for unit in model.units}
        # On other devices they are read while the products before them are computed.
        beside = float("inf") if not device.is_cpu else bandwidth
        self.weights = {name: unit.full_nbytes / beside for name, unit in self.layouts.items()}
        self.casts = {name: cast_seconds(setting, unit, device) for name, unit in self.layouts.items()}
        self.loss = recomputed_flops(model, job) / speed + moved_nbytes(model, job) / bandwidth
        if device.fresh_bandwidth:
            self.loss += sum(n * fresh_nbytes(nbytes) for n, nbytes in new_nbytes(model, job)) / device.fresh_bandwidth

    def apply(self, event: Event) -> None:
        unit = self.layouts[event.unit]
        match event.kind:
            case EventKind.UNSHARD_ISSUED:
                self._cast(self.casts[unit.name][0])
                sent = gather_message_nbytes(unit) * self.setting.layout.shard_size
                nbytes = 0 if self.setting.route.shares_memory else sent
                copied = sum(b.compute_shard_nbytes for b in unit.buckets if b.is_gathered_from_host)
                there = self._copy("to device", copied)
                self.gathered[unit.name] = max(self._collective(nbytes, after=there), there)
            case EventKind.UNSHARD_READY:
                self._wait(self.gathered.pop(unit.name, 0.0))
            case EventKind.FORWARD_END:
                self._run(self._forward(unit.name) + self.cluster.device.unit_seconds, self._issued(unit.name, 0))
                self._exchange_tiles(unit.name, 0)
                if unit is self.setting.layout.root:
                    self._run(self.loss)
                    self._wait(self.page_left)
            case EventKind.TO_HOST if event.what == "activations":
                self._wait(self.page_left)
                self.page_left = self._copy("to host", event.nbytes)
            case EventKind.TO_DEVICE if event.what == "activations":
                self.pages[unit.name] = self._copy("to device", event.nbytes)
            case EventKind.BACKWARD_BEGIN:
                self._wait(self.pages.pop(unit.name, 0.0))
                again = recomputed_part(self.setting.job) if unit.block is not None else 0.0
                factor = backward_factor(self.shapes[unit.name])
                self._run(
                    factor * (self.forwards[unit.name] + self.weights[unit.name])
                    + self.attention[unit.name][1]
                    + self.passes[unit.name][1]
                    + LAYER_OPS[1] * self.ops[unit.name]
                    + again * (self._forward(unit.name) - self._left_out(unit.name))
                    + self.written[unit.name],
                    self._issued(unit.name, 1) + again * self._issued(unit.name, 0),
                )
                self._cast(self.casts[unit.name][1])
                self._exchange_tiles(unit.name, 1)
            case EventKind.REDUCE_ISSUED:
                if self.reduced:  # one reduction is under way at a time; those of a unit come while it computes
                    before, done = self.reduced.pop()
                    self._wait(done if before != unit.name else self.now)
                shard_size = self.setting.layout.shard_size
                sent = reduce_message_nbytes(event, unit, shard_size) * shard_size
                done = self._collective(event.nbytes if self.setting.route.shares_memory else sent)
                done = max(done, self._all_reduce(event.nbytes))
                self.reduced.append((unit.name, done))
            case EventKind.TO_HOST if event.what == "gradient":
                self._copy("to host", event.nbytes)
            case EventKind.REDUCE_DONE:
                if self.reduced and self.reduced[0][0] == unit.name:  # else it was waited for before
                    self._wait(self.reduced.pop()[1])
                self._wait(self.copied.get("to host", 0.0))

    def _left_out(self, name: str) -> float:
        """Return the seconds of a layer's forward that are not run again, or are counted apart."""
        if self.setting.job.checkpointing == "selective":
            return self.written[name] or self.attention[name][0]
        return self.forwards[name] * last_product(self.shapes[name], self.setting.job)

    def _forward(self, name: str) -> float:
        products = self.forwards[name] + self.attention[name][0] + self.weights[name]
        return products + self.passes[name][0] + LAYER_OPS[0] * self.ops[name]

    def _issued(self, name: str, way: int) -> float:
        """Return seconds in which the host issues a unit's forward or backward to an accelerator."""
        if self.cluster.device.is_cpu:
            return 0.0
        fused = COMPILED_OPS if self.setting.job.compile else 1.0
        layer = fused * HostCosts().seconds(LAYER_KERNELS[way], LAYER_VIEWS[way])
        return (layer if self.shapes[name].block is not None else 0.0) + HOST_UNIT / 2

    def _run(self, seconds: float, issued: float = 0.0) -> None:
        """Run a computation. It ends no sooner than the host has issued it."""
        self.host += issued
        slowed = max(self._slowed(seconds), self.host - self.now)
        self.now += slowed
        self.compute += slowed

    def _cast(self, seconds: float) -> None:
        slowed = self._slowed(seconds)
        self.now += slowed
        self.cast += slowed

    def _slowed(self, seconds: float) -> float:
        """Return the seconds of a computation, slower in the part of it in which a wire is busy."""
        busy = min(max([*self.wires.values(), self.now]) - self.now, seconds)
        return seconds + busy * CONTENTION

    def _wait(self, until: float) -> None:
        waited = max(0.0, until - self.now)
        self.now += waited
        self.exposed += waited

    def _copy(self, way: str, nbytes: int) -> float:
        """Return when a copy between host and device, issued now, is done."""
        if not nbytes:
            return self.now
        self.copied[way] = max(self.now, self.copied.get(way, 0.0)) + nbytes / PCIE
        self.communication += nbytes / PCIE
        return self.copied[way]

    def _collective(self, nbytes: int, *, after: float = 0.0) -> float:
        """Return when an all-gather or reduce-scatter of `nbytes`, issued now and begun after `after`, is done."""
        return self._send(nbytes, self.setting.layout.shard_size, stride=self.setting.job.tp, times=1, after=after)

    def _all_reduce(self, nbytes: int) -> float:
        """Return when the all-reduce of this rank's interval along the replicate axis is done."""
        layout = self.setting.layout
        stride = self.setting.job.tp * layout.shard_size
        return self._send(nbytes // layout.shard_size, layout.replicate_size, stride=stride, times=2)

    def _exchange_tiles(self, name: str, way: int) -> None:
        """Reduce between tensor-parallel ranks after (0) or in backward of (1) a unit: the next product waits."""
        job, block = self.setting.job, self.shapes[name].block
        if job.tp == 1:
            return
        if block is not None:
            self._wait(self._send(round(messages_of_layer(block, job)[way]), job.tp, stride=1, times=2))
        elif name == self.setting.model.root.name:
            self._wait(self._send(messages_of_head(self.setting.model, job)[way], job.tp, stride=1, times=1))

    def _send(self, nbytes: int, ranks: int, *, stride: int, times: int, after: float = 0.0) -> float:
        """Return when a message among `ranks` ranks, `stride` apart, is done; some share a host, or none does."""
        if ranks == 1 or nbytes == 0:
            return self.now
        device = self.cluster.device
        sent = carried(times * nbytes, ranks, stride=stride, ranks_per_host=self.cluster.per_host)
        inside, across = device.link_seconds(*sent, times=times)
        latency = times * BASE_LATENCY + steps(ranks, times=times) * STEP_LATENCY
        if device.is_cpu and not across:
            self.communication += inside + latency
            self._wait(self.now + inside + latency)
            return self.now
        wire = "network" if across > inside else "link"
        start = max(self.now, after, self.wires.get(wire, 0.0))
        seconds = max(inside, across) + latency
        self.communication += seconds
        self.wires[wire] = start + seconds
        return start + seconds
