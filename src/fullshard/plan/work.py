"""The work in a step: FLOP, and the seconds that each piece takes of the device by itself."""

from __future__ import annotations

import math

from fullshard.core.dtypes import itemsize
from fullshard.core.sizes import LONG_NBYTES
from fullshard.plan.activations import between_products_nbytes, layer_activations, passes_over_scores
from fullshard.plan.attention import BACKWARD, WRITTEN_OUT, attention_flops, part_of_size, what_runs
from fullshard.plan.hardware import Cluster, Device
from fullshard.plan.host import HostCosts
from fullshard.plan.job import Job
from fullshard.plan.layout import UnitLayout
from fullshard.plan.matrices import SENT_AS, MatrixWork
from fullshard.plan.optimizers import OptimizerRow
from fullshard.plan.setting import PlanSetting, of_parameters
from fullshard.plan.shapes import Block, ModelShape, UnitShape

PCIE = 25e9
"""Bytes per second between host and device: PCIe 4.0 x16, of 31.5 GB/s."""

_LAST = ("mlp.down_proj.weight", "mlp.c_proj.weight", "mlp.fc2.weight")
"""The last product of a layer, by the names of families."""


def forward_flops(unit: UnitShape, job: Job) -> float:
    """Return FLOP of one unit's forward for one micro-batch, attention apart."""
    block = unit.block
    flops = 0.0
    for parameter in unit.parameters:
        if parameter.role in ("embedding", "scale") or len(parameter.shape) < 2:
            continue
        share = 1.0
        if block is not None and block.experts and ".experts." in parameter.name:
            share = block.experts_per_token / block.experts
        elements = parameter.numel * (2 if parameter.exact else 1)  # two 4-bit elements in a byte
        flops += 2 * elements * share * job.tokens
    return flops


def attention_seconds(block: Block, job: Job, device: Device) -> tuple[float, float]:
    """Return the seconds of a layer's attention in forward and backward of one micro-batch, without recomputation."""
    way = what_runs(block, job, device)
    dtype = "float32" if way == "math" else job.compute_dtype
    flops = attention_flops(block, job.tokens, job.seq_len, whole=way != "fused" and not device.is_cpu)
    speed = device.peak(dtype) * device.efficiency
    if way not in WRITTEN_OUT and not device.is_cpu and itemsize(dtype) == 2:
        keys = min(job.seq_len, block.window or job.seq_len)
        speed = device.flops * part_of_size(block.head_dim, keys, flash=device.flash)
    seconds = flops / speed
    if way in WRITTEN_OUT and not device.is_cpu:
        scores = flops / (2 * block.head_dim + 2 * (block.value_dim or block.head_dim))
        seconds = max(seconds, 2 * scores * itemsize(dtype) / device.memory_speed)  # written by a product, read by one
    return seconds, seconds * (2 if way in WRITTEN_OUT or device.is_cpu else BACKWARD)


def pass_seconds(block: Block, job: Job, device: Device) -> tuple[float, float]:
    """Return the seconds of the operations between a layer's products, in forward and in backward."""
    bandwidth = device.memory_speed
    if not device.is_cpu:
        forward, backward = between_products_nbytes(block, job, device)
        return forward / bandwidth, backward / bandwidth
    layer = layer_activations(block, job, device)
    saved = layer.kept + layer.recomputed
    return 2 * saved / bandwidth, 3 * saved / bandwidth


def head_flops(model: ModelShape, job: Job) -> float:
    """Return the FLOP of the head. A tied head is an embedding by its role, but multiplies all the same."""
    return 2.0 * model.vocab * model.hidden * job.tokens if model.tied else 0.0


def step_flops(model: ModelShape, job: Job) -> float:
    """Return one rank's FLOP: forward, and twice that for backward; a frozen layer needs only its input's gradient."""
    total = head_flops(model, job) * 3
    for unit in model.units:
        total += forward_flops(unit, job) * (1 + backward_factor(unit))
    total += sum(3 * attention_flops(block, job.tokens, job.seq_len) for block in model.blocks)
    return total * job.accumulation


def masked_flops(model: ModelShape, job: Job) -> float:
    """Return the part of attention that `step_flops` leaves out because it is masked."""
    size = job.tokens, job.seq_len
    masked = sum(attention_flops(b, *size, whole=True) - attention_flops(b, *size) for b in model.blocks)
    return 3 * masked * job.accumulation


