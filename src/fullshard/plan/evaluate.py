"""Predict everything about a run in one `Plan`, and find changes that make a run fit in memory."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.core.errors import ConfigError
from fullshard.core.events import Event
from fullshard.core.offload import Offload
from fullshard.core.schedule import SPENT, count_kept
from fullshard.core.sizes import GIB, format_nbytes
from fullshard.plan.activations import page_nbytes
from fullshard.plan.attention import breaks_graph, check_kernel, what_runs
from fullshard.plan.axes import check_groups, dealt
from fullshard.plan.axes import sent_nbytes as sent_on_axes
from fullshard.plan.hardware import Cluster
from fullshard.plan.job import Job
from fullshard.plan.layout import ModelLayout, lay_out
from fullshard.plan.losses import loss_note
from fullshard.plan.matrices import matrix_work
from fullshard.plan.memory import Memory, memory_of
from fullshard.plan.methods import apply_method, conversion_of, form_of_files
from fullshard.plan.route import Route
from fullshard.plan.schedule import ScheduleOptions, predict_step
from fullshard.plan.setting import PlanSetting
from fullshard.plan.shapes import Block, ModelShape
from fullshard.plan.tiles import groups_of, sent_nbytes, tiled
from fullshard.plan.time import StepTime, time_of
from fullshard.plan.traffic import Traffic, traffic_of
from fullshard.plan.work import step_decoding_seconds

ERROR_BAR = 0.91, 1.13
"""Measured memory divided by predicted memory: the 10th and the 90th percentile of published runs, which
`tests/plan/test_plan_published.py` asserts."""

SPEED_BARS = {"dense": (0.88, 1.16), "mixture": (0.61, 1.16)}
"""Measured speed divided by predicted speed, likewise, for models without and with experts."""

MARGIN = 0.92
"""The fraction of a device's memory that a plan should use at most."""


_HOST_PREMIUM = 1.25
"""How much faster a plan must be that keeps data in host memory, to be preferred. Host memory differs between machines
of one kind, and other programs use it."""


@dataclass(frozen=True, slots=True)
class AtRest:
    """The memory and time that one rank spends on quantized weights."""

    form: str
    nbytes: int  # bytes of this rank's intervals of all quantized weights
    message: int  # bytes that a rank sends to each other rank to unshard the largest unit
    whole: int  # bytes of the largest unit while it is unsharded
    peak: int  # bytes of the largest unit while it is decoded, including the codes of all ranks
    seconds: float  # time that a step spends on decoding


