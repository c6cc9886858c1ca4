"""Compute the FLOP of a step, and the seconds that a device needs for each part of it."""

from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.core.dtypes import itemsize
from fullshard.core.events import Event, EventKind
from fullshard.plan.activations import between_products_nbytes, layer_activations, passes_over_scores
from fullshard.plan.attention import BACKWARD, WRITTEN_OUT, attention_flops, fractions, part_of_size, what_runs
from fullshard.plan.experts import added_seconds, operations
from fullshard.plan.hardware import Cluster, Device
from fullshard.plan.host import HostCosts
from fullshard.plan.job import Job
from fullshard.plan.layout import UnitLayout
from fullshard.plan.losses import moved_nbytes, recomputed_flops
from fullshard.plan.matrices import SENT_AS, MatrixWork
from fullshard.plan.optimizers import OptimizerRow
from fullshard.plan.setting import PlanSetting, of_parameters
from fullshard.plan.shapes import Block, ModelShape, UnitShape

PCIE = 25e9
"""Bytes per second between host and device over PCIe 4.0 x16, which has a peak of 31.5 GB/s."""

HOST_UNIT = 4e-4
"""Seconds per unit and micro-batch that the engine spends on hooks and on starting collectives, measured on 64 ranks
(`docs/performance.md`)."""

COMPILED_OPS = 0.15
"""The fraction of a layer's operations that remain if it is compiled: products, attention and fused kernels."""

LAYER_KERNELS, LAYER_VIEWS = (34, 67), (39, 71)
"""Number of ATen operations with and without a kernel in a layer's forward and backward, counted in a Llama layer
(`tests/plan/test_plan_time.py`)."""

HEAD_NORM_KERNELS = (12, 28)
"""Number of operations with a kernel that norms of queries and keys add, counted in a Qwen3 layer."""

_RECOMPUTED = {"none": 0.0, "selective": 0.4, "full": 1.0}
"""Fraction of forward that backward recomputes. Selective checkpointing drops half of the products."""

_BESIDES = {"mxfp4": 8, "fp8": 8}
"""Bytes per element that are written and read again if several kernels decode the codes (the feature's `codecs`)
instead of a single one."""

_LAST = ("mlp.down_proj.weight", "mlp.c_proj.weight", "mlp.fc2.weight")
"""Names of a layer's last product in the different families."""


def forward_flops(unit: UnitShape, job: Job, *, load: float = 1.0) -> float:
    """Return the FLOP of one unit's forward without attention. `load` is the load of this rank's experts."""
    block = unit.block
    flops = 0.0
    for parameter in unit.parameters:
        if parameter.role in ("embedding", "scale") or len(parameter.shape) < 2:
            continue
        flops += 2 * parameter.numel * parameter.folded_rank
        share = 1.0
        if block is not None and block.experts and ".experts." in parameter.name:
            if parameter.role == "adapter":
                continue  # its product has been added to the weights
            share = load * block.experts_per_token / block.experts * (parameter.tiles if parameter.of_experts else 1)
        elements = parameter.numel * (2 if parameter.exact else 1)  # two 4-bit elements in a byte
        flops += 2 * elements * share * job.tokens
    return flops