def backward_factor(unit: UnitShape) -> float:
    """Return the cost in forwards: one for the gradients of inputs, and one for those of weights that are trained."""
    matrices = [p for p in unit.parameters if len(p.shape) >= 2]
    total = sum(p.numel for p in matrices)
    trained = sum(p.numel for p in matrices if p.trainable)
    return 1 + (trained / total if total else 1)


def recomputed_part(job: Job) -> float:
    """Return the forwards run again in backward: all, or what selective checkpointing drops (half the products)."""
    return {"none": 0.0, "selective": 0.4, "full": 1.0}[job.checkpointing]


def written_again_seconds(block: Block, job: Job, device: Device) -> float:
    """Return the seconds of attention that selective checkpointing runs again: it keeps what one kernel returns."""
    if job.checkpointing != "selective" or what_runs(block, job, device) not in WRITTEN_OUT:
        return 0.0
    products = attention_seconds(block, job, device)[0]
    if device.is_cpu:
        return products
    return products + passes_over_scores(block, job, device)[0] * job.tokens / device.memory_speed


def cast_seconds(setting: PlanSetting, unit: UnitLayout, device: Device) -> tuple[float, float]:
    """Return seconds of casting the own interval in before a gather, and gradients into the reduce input."""
    made = sum(b.layout.full_numel * itemsize(b.compute_dtype) + setting.collected_nbytes(b) for b in unit.trainable)
    if setting.route.shares_memory:  # nothing is new, what is there is not copied, and backward finds forward's casts
        moved = sum((b.main_nbytes + copied) / 2 for b in unit.buckets if (copied := setting.copies_nbytes(b)))
        return moved / device.memory_speed, made / device.memory_speed
    own = [bucket for bucket in unit.buckets if not bucket.shares_main]
    moved = sum(b.main_nbytes + b.layout.shard_numel * itemsize(b.compute_dtype) for b in own)
    fresh = (
        sum(fresh_nbytes(bucket.full_nbytes) for bucket in own),
        sum(fresh_nbytes(bucket.reduce_nbytes) for bucket in unit.trainable),
    )
    speed = device.fresh_bandwidth or math.inf
    return moved / device.memory_speed + fresh[0] / speed, made / device.memory_speed + fresh[1] / speed


def last_product(unit: UnitShape, job: Job) -> float:
    """Return the part of a layer's products that recomputation leaves out: the last one, if nothing reads its result.

    Dropout, later norms and the weights of experts read it.
    """
    block = unit.block
    matrices = [p for p in unit.parameters if len(p.shape) == 2 and p.role == "matrix" and p.trainable]
    is_read = any("post_feedforward" in p.name for p in unit.parameters)
    if block is None or is_read or job.reentrant or block.experts or block.dropout or block.adapters or not matrices:
        return 0.0
    if not matrices[-1].name.endswith(_LAST):
        return 0.0
    return matrices[-1].numel * 2 * job.tokens / forward_flops(unit, job)


def copied_once_seconds(setting: PlanSetting) -> float:
    """Return the seconds in which offload uses PCIe once per step; the clock overlaps the rest with computing."""
    seconds = 0.0
    for bucket in setting.layout.buckets:
        if bucket.main_is_on_host and not bucket.is_gathered_from_host:
            seconds += bucket.compute_shard_nbytes / PCIE
    if setting.on_host.optimizer_state and not setting.on_host.main_weights:
        seconds += 2 * of_parameters(setting, OptimizerRow.state_nbytes) / PCIE
    return seconds


def fresh_nbytes(nbytes: int) -> int:
    """Return the bytes of a buffer that lie in pages new to the process."""
    return nbytes if nbytes > LONG_NBYTES else 0


def optimizer_seconds(setting: PlanSetting, cluster: Cluster) -> float:
    """Return the seconds in which the optimizer reads and writes its state; in the host's memory with offload."""
    device, optimizer = cluster.device, setting.job.planned_optimizer
    bandwidth = device.memory_speed
    if setting.on_host.main_weights:
        bandwidth = min(bandwidth, 20e9)  # a host's share per process of some 200 GB/s
    parameters = sum(len(bucket.layout.specs) for bucket in setting.layout.buckets if bucket.trainable)
    calls = parameters * (optimizer.ops * device.op_seconds if device.is_cpu else HostCosts().seconds(1, 1))
    seconds = of_parameters(setting, OptimizerRow.step_nbytes) / bandwidth + calls
    return seconds + (_matrices(setting.matrices, cluster) if setting.matrices is not None else 0.0)


def _matrices(work: MatrixWork, cluster: Cluster) -> float:
    """Return seconds of owners' work and exchanges: meanwhile the next pieces come, and the last ones go back."""
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
