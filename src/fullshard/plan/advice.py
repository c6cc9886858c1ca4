"""Compare ways to divide a model among devices, by the speed of the links between them."""

import dataclasses

from fullshard.plan.evaluate import MARGIN, Plan, evaluate
from fullshard.plan.hardware import Cluster, Device
from fullshard.plan.job import Job
from fullshard.plan.library import load_model

_MODELS = ("Qwen3-32B", "Qwen3-14B", "Qwen3-8B", "Qwen3-4B", "Qwen3-1.7B", "Qwen3-0.6B", "SmolLM2-135M")
_JOB = {"micro_batch": 2, "seq_len": 2048, "accumulation": 4, "checkpointing": "full"}
_INT8 = {"gather_as": "int8", "reduce_as": "int8"}


def compare(device: Device, count: int, hosts: int, inside: float, across: float) -> dict[str, str]:
    """Return speeds of ways to train the largest model that fits, fastest first. 0 bytes/s keeps the data sheet's."""
    link, network = (speed / device.link_efficiency for speed in (inside, across))
    device = dataclasses.replace(device, link=link or device.link, network=network or device.network)
    cluster = Cluster(device, count, hosts)
    hybrid = ["HYBRID_SHARD"] if 1 < cluster.per_host < count else []
    for name in _MODELS:
        speeds: dict[str, float] = {}
        for strategy in ("SHARD_OPTIMIZER", "SHARD_GRAD_OPTIMIZER", "FULL_SHARD", *hybrid):
            mesh = {"strategy": strategy, "shard_size": cluster.per_host if strategy in hybrid else None}
            for packed in ({}, _INT8):
                plan = evaluate(load_model(name)[0], Job.of({**_JOB, **mesh, **packed}), cluster)
                if not plan.is_within(MARGIN):
                    break
                speeds[f"{name}, {strategy}{', int8 messages' if packed else ''}"] = plan.time.tokens_per_second
            if not speeds:
                break
            if strategy == "FULL_SHARD":
                speeds[f"{name}, split by layers (pipeline)"] = plan.time.tokens / by_layers_seconds(plan)
        if speeds:
            return {way: f"{speeds[way]:,.0f} tokens/s" for way in sorted(speeds, key=speeds.__getitem__, reverse=True)}
    return {}


def by_layers_seconds(plan: Plan) -> float:
    """Return the seconds of a step if each device computed some of the layers, for all micro-batches (1F1B).

    Devices do the plan's work without gathers and reductions, and idle for (stages - 1) / micro-batches of it, as in
    Narayanan et al. (arXiv 2104.04473, section 2.2). Each sends 2 bytes per element of the residual stream each way.
    """
    batches = plan.cluster.count * plan.job.accumulation
    sent = 2 * plan.model.hidden * plan.job.tokens * batches
    sending = plan.cluster.device.link_seconds(sent, sent)[plan.cluster.hosts > 1]
    work = max(plan.time.compute, sending) * (1 + (plan.cluster.count - 1) / batches)
    return work + plan.time.copies + plan.time.optimizer