@dataclass(frozen=True)
class Plan:
    """All predictions for a model, a job and a cluster. Each prediction is computed on first use."""

    model: ModelShape  # the model that the caller gave, before the training method changed it
    job: Job
    cluster: Cluster
    setting: PlanSetting  # the model as it is trained, and its layout
    events: Sequence[Event] = field(repr=False)  # the events of a step, or of one micro-batch if each is reduced
    repeats: int  # number of times that the events occur in a step
    kept: int  # number of units that stay unsharded between forward and backward because there is room for them

    @functools.cached_property
    def memory(self) -> Memory:
        """The memory that one rank needs."""
        # Further micro-batches do not change the peak.
        few = dataclasses.replace(self.job.schedule, accumulation=min(2, self.job.accumulation))
        events = self.events if few == _repeats(self.job)[1] else predict_step(self.setting.layout, few)
        return memory_of(events, self.setting, ranks_per_host=self.cluster.per_host)

    @functools.cached_property
    def traffic(self) -> Traffic:
        """The bytes that each rank sends and copies in one step."""
        layout = self.setting.layout
        sent = traffic_of(self.events, layout).times(self.repeats)
        of_tiles = sent_nbytes(self.setting.model, self.job)
        return dataclasses.replace(
            sent, tiles_nbytes=of_tiles, **sent_on_axes(self.setting.model, self.job), **_copied(layout, self.job)
        )

    @functools.cached_property
    def time(self) -> StepTime:
        """The time of one step, by kind of work."""
        return time_of(self.events, self.setting, self.cluster, repeats=self.repeats)

    @functools.cached_property
    def at_rest(self) -> AtRest | None:
        """The effect of quantized weights, or None if no weights are stored in a quantized form."""
        units = [unit for unit in self.setting.layout.units if unit.coded]
        if not units:
            return None
        buckets = [bucket for unit in units for bucket in unit.coded]
        return AtRest(
            ", ".join(dict.fromkeys(bucket.form.name for bucket in buckets if bucket.form is not None)),
            sum(bucket.main_nbytes for bucket in buckets),
            max(sum(bucket.main_nbytes for bucket in unit.coded) for unit in units),
            max(unit.full_nbytes for unit in units),
            max(unit.full_nbytes + self.setting.coded_nbytes(unit) for unit in units),
            self.repeats * step_decoding_seconds(self.setting, self.events),
        )

    @property
    def parameters(self) -> int:
        """The number of elements, including adapters. A byte of 4-bit weights counts as two, and scales as none."""
        elements = {"scale": 0, "matrix": 2}
        return sum(
            p.numel * p.tiles * (elements.get(p.role, 1) if p.exact else 1) for p in self.setting.model.parameters
        )

    @property
    def trainable(self) -> int:
        """The number of elements that are trained."""
        return self.setting.model.trainable_numel

    @property
    def host_needed(self) -> int:
        """The bytes of each host's memory that the run needs: in training, with copies of saves, or while loading.

        A background save keeps one copy of the state. Copies in memory also keep the previous copy and, on several
        hosts, the copies of the previous host.
        """
        copies = 0
        if self.cluster.device.can_offload:
            copies = 1 if self.job.async_save or self.job.max_lost_steps else 0
            copies += (2 if self.cluster.hosts == 1 else 4) if self.job.max_lost_steps else 0
        saved = copies * self.memory.checkpoint // self.cluster.hosts
        return max(self.memory.host_load, self.memory.host_steady + saved)

    @property
    def fits(self) -> bool:
        """Return whether the run needs at most the memory of the device and of the host."""
        return self.is_within(1.0)

    def is_within(self, margin: float) -> bool:
        """Return whether the run needs at most this fraction of the memory of the device and of the host."""
        return self.memory.needed <= margin * self.cluster.device.memory and self.fits_host(margin)

    def fits_host(self, margin: float = 1.0) -> bool:
        """Return whether the run needs at most this fraction of the host's memory."""
        limit = self.cluster.device.host_memory
        return not limit or self.host_needed <= margin * limit

    @property
    def worth(self) -> float:
        """The speed in tokens/s by which plans are compared: what needs host memory must be a quarter faster."""
        return self.time.tokens_per_second / (_HOST_PREMIUM if self.setting.on_host else 1)

    @property
    def spare(self) -> int:
        """The bytes of device memory that are left. The number is negative if there is too little memory."""
        return self.cluster.device.memory - self.memory.needed

    @property
    def expected(self) -> tuple[int, int]:
        """The range in bytes, around the prediction, in which four out of five published runs were."""
        return round(ERROR_BAR[0] * self.memory.needed), round(ERROR_BAR[1] * self.memory.needed)

    @property
    def expected_speed(self) -> tuple[float, float]:
        """The range in tokens/s, around the prediction, in which four out of five published runs were."""
        least, most = SPEED_BARS["mixture" if any(block.experts for block in self.model.blocks) else "dense"]
        return least * self.time.tokens_per_second, most * self.time.tokens_per_second

    def cost_of(self, price: float) -> float:
        """Return what a billion tokens cost if a device costs `price` per hour."""
        return price * self.cluster.count / 3600 / self.time.tokens_per_second * 1e9

    @property
    def confidence(self) -> str:
        """How certain it is that the run fits: `fits`, `fits, tight`, `may not fit` or `does not fit`."""
        least, most = self.expected
        if not self.fits_host():
            return "does not fit"
        if most <= self.cluster.device.memory:
            return "fits"
        if self.memory.needed <= MARGIN * self.cluster.device.memory:
            return "fits, tight"
        return "may not fit" if least <= self.cluster.device.memory else "does not fit"

    @property
    def verdict(self) -> str:
        """A sentence that states whether the run fits, and how much memory it needs."""
        device, memory = self.cluster.device, self.memory
        needs = f"needs {format_nbytes(memory.needed)} of {format_nbytes(device.memory)} per {device.name}"
        spare = f"{format_nbytes(self.spare)} to spare" if self.fits else f"{format_nbytes(-self.spare)} too much"
        least, most = map(format_nbytes, self.expected)
        if not self.fits_host():
            host = f"{format_nbytes(self.host_needed)} of {format_nbytes(device.host_memory)} per host"
            return f"{self.confidence}: needs {host}, and {needs.removeprefix('needs ')}"
        return (
            f"{self.confidence}: {needs}, {spare}; fullest in {max(memory.phases, key=memory.peak_of)}; "
            f"four of five published runs would need {least} to {most}"
        )


