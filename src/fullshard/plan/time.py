"""Predict the time of a step by running its events on a clock for computation and on one clock for each link.

Computation advances the first clock. A collective starts when it is issued or when its link (`wire`) is free, whichever
is later. Computation waits for it at the unit's `unshard ready` event, or at the next reduction. Only the time spent on
waiting is *exposed* communication.

    forward of a unit     2 FLOP per parameter and token, plus attention (`plan/attention`)
    backward              twice the forward. Full recomputation adds a forward, without the layer's last product unless
                          it is reentrant. Selective recomputation adds part of a forward, which includes all of
                          attention if its scores are written to memory
    other operations      bytes / memory bandwidth, for each operation that is not fused (`plan/activations`). What a
                          layer saves is at least written and read once in forward. Backward reads it again, and writes
                          and reads its gradient
    casts                 this rank's intervals before they are gathered, and gradients before they are reduced
    decoding              for quantized weights, after they have been gathered
    all-gather, reduce-scatter of n bytes over S ranks of one host         n (S - 1)/S / link
    over h hosts                                                           n (1 - 1/h) / (ranks per host) / network
    all-reduce            twice a reduce-scatter
    offloading            bytes / 25 GB/s in each direction, in parallel with computation; the optimizer works at the
                          speed of host memory
    latency of a ring     14 microseconds plus 3 for each of (S - 1) steps. An all-reduce takes twice that, or less if
                          it uses a tree
    host                  each operation (`plan/host`) and 0.4 ms per unit; the device waits if this takes longer
    loss                  casts, log-softmax and its backward. A loss in chunks repeats the head's product, and adds
                          casts, sums and recomputed values (`plan/losses`)
    optimizer             bytes read and written / memory bandwidth

On a CPU nothing overlaps, because the processor that computes also copies messages. A collective therefore takes its
full time. Ranks that share memory send nothing to unshard.

FLOP counts follow Kaplan et al. (arXiv 2001.08361, table 1) and Chowdhery et al. (arXiv 2204.02311, appendix B). The
latter also define MFU, which does not count recomputation but counts attention in full (`mfu_unmasked`). The times of
collectives follow PERFORMANCE.md of nccl-tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.core.events import Event, EventKind
from fullshard.plan.axes import messages_of
from fullshard.plan.hardware import Cluster
from fullshard.plan.layout import UnitLayout
from fullshard.plan.setting import PlanSetting
from fullshard.plan.tiles import messages_of_head, messages_of_layer
from fullshard.plan.traffic import carried, reduce_message
from fullshard.plan.work import (
    PCIE,
    copied_once_seconds,
    loss_seconds,
    masked_flops,
    optimizer_seconds,
    step_flops,
    works_of,
)

BASE_LATENCY = 14e-6
"""Seconds of the smallest collective: NCCL's figure for a ring (`baseLat` in its `tuning.cc`)."""

STEP_LATENCY = 3e-6
"""Assumed seconds per step of a ring: a few microseconds on both NVLink and InfiniBand. For small units on many ranks
this is significant: 3 milliseconds with 1,024 ranks."""

CONTENTION = 0.1
"""Fraction by which a collective slows down computation that runs at the same time, because its kernels occupy some of
the processors. PyTorch issue 179937 reports 30 to 40 % for single products; over a step it is a tenth."""


def steps(ranks: int, *, times: int) -> int:
    """Return the number of sequential steps of a collective over `ranks` ranks.

    If `times` is 1, the collective is an all-gather or a reduce-scatter, which uses a ring. If it is 2, the collective
    is an all-reduce, which uses a ring for both or a tree, whichever takes fewer steps. NCCL has had double binary
    trees since version 2.4; they send as many bytes as a ring.
    """
    ring = times * (ranks - 1)
    return ring if times == 1 else min(ring, 2 * math.ceil(math.log2(ranks)))


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time that each part of an optimizer step takes, in seconds, and the speed that results from it."""

    compute: float
    exposed: float  # seconds of waiting for communication
    # Seconds of casting and copying parameters and gradients in device memory, and of the transfers between host and
    # device that happen once per step.
    copies: float
    optimizer: float
    communication: float  # seconds of all communication, whether it overlaps with computation or not
    tokens: int  # number of tokens that all ranks together process
    model_flops: float  # FLOP of all ranks, without recomputation and without the masked part of attention
    masked_flops: float  # FLOP of the masked part of attention, on all ranks
    peak_flops: float  # peak FLOP/s of all devices together

    @property
    def total(self) -> float:
        """Seconds of the complete step."""
        return self.compute + self.exposed + self.copies + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks."""
        return self.tokens / self.total

    @property
    def mfu(self) -> float:
        """Model FLOP utilization from 0 to 1: the FLOP that the model requires, divided by the peak."""
        return self.model_flops / self.total / self.peak_flops

    @property
    def mfu_unmasked(self) -> float:
        """Model FLOP utilization as most papers count it, with the masked part of attention (PaLM, appendix B)."""
        return (self.model_flops + self.masked_flops) / self.total / self.peak_flops