def attention_seconds(block: Block, job: Job, device: Device) -> tuple[float, float]:
    """Return the seconds of a layer's attention for one micro-batch, in forward and in backward."""
    way = what_runs(block, job, device)
    dtype = "float32" if way == "math" else job.compute_dtype
    flops = attention_flops(block, job.tokens, job.seq_len, whole=way != "fused" and not device.is_cpu)
    if way not in WRITTEN_OUT and not device.is_cpu and itemsize(dtype) == 2:
        keys = min(job.seq_len // job.cp, block.window or job.seq_len)  # of one block of a ring
        parts = [part_of_size(block.head_dim, keys, flash=flash) for flash in fractions(job, device, way)]
        return flops / (device.flops * parts[0]), BACKWARD * flops / (device.flops * parts[1])
    seconds = flops / (device.peak(dtype) * device.efficiency)
    if way in WRITTEN_OUT and not device.is_cpu:
        scores = flops / (2 * block.head_dim + 2 * (block.value_dim or block.head_dim))
        # The scores are written by one product and read by another.
        seconds = max(seconds, 2 * scores * itemsize(dtype) / device.memory_speed)
    return seconds, seconds * (2 if way in WRITTEN_OUT or device.is_cpu else BACKWARD)


def _pass_seconds(block: Block, job: Job, device: Device) -> tuple[float, float]:
    """Return the seconds of the operations between a layer's products, in forward and in backward."""
    if not device.is_cpu:
        forward, backward = between_products_nbytes(block, job, device)
    else:
        layer = layer_activations(block, job, device)
        forward, backward = 2 * (layer.kept + layer.recomputed), 3 * (layer.kept + layer.recomputed)
    return forward / device.memory_speed, backward / device.memory_speed


@dataclass(frozen=True, slots=True)
class UnitWork:
    """The seconds that different kinds of work take for one unit and one micro-batch."""

    forward: float  # computation
    backward: float  # computation, including recomputation
    casts: tuple[float, float]  # casting this rank's interval before the gather, and gradients before the reduction
    issued: tuple[float, float]  # the time that the host needs to issue forward, and backward, to an accelerator
    decoding: float  # decoding quantized weights after the gather
    attention: tuple[float, float]  # the part of forward and backward, without recomputation, that attention takes


def works_of(setting: PlanSetting) -> dict[str, UnitWork]:
    """Return the work of each unit, keyed by the unit's name."""
    model, job, device = setting.model, setting.job, setting.device
    speed, part = device.peak(job.compute_dtype) * device.efficiency, _RECOMPUTED[job.checkpointing]
    of_block = {
        block: (
            attention_seconds(block, job, device),
            _pass_seconds(block, job, device),
            _written_again_seconds(block, job, device),
        )
        for block in set(model.blocks)
    }
    works = {}
    for shape, unit in zip(model.units, setting.layout.units, strict=True):
        flops = forward_flops(shape, job, load=job.load) + (head_flops(model, job) if shape is model.root else 0.0)
        none = (0.0, 0.0), (0.0, 0.0), 0.0
        attention, passes, written = none if shape.block is None else of_block[shape.block]
        added, again = added_seconds(shape, job, device), part if shape.block is not None else 0.0
        products = flops / speed + added[0]
        forward = products + attention[0] + passes[0]
        # Operations that are not recomputed, or that are counted separately.
        left_out = written or attention[0]
        if job.checkpointing != "selective":
            left_out = products * last_product(shape, job)
        backward = backward_factor(shape) * flops / speed + added[1] + attention[1] + passes[1]
        backward += again * (forward - left_out) + written
        issued = [0.0, 0.0]
        if not device.is_cpu:
            issued = [seconds + HOST_UNIT / 2 for seconds in _issued_seconds(shape.block, job)]
        there = issued[0], issued[1] + again * issued[0]
        casts, decoding = _cast_seconds(setting, unit), _decoding_seconds(setting, unit)
        works[unit.name] = UnitWork(forward, backward, casts, there, decoding, attention)
    return works


def _issued_seconds(block: Block | None, job: Job) -> tuple[float, float]:
    """Return the seconds that the host needs to issue a layer's operations, in forward and in backward."""
    if block is None:
        return 0.0, 0.0
    kernels, views = operations(block, job)
    norms = HEAD_NORM_KERNELS if block.head_norms else (0, 0)
    fused = COMPILED_OPS if job.compile else 1.0
    forward, backward = (
        fused * HostCosts().seconds(LAYER_KERNELS[way] + norms[way] + kernels[way], LAYER_VIEWS[way] + views[way])
        for way in (0, 1)
    )
    return forward, backward


def loss_seconds(setting: PlanSetting) -> float:
    """Return the seconds of one micro-batch's loss, for forward and backward together."""
    model, job, device = setting.model, setting.job, setting.device
    speed = device.peak(job.compute_dtype) * device.efficiency
    return recomputed_flops(model, job) / speed + moved_nbytes(model, job) / device.memory_speed


def head_flops(model: ModelShape, job: Job) -> float:
    """Return the FLOP of a tied head, which `forward_flops` does not count, for one micro-batch. Otherwise 0."""
    return 2.0 * model.vocab * model.hidden * job.tokens if model.tied else 0.0


def step_flops(model: ModelShape, job: Job) -> float:
    """Return the FLOP of one rank in a step, without recomputation."""
    total = head_flops(model, job) * 3
    for unit in model.units:
        total += forward_flops(unit, job) * (1 + backward_factor(unit))
    total += sum(3 * attention_flops(block, job.tokens, job.seq_len) for block in model.blocks)
    return total * job.accumulation


def masked_flops(model: ModelShape, job: Job) -> float:
    """Return the FLOP of the masked part of attention, which `step_flops` does not count."""
    size = job.tokens, job.seq_len
    masked = sum(attention_flops(b, *size, whole=True) - attention_flops(b, *size) for b in model.blocks)
    return 3 * masked * job.accumulation


def backward_factor(unit: UnitShape) -> float:
    """Return the cost of backward's products divided by forward's: one for inputs, one for trained weights."""
    matrices = [p for p in unit.parameters if len(p.shape) >= 2]
    total = sum(p.numel for p in matrices)
    trained = sum(p.numel for p in matrices if p.trainable or p.folded_rank)
    return 1 + (trained / total if total else 1)


def _written_again_seconds(block: Block, job: Job, device: Device) -> float:
    """Return the seconds for which selective checkpointing recomputes attention, which are 0 for fused kernels."""
    if job.checkpointing != "selective" or what_runs(block, job, device) not in WRITTEN_OUT:
        return 0.0
    passes = 0.0 if device.is_cpu else passes_over_scores(block, job, device)[0] * job.tokens / device.memory_speed
    return attention_seconds(block, job, device)[0] + passes


def _cast_seconds(setting: PlanSetting, unit: UnitLayout) -> tuple[float, float]:
    speed = setting.device.memory_speed
    made = sum(b.layout.full_numel * itemsize(b.compute_dtype) + setting.collected_nbytes(b) for b in unit.trainable)
    if setting.route.shares_memory:  # nothing is allocated or copied, and backward reuses forward's casts
        moved = sum((b.main_nbytes + copied) / 2 for b in unit.buckets if (copied := setting.copies_nbytes(b)))
        return moved / speed, made / speed
    own = [bucket for bucket in unit.buckets if not bucket.shares_main and bucket.form is None]
    return sum(b.main_nbytes + b.layout.shard_numel * itemsize(b.compute_dtype) for b in own) / speed, made / speed


def step_decoding_seconds(setting: PlanSetting, events: Iterable[Event]) -> float:
    """Return the seconds that a step spends on decoding units, according to its events."""
    each = {unit.name: _decoding_seconds(setting, unit) for unit in setting.layout.units}
    return sum(each[event.unit] for event in events if event.kind is EventKind.UNSHARD_READY)


def _decoding_seconds(setting: PlanSetting, unit: UnitLayout) -> float:
    """Return the seconds for decoding a unit: codes are read, and values written, for some forms in float32 first."""
    moved = sum(
        b.main_nbytes * b.layout.world_size + b.full_nbytes + _BESIDES.get(b.form.name, 0) * b.layout.full_numel
        for b in unit.coded
        if b.form is not None
    )
    return moved / setting.device.memory_speed


def last_product(unit: UnitShape, job: Job) -> float:
    """Return the fraction of a layer's forward FLOP that recomputation saves by skipping an unneeded last product."""
    block = unit.block
    matrices = [p for p in unit.parameters if len(p.shape) == 2 and p.role == "matrix" and p.trainable]
    is_read = any("post_feedforward" in p.name for p in unit.parameters)
    if block is None or is_read or job.reentrant or block.experts or block.dropout or block.adapters or not matrices:
        return 0.0
    if not matrices[-1].name.endswith(_LAST):
        return 0.0
    return matrices[-1].numel * 2 * job.tokens / forward_flops(unit, job)


def copied_once_seconds(setting: PlanSetting) -> float:
    """Return the seconds of the PCIe transfers that happen once per step. All others are run on the clock."""
    copied = [b for b in setting.layout.buckets if b.main_is_on_host and not b.is_gathered_from_host]
    nbytes: float = sum(bucket.compute_shard_nbytes for bucket in copied)
    if setting.on_host.optimizer_state and not setting.on_host.main_weights:
        nbytes += 2 * of_parameters(setting, OptimizerRow.state_nbytes)
    return nbytes / PCIE


def optimizer_seconds(setting: PlanSetting, cluster: Cluster) -> float:
    """Return the seconds of the optimizer's step, which works in device memory or, with offloading, in host memory."""
    device = cluster.device
    bandwidth = device.memory_speed
    if setting.on_host.main_weights:
        bandwidth = min(bandwidth, 20e9)  # each process's share of a host's 200 GB/s or so
    parameters = sum(len(bucket.layout.specs) for bucket in setting.layout.buckets if bucket.trainable)
    calls = 0.0 if device.is_cpu else parameters * HostCosts().seconds(1, 1)
    seconds = of_parameters(setting, OptimizerRow.step_nbytes) / bandwidth + calls
    return seconds + (_matrices(setting.matrices, cluster) if setting.matrices is not None else 0.0)


def _matrices(work: MatrixWork, cluster: Cluster) -> float:
    """Return the seconds for updating complete matrices, which owners do while other pieces are being sent."""
    device, exchanges = cluster.device, work.dealing.exchanges
    there = [max(device.link_seconds(*links)) for links in work.links(cluster.per_host)]
    replicas = max(device.link_seconds(*work.replica_links(cluster.per_host))) / len(exchanges)
    speed = device.peak(SENT_AS) * device.efficiency
    wire, come, busy = there[0], there[0], [0.0] * work.ranks
    for number, exchange in enumerate(exchanges):
        busy = [
            max(until, come) + flops / speed for until, flops in zip(busy, work.dealing.work(exchange), strict=True)
        ]
        wire = come = wire + sum(there[number + 1 : number + 2])
        wire = max(wire, *busy) + there[number] + replicas
    return wire