def evaluate(model: ModelShape, job: Job, cluster: Cluster) -> Plan:
    """Predict the memory, traffic and time of a training job on a cluster."""
    if not job.keeps_what_fits:
        return _evaluate(model, job, cluster)
    plain = _evaluate(model, job, cluster)
    given = job.unsharded_memory_gib
    budget = max(0, round(SPENT * plain.spare)) if given is None else round(given * GIB)
    return _evaluate(model, job, cluster, budget=budget)


def _evaluate(model: ModelShape, job: Job, cluster: Cluster, *, budget: int | None = None) -> Plan:
    """Predict a job. As many units as fit in `budget` bytes, or those that the strategy keeps, stay unsharded."""
    check_kernel(job, cluster.device)
    runs = job.model_copy(update={"compile": False}) if breaks_graph(job, cluster.device) else job
    trained = apply_method(model, job)
    if job.wrap_embeddings:
        trained = trained.with_own_embeddings()
    trained = dealt(tiled(trained, job.tp), job)
    world_size, neighbors = groups_of(cluster, job.tp)
    shard_size = job.row.shard_size_on(neighbors, job.shard_size)
    in_group = job.row.mesh_shape(world_size, shard_size)[1]
    check_groups(trained, job, cluster, groups=world_size, shard_size=in_group)
    is_cpu = cluster.device.is_cpu
    on_host = job.on_host if cluster.device.can_offload else Offload()
    layout = lay_out(
        trained, strategy=job.row, world_size=world_size, shard_size=shard_size, dtypes=job.dtypes, offload=on_host
    )
    if on_host.activations:
        layout = layout.with_pages(lambda block: page_nbytes(block, runs, cluster.device))
    route = Route.of(layout.shard_size, on_cpu=is_cpu, per_host=neighbors if cluster.shares_memory else None)
    if route.shares_memory:  # parameters are never sharded; events only mark when a micro-batch reads them
        layout = dataclasses.replace(layout, keeps_parameters=False)
    kept = 0
    if budget is not None:
        units = [unit for unit in reversed(layout.calls) if unit.reshards_after_forward]  # the last first
        kept = count_kept([0 if route.shares_memory else unit.gathered_nbytes for unit in units], budget)
        layout = layout.keeping(kept)
    repeats, step = _repeats(job)
    events = predict_step(layout, step)
    setting = PlanSetting(
        trained,
        layout,
        runs,
        dataclasses.replace(cluster.device, framework=cluster.framework),
        on_host=on_host,
        route=route,
        matrices=matrix_work(trained, layout, job.dtypes) if job.planned_optimizer.matrix else None,
    )
    return Plan(model, job, cluster, setting, events, repeats, kept)


def _repeats(job: Job) -> tuple[int, ScheduleOptions]:
    """Return how many equal parts a step consists of, and the schedule options of one part."""
    if job.sync_each_micro_batch and not job.row.keeps_parameters:  # micro-batches are alike and do not overlap
        return job.accumulation, dataclasses.replace(job.schedule, accumulation=1)
    return 1, job.schedule


def _copied(layout: ModelLayout, job: Job) -> dict[str, int]:
    """Return the bytes that a step copies between host and device, some of them once and others per micro-batch."""
    if job.accumulation == 1 or not any(bucket.offload.has_shards for bucket in layout.buckets):
        return {}  # the step's traffic includes it already
    options = [dataclasses.replace(job.schedule, accumulation=number) for number in (1, 2)]
    one, two = (traffic_of(predict_step(layout, option), layout) for option in options)
    names = ("to_device_nbytes", "to_host_nbytes")
    return {n: getattr(one, n) + (job.accumulation - 1) * (getattr(two, n) - getattr(one, n)) for n in names}