def time_of(events: Sequence[Event], setting: PlanSetting, cluster: Cluster, *, repeats: int = 1) -> StepTime:
    """Return the time of a step that consists of `repeats` repetitions of these events."""
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


def _repeated(events: Sequence[Event], clock: _Clock, repeats: int) -> list[float]:
    """Run the clock over all repetitions of the events, and return the seconds of each kind of work.

    These are computation, exposed communication, all communication, and casts. The first two repetitions may differ
    from the others, because the host gets ahead of the device. From the third on, all take the same time.
    """
    before, passed = [0.0] * 4, [0.0] * 4
    for _ in range(min(repeats, 3)):
        for event in events:
            clock.apply(event)
        before, passed = passed, [clock.compute, clock.exposed, clock.communication, clock.cast]
    return [now + max(0, repeats - 3) * (now - then) for then, now in zip(before, passed, strict=True)]


class _Clock:
    def __init__(self, setting: PlanSetting, cluster: Cluster) -> None:
        self.setting, self.cluster = setting, cluster
        self.now = self.compute = self.exposed = self.communication = self.cast = self.host = self.page_left = 0.0
        self.wires: dict[str, float] = {}
        self.copied: dict[str, float] = {}
        self.pages: dict[str, float] = {}
        self.gathered: dict[str, float] = {}
        self.reduced: list[tuple[str, float]] = []
        self.layouts = {unit.name: unit for unit in setting.layout.units}
        self.works = works_of(setting)
        self.messages = {block: messages_of(block, setting.job) for block in set(setting.model.blocks)}

    def apply(self, event: Event) -> None:
        unit, work, layout = self.layouts[event.unit], self.works[event.unit], self.setting.layout
        match event.kind:
            case EventKind.UNSHARD_ISSUED:
                self._cast(work.casts[0])
                copied = sum(b.compute_shard_nbytes for b in unit.buckets if b.is_gathered_from_host)
                there = self._copy("to device", copied)
                groups = () if self.setting.route.shares_memory else unit.gathers
                ends = [self._collective(nbytes * ranks, ranks, after=there) for ranks, nbytes in groups]
                self.gathered[unit.name] = max([there, self.now, *ends])
            case EventKind.UNSHARD_READY:
                self._wait(self.gathered.pop(unit.name, 0.0))
                self._cast(work.decoding)
            case EventKind.FORWARD_END:
                self._run(work.forward, work.issued[0])
                self._exchange_tiles(unit, 0)
                self._exchange_parts(unit, 0)
                if unit is layout.root:
                    self._run(loss_seconds(self.setting))
                    self._wait(self.page_left)
            case EventKind.TO_HOST if event.what == "activations":
                self._wait(self.page_left)
                self.page_left = self._copy("to host", event.nbytes)
            case EventKind.TO_DEVICE if event.what == "activations":
                self.pages[unit.name] = self._copy("to device", event.nbytes)
            case EventKind.BACKWARD_BEGIN:
                self._wait(self.pages.pop(unit.name, 0.0))
                self._run(work.backward, work.issued[1])
                self._cast(work.casts[1])
                self._exchange_tiles(unit, 1)
                self._exchange_parts(unit, 1)
            case EventKind.REDUCE_ISSUED:
                if self.reduced:  # one reduction runs at a time; a unit's reductions start while it computes
                    before, done = self.reduced.pop()
                    self._wait(done if before != unit.name else self.now)
                ranks, sent = reduce_message(event, unit, layout.shard_size)
                over = self._collective(event.nbytes if self.setting.route.shares_memory else sent * ranks, ranks)
                own = event.nbytes // ranks  # this interval is then summed over the replicas
                stride = self.setting.job.tp * layout.shard_size
                over = max(over, self._send(own, layout.replicate_size, stride=stride, times=2))
                self.reduced.append((unit.name, over))
            case EventKind.TO_HOST if event.what == "gradient":
                self._copy("to host", event.nbytes)
            case EventKind.REDUCE_DONE:
                if self.reduced and self.reduced[0][0] == unit.name:  # otherwise it has already been waited for
                    self._wait(self.reduced.pop()[1])
                self._wait(self.copied.get("to host", 0.0))

    def _run(self, seconds: float, issued: float = 0.0) -> None:
        """Advance the clock by a computation. It cannot end before the host has issued it."""
        self.host += issued
        slowed = max(self._slowed(seconds), self.host - self.now)
        self.now += slowed
        self.compute += slowed

    def _cast(self, seconds: float) -> None:
        slowed = self._slowed(seconds)
        self.now += slowed
        self.cast += slowed

    def _slowed(self, seconds: float) -> float:
        """Return the seconds that a computation takes, including a slowdown while a link is busy."""
        busy = min(max([*self.wires.values(), self.now]) - self.now, seconds)
        return seconds + busy * CONTENTION

    def _wait(self, until: float) -> None:
        waited = max(0.0, until - self.now)
        self.now += waited
        self.exposed += waited

    def _copy(self, way: str, nbytes: int) -> float:
        """Return the time at which a copy between host and device will be complete if it is issued now."""
        if not nbytes:
            return self.now
        self.copied[way] = max(self.now, self.copied.get(way, 0.0)) + nbytes / PCIE
        self.communication += nbytes / PCIE
        return self.copied[way]

    def _collective(self, nbytes: int, ranks: int, *, after: float = 0.0) -> float:
        """Return when an all-gather or reduce-scatter over `ranks` ranks ends if issued now, or at `after` if later."""
        stride = self.setting.job.tp * (self.setting.layout.shard_size // ranks)
        return self._send(nbytes, ranks, stride=stride, times=1, after=after)

    def _exchange_tiles(self, unit: UnitLayout, way: int) -> None:
        """Advance to the end of a tensor-parallel message. `way` is 0 in the unit's forward and 1 in its backward."""
        job, model = self.setting.job, self.setting.model
        if job.tp > 1 and unit.block is not None:
            for nbytes in messages_of_layer(unit.block, job)[way]:
                self._wait(self._send(nbytes, job.tp, stride=1, times=2))
        elif job.tp > 1 and unit is self.setting.layout.root:
            self._wait(self._send(messages_of_head(model, job)[way], job.tp, stride=1, times=1))

    def _exchange_parts(self, unit: UnitLayout, way: int) -> None:
        """Advance the clock to the end of the messages between ranks that share sequences or experts (`plan/axes`)."""
        job, attention = self.setting.job, self.works[unit.name].attention
        for message in self.messages[unit.block][way] if unit.block is not None else ():
            links = self.cluster.device.link_seconds(*message.links(self.cluster.per_host))
            latency = message.rounds * BASE_LATENCY + (message.ranks - 1) * STEP_LATENCY
            since, hidden = (
                sum(part * seconds for part, seconds in zip(parts, attention, strict=True))
                for parts in (message.since, message.hidden)
            )
            self._run(CONTENTION * min(hidden, max(links)))
            done = self._on_wire(*links, latency, ago=since)
            self._wait(max(done + since - hidden, self.now + message.least * max(links)))
        if job.ep > 1 and unit.block is not None and unit.block.experts and (way == 0 or job.checkpointing != "none"):
            self.host = max(self.host, self.now)  # it has waited for the number of tokens

    def _send(self, nbytes: int, ranks: int, *, stride: int, times: int, after: float = 0.0) -> float:
        """Return when a message between ranks whose numbers are `stride` apart will arrive if it is issued now."""
        if ranks == 1 or nbytes == 0:
            return self.now
        inside, across = self.cluster.device.link_seconds(
            *carried(times * nbytes, ranks, stride=stride, ranks_per_host=self.cluster.per_host)
        )
        return self._on_wire(inside, across, times * BASE_LATENCY + steps(ranks, times=times) * STEP_LATENCY, after)

    def _on_wire(self, inside: float, across: float, latency: float, after: float = 0.0, *, ago: float = 0.0) -> float:
        """Return when a message that takes these seconds on each kind of link arrives, if issued `ago` seconds ago."""
        seconds = max(inside, across) + latency
        self.communication += seconds
        if self.cluster.device.is_cpu and not across:
            self._wait(self.now + seconds)
            return self.now
        wire = "network" if across > inside else "link"
        self.wires[wire] = max(self.now - ago, after, self.wires.get(wire, 0.0)) + seconds
        return self.wires[wire]
