"""The time of a mixture's products and of moving tokens to experts and back, in forward and in backward.

Each of E experts multiplies its own rows, m = tokens x experts per token / E on average. `Job.experts` says how:

    grouped    one grouped product for all experts (Transformers' `grouped_mm`, its default)
    eager      a loop over experts, with one product for each (Transformers' `eager`); the host issues each of them
    kernel     kernels that are written for experts and as fast as one large product. With expert parallelism, a token
               is sent to each rank only once (DeepEP)

A product of m rows computes tiles of 128 rows, so 64 rows per expert are wasted on average. If m is small, reading all
weights takes longer than computing. A grouped product also spends time at the start and at the end of each tile, in
which it computes nothing: as long as for an inner width of 1000. This was measured on an H100 (ByteDance-Seed/VeOmni,
pull request 460; forward of 32,768 tokens, of which moving tokens takes 2.6 and 3.1 ms by the count below):

| experts | per token | width | hidden | ms | inner width of start and end |
|---|---|---|---|---|---|
| 128 | 8 | 768 | 2048 | 10.2 | 930 |
| 512 | 10 | 512 | 2048 | 11.4 | 1120 |

Tokens are gathered, weighted, put back in order and summed. These operations of Transformers read and write 7 b H bytes
per token and expert in forward, and 14 b H in backward (`tests/plan/test_plan_experts.py`). Kernels for experts do the
same while they compute, except for 4 and 6 b H.

A loop selects each expert from the stacked weights, and its tokens from all tokens. The backward of each selection
writes a gradient as large as what it selected from, mostly zeros, and adds it to the gradient of the other experts.
"""

import math

from fullshard.core.dtypes import itemsize
from fullshard.plan.hardware import Device
from fullshard.plan.job import Experts, Job
from fullshard.plan.shapes import Block, UnitShape

_WASTED = 64
"""Rows per expert that are computed for nothing, because the last tile of 128 rows is not full."""

_START = {"grouped": 1000.0, "eager": 0.0, "kernel": 0.0}
"""The inner width for which a product takes as long as the start and the end of its tiles."""

_PASSES = {"grouped": (7, 14), "eager": (7, 14), "kernel": (4, 6)}

MIXTURE_KERNELS, MIXTURE_VIEWS = (14, 14), (4, 3)
"""Operations with and without a kernel that a mixture adds to those of a dense layer, in forward and in backward."""

EXPERT_KERNELS, EXPERT_VIEWS = (11, 25), (15, 11)
"""The same for each expert of a loop over experts."""


def dispatched_nbytes(block: Block, job: Job) -> tuple[int, int]:
    """Return the bytes per token for moving tokens to experts and back, in forward and in backward."""
    each = round(itemsize(job.compute_dtype) * block.experts_per_token * block.load * block.hidden)
    forward, backward = _PASSES[job.experts]
    return forward * each, backward * each


def operations(block: Block, job: Job) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the operations with a kernel and without one that experts add, in forward and in backward."""
    if not block.experts:
        return (0, 0), (0, 0)
    if job.experts != "eager":
        return MIXTURE_KERNELS, MIXTURE_VIEWS
    local = block.experts // job.ep
    return (EXPERT_KERNELS[0] * local, EXPERT_KERNELS[1] * local), (EXPERT_VIEWS[0] * local, EXPERT_VIEWS[1] * local)


def slowdown(rows: float, inner: float, experts: Experts = "grouped") -> float:
    """Return the time of the experts' products, with `rows` each, divided by the time of one large product."""
    return (1 + _WASTED / rows) * (1 + _START[experts] / inner)


def added_seconds(unit: UnitShape, job: Job, device: Device) -> tuple[float, float]:
    """Return by how much longer a unit's experts compute than one large product would, in forward and in backward."""
    block = unit.block
    if block is None or not block.experts or device.is_cpu:
        return 0.0, 0.0
    speed = device.peak(job.compute_dtype) * device.efficiency
    rows = job.tokens * job.ep * block.experts_per_token * block.load / block.experts
    forward = backward = 0.0
    for parameter in unit.parameters:
        if ".experts." not in parameter.name or len(parameter.shape) != 3:
            continue
        other = parameter.numel // (parameter.shape[0] * block.hidden)
        inner, outer = (other, block.hidden) if "down" in parameter.name else (block.hidden, other)
        seconds = 2 * parameter.numel * rows / speed
        least = parameter.numel * itemsize(job.compute_dtype) / device.memory_speed
        forward += max(seconds * slowdown(rows, inner, job.experts), least) - seconds
        backward += max(seconds * slowdown(rows, outer, job.experts), least) - seconds
        if parameter.trainable or parameter.folded_rank:
            backward += max(seconds * slowdown(math.inf, rows, job.experts), least) - seconds
            backward += selected_nbytes(parameter.shape[0], parameter.numel, job) / device.memory_speed
    backward += selected_nbytes(block.experts // job.ep, job.tokens * block.hidden, job) / device.memory_speed
    return forward, backward


def selected_nbytes(experts: int, elements: int, job: Job) -> int:
    """Return the bytes that backward moves because a loop selects so many elements, once for each expert."""
    return (4 * experts - 3) * elements * itemsize(job.compute_dtype) if job.experts == "eager" else 0