def notes_of(plan: Plan) -> list[str]:
    """Return notes on what the plan assumes, for users who read its numbers."""
    job, device, layout = plan.job, plan.cluster.device, plan.setting.layout
    others = len(layout.units) - (2 if job.wrap_embeddings else 1)
    conversion = conversion_of(plan.model, job) if job.method != "full" and not plan.model.is_final else None
    is_apart = device.is_cpu and layout.shard_size > 1 and not plan.cluster.shares_memory
    keeps_dtype = job.method != "full" or job.stored_dtype == job.main_dtype
    notes = {
        f"a {device.name} has no bfloat16 in hardware: the plan assumes the speed of float16 (--precision fp16)": (
            job.precision == "bf16" and not device.has_bfloat16
        ),
        loss_note(plan.model, job): plan.model.vocab > 0,
        (said := _attention_note(plan)): bool(said),
        f"layers are split over {job.tp} ranks as Transformers splits Llama's, and each rank has all tokens between "
        "the parts; set this up in the script or with distributed_config (docs/tensor_parallelism.md)": job.tp > 1,
        f"each sequence is on {job.cp} ranks with ring attention, whose keys and values are gathered "
        "(cp_comm_strategy allgather) and whose causal mask is load-balanced": job.cp > 1,
        f"each sequence is on {job.sp} ranks, which exchange heads before and after attention (Ulysses)": job.sp > 1,
        f"experts are divided among {job.ep} ranks, of which the busiest has {job.ep_imbalance:g} times the average "
        "tokens: an assumption (--ep-imbalance)": job.ep > 1,
        "ranks communicate through Gloo and do not share memory, because FULLSHARD_COMM=gloo is set": is_apart,
        f"offload saves nothing here: a {device.name} computes in host memory": job.on_host and not device.can_offload,
        f"{plan.kept} of {others} units stay unsharded between forward and backward": job.keeps_what_fits,
        "this engine does not compile layers with selective checkpointing; the plan is only for comparison": (
            job.checkpointing == "selective" and job.compile
        ),
        "checkpointed layers are not compiled: with one sequence, flash attention in Transformers ends the graph "
        "(--attention sdpa does not)": breaks_graph(job, device),
        f"main weights are {job.main_dtype}; with precision no they stay {job.stored_dtype}": not keeps_dtype,
        "the computation of the layers is unknown, so these numbers do not include activations": not plan.model.blocks,
        "4-bit layers compute in float32 in this plan; bf16 is usual": (
            job.method == "qlora" and not device.is_cpu and job.precision == "fp32"
        ),
    }
    if conversion is not None:
        is_quantized = bool(job.method == "qlora" or job.quantize or form_of_files(plan.model, job))
        notes |= {conversion.said: is_quantized, conversion.said_of_adapters: conversion.unadapted > 0}
    return [note for note, is_so in notes.items() if is_so]


def _attention_note(plan: Plan) -> str:
    """Return a note if the device has no fused attention kernel for the job's precision, or an empty string."""
    job, device = plan.job, plan.cluster.device
    if device.is_cpu or not (found := _without_kernel(plan, job)):
        return ""
    heads = f"{found[0].kv_heads} key and value heads for {found[0].heads} query heads"
    note = (
        f"on a {device.name} PyTorch has no fused attention in {job.compute_dtype} with {heads}, so layers keep scores"
    )
    for precision in ("bf16", "fp16"):
        if not _without_kernel(plan, job.model_copy(update={"precision": precision})):
            return f"{note}; in {precision} (--precision {precision}) they do not"
    return note


def _without_kernel(plan: Plan, job: Job) -> list[Block]:
    """Return the layers in which PyTorch has no fused attention kernel and writes the scores to memory."""
    return [block for block in plan.model.blocks if what_runs(block, job, plan.cluster.device) == "math"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of settings that makes a plan fit."""

    words: str
    plan: Plan
    cost: float  # the factor by which the change multiplies the device time per token; below 1, training is cheaper


_FEW = 3
"""The number of changes that are returned, and below which pairs are tried."""

_Offer = tuple[str, dict[str, Any]]
"""A change, described in words and as settings."""


def changes_that_fit(plan: Plan, *, most: int = _FEW, margin: float = MARGIN) -> list[Change]:
    """Return the cheapest changes that make `plan` fit into the fraction `margin` of its device's memory.

    Each result changes a single setting, or two if few single changes are enough. The same parameters are trained as
    before. If no such change is enough, main weights in bfloat16 and adapters are proposed. At most the last result
    needs more devices.
    """

    def fitting(offers: Iterable[_Offer]) -> list[Change]:
        found = []
        for words, values in offers:
            with contextlib.suppress(ConfigError):  # the change conflicts with another setting
                after = evaluate(plan.model, Job.of({**plan.job.model_dump(), **values}), plan.cluster)
                if after.is_within(margin):
                    found.append(Change(words, after, plan.time.tokens_per_second / after.time.tokens_per_second))
        return found

    singles = _changes(plan)
    found = fitting(singles)
    enough = {change.words for change in found}
    pairs = (  # with full checkpointing, which needs less than selective
        (f"{first}, and {second}", {**one, **two})
        for (first, one), (second, two) in itertools.combinations(singles, 2)
        if not {first, second} & enough
        and not one.keys() & two.keys()
        and "selective" not in (one.get("checkpointing"), two.get("checkpointing"))
    )
    least: dict[str, Any] = {"checkpointing": "full", "strategy": "FULL_SHARD", "shard_size": None}
    methods: list[_Offer] = [
        (f"{m} instead of {plan.job.method} training, with full activation checkpointing", {"method": m, **least})
        for m in {"full": ("lora", "qlora"), "lora": ("qlora",)}.get(plan.job.method, ())
    ]
    if len(found) < _FEW:
        found += fitting(pairs)
    found = found or fitting(_in_bfloat16(plan, least))[:1] + fitting(methods)
    found += _with_more_devices(plan, margin, "", {})
    if not found:  # several changes at once, if need be on more devices
        parts = {f"offload_{name}": None for name in ("compute_shards", "main_weights", "optimizer_state")}
        least |= {"loss": "fused", "offload": True, "offload_activations": True, **parts}
        same, *others = (
            (f"{words}, a loss in chunks, and everything on the host", {**least, **values})
            for words, values in (("full activation checkpointing", {}), *methods)
        )
        found = fitting([same]) or _with_more_devices(plan, margin, *same) + fitting(others)
        found = found or [change for offer in others for change in _with_more_devices(plan, margin, *offer)]
    found.sort(key=lambda change: change.cost)
    here = [change for change in found if change.plan.cluster.count == plan.cluster.count]
    more = [change for change in found if change not in here][:1]
    here.sort(key=lambda change: change.plan.job.method != plan.job.method)  # the others change what is trained
    return [*sorted(here[: most - len(more)], key=lambda change: change.cost), *more]


def _in_bfloat16(plan: Plan, least: Mapping[str, Any]) -> list[_Offer]:
    """Return offers of full training without anything in float32, the second with all that needs no host memory."""
    if plan.job.main_dtype != "float32" or plan.job.method != "full" or not plan.cluster.device.has_bfloat16:
        return []
    words = "weights, gradients and optimizer state in bfloat16, full activation checkpointing"
    values = {**least, "base_dtype": "bfloat16", "precision": "no"}
    more = {"loss": "fused", "step_in_backward": True, "wrap_embeddings": not plan.model.tied}
    return [(words, values), (f"{words}, a loss in chunks and steps in backward", {**values, **more})]


def without_room(plan: Plan, margin: float) -> Plan | None:
    """Return the plan that offloads as little as makes it fit on the devices, if the hosts have no room for that."""
    least = {"checkpointing": "full", "strategy": "FULL_SHARD", "shard_size": None, "loss": "fused"}
    frozen = ["offload_compute_shards"] if plan.job.method != "full" else []
    for part in [*frozen, "offload_optimizer_state", "offload_main_weights", "offload"]:
        with contextlib.suppress(ConfigError):
            after = evaluate(plan.model, Job.of({**plan.job.model_dump(), **least, part: True}), plan.cluster)
            if after.setting.on_host and after.memory.needed <= margin * plan.cluster.device.memory:
                return None if after.fits_host(margin) else after
    return None


def _changes(plan: Plan) -> list[_Offer]:
    job = plan.job
    halves = [job.micro_batch >> power for power in range(1, job.micro_batch.bit_length())]
    sequences = job.micro_batch * job.accumulation
    batches = {size: sequences // size for size in halves if sequences % size == 0}
    parts = {f"offload_{name}": None for name in ("compute_shards", "main_weights", "optimizer_state")}
    saved = "what layers keep for backward" if job.checkpointing == "none" else "the inputs of checkpointed layers"
    form = plan.model.published_as  # the form of the published files
    is_plain, trains_all = not job.on_host, job.method == "full"
    sums = trains_all and job.main_dtype != "float32" and job.reduce_dtype is None
    no_scores = job.attention == "eager" and not _without_kernel(plan, job.model_copy(update={"attention": "sdpa"}))
    most = math.gcd(groups_of(plan.cluster, job.tp)[1], 64)  # a power of two that divides the ranks of a host
    times = job.accumulation * most
    is_divided = most == 1 or job.shared_by > 1 or job.seq_len < _SHORT
    offers: list[tuple[str, dict[str, Any], bool]] = [
        *(
            (f"{how} (--{axis} {most} --accumulation {times})", {axis: most, "accumulation": times}, not is_divided)
            for axis, how in (
                ("cp", "a part of each sequence per rank"),
                ("sp", "parts of sequences, then heads in attention"),
            )
        ),
        (
            f"experts on different ranks (--ep {most})",
            {"ep": most},
            most > 1 and job.ep == 1 and any(block.experts for block in plan.model.blocks),
        ),
        *(
            (f"a micro-batch of {size}, accumulated {n} times", {"micro_batch": size, "accumulation": n}, True)
            for size, n in batches.items()
        ),
        (
            "selective activation checkpointing",
            {"checkpointing": "selective"},
            job.checkpointing == "none" and not job.compile,
        ),
        ("full activation checkpointing", {"checkpointing": "full"}, job.checkpointing != "full"),
        ("a loss in chunks (use_chunked_loss), which never holds whole logits", {"loss": "fused"}, job.loss != "fused"),
        (
            f"the frozen weights in the form of the files, {form} (without --base-dtype)",
            {"base_dtype": None},
            job.method == "lora" and job.quantize is None and job.base_dtype is not None and bool(form),
        ),
        ("FULL_SHARD", {"strategy": "FULL_SHARD", "shard_size": None}, job.strategy != "FULL_SHARD"),
        ("the input embedding and the head as units of their own", {"wrap_embeddings": True}, not job.wrap_embeddings),
        ("8-bit AdamW", {"optimizer": "adamw-8bit"}, job.optimizer in ("adamw", "adamw-fused")),
        (f"gradients added up in {job.main_dtype} (reduce_dtype)", {"reduce_dtype": job.main_dtype}, sums),
        ("the frozen base on the host", {"offload_compute_shards": True}, is_plain and not trains_all),
        ("main weights and optimizer state on the host", {"offload_main_weights": True}, is_plain and trains_all),
        ("everything on the host", {"offload": True, **parts}, not job.on_host.is_everything),
        ("nothing on the host", {"offload": False, "offload_activations": False, **parts}, bool(job.on_host)),
        (f"{saved} on the host", {"offload_activations": True}, not job.offload_activations),
        ("attention that keeps no scores (sdpa)", {"attention": "sdpa"}, no_scores),
    ]
    return [(words, values) for words, values, helps in offers if helps]


_SHORT = 8192
"""Tokens of a sequence below which dividing it is not proposed."""


def _with_more_devices(plan: Plan, margin: float, words: str, values: Mapping[str, Any]) -> list[Change]:
    """Return a change to `values` on 2, 4, ... times the devices, if one fits. Its cost is device time per token."""
    for times in (2, 4, 8, 16, 32, 64):
        count = plan.cluster.count * times
        hosts = max(plan.cluster.hosts, -(-count // plan.cluster.device.per_host))
        if count % hosts:
            continue
        cluster = dataclasses.replace(plan.cluster, count=count, hosts=hosts)
        try:
            after = evaluate(plan.model, Job.of({**plan.job.model_dump(), **values}), cluster)
        except ConfigError:  # the change conflicts with another setting
            return []
        if after.is_within(margin):
            before, now = (p.time.tokens_per_second / p.cluster.count for p in (plan, after))
            return [Change(", on ".join(filter(None, (words, str(after.cluster)))), after, before / now)]
    return []
