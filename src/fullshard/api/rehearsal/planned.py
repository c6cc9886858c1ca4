"""The plan for the model of a rehearsed script, to compare with the measurements."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.api.planning import base_dtype, model_shape, planned_device, planned_optimizer
from fullshard.core.errors import ConfigError
from fullshard.core.strategy import parse_strategy
from fullshard.engine.parameter import sharded_parameters
from fullshard.engine.precision import dtype_name
from fullshard.features.recompute import is_checkpointed
from fullshard.features.summary import Sharding
from fullshard.plan.evaluate import Plan, evaluate
from fullshard.plan.hardware import Cluster, Device, find_device
from fullshard.plan.job import Job
from fullshard.plan.shapes import ModelShape

_MODES: dict[Any, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def engine_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return which engine has sharded an optimizer's parameters: `fullshard`, `torch`, or None."""
    if sharded_parameters(optimizer):
        return "fullshard"
    return "torch" if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]) else None


def read_job(optimizer: torch.optim.Optimizer) -> tuple[ModelShape, dict[str, Any]]:
    """Return the shape of the sharded model that an optimizer trains, and the fields of a `Job` that it tells.

    Raises:
        ConfigError: the model is not sharded by fullshard, or the planner does not know its layers.
    """
    if not (held := sharded_parameters(optimizer)):
        raise ConfigError("the script does not shard its model with fullshard")
    units = held[0].bucket.owner.schedule.units
    root, sharding, policy = units[-1].modules[0], Sharding.of(units), units[0].policy
    shape = dataclasses.replace(model_shape(root), is_final=True)
    if not shape.blocks:
        raise ConfigError("the planner does not know this model's layers")
    kernel = getattr(root.config, "_attn_implementation", "")
    return shape, {
        "strategy": sharding.strategy,
        "shard_size": sharding.shard_size if parse_strategy(sharding.strategy).is_hybrid else None,
        "precision": _MODES.get(policy.param_dtype, "no"),
        "reduce_dtype": policy.reduce_dtype and dtype_name(policy.reduce_dtype),
        "base_dtype": base_dtype(shape),
        "optimizer": planned_optimizer(optimizer) or "none",
        "checkpointing": "full" if any(map(is_checkpointed, root.modules())) else "none",
        "attention": kernel if kernel in ("eager", "sdpa") else "flash",
        **{f"offload_{name}": is_away for name, is_away in dataclasses.asdict(sharding.offload).items()},
    }


def plan_of(job: Any, reads: Sequence[int], steps: int, cluster: Cluster) -> Plan:
    """Return the plan of a job, or raise `ConfigError`. `reads` are the tokens, sequences and calls of all steps."""
    if not all(reads):
        raise ConfigError("the script embeds no tokens")
    tokens, sequences, calls = reads
    sizes = {"micro_batch": round(sequences / calls), "seq_len": round(tokens / sequences)}
    shape, settings = job
    planned = Job.of({**settings, **sizes, "accumulation": max(1, round(calls / steps))})
    return evaluate(shape, planned, dataclasses.replace(cluster, shares_memory=False))


def device_at_hand(cluster: Cluster) -> Device | None:
    """Return the planner's figures for the device at hand, or None. If a job on CPUs is asked for, they are its."""
    if (device := torch.accelerator.current_accelerator()) is None:
        return cluster.device if cluster.device.is_cpu else find_device("CPU")
    try:
        return find_device(planned_device(device))
    except ConfigError:
        return None


def peaks_of(plan: Plan) -> dict[str, int]:
    """Return the peak of each phase in bytes, without the runtime's. The first forward has no optimizer's state yet."""

    def total(phase: str, *left_out: str) -> int:
        held = plan.memory.phases[phase]
        return sum(nbytes for name, nbytes in held.items() if name not in ("framework", *left_out))

    first = max(total(phase, "optimizer state", "gradients") for phase in ("load", "forward"))
    return {"load and first forward": first, **{name: total(name) for name in ("forward", "backward", "optimizer")}}


def seconds_of(plan: Plan, step: float, exposed: float, here: Device) -> float:
    """Return a step's seconds on the planned devices: computation in the ratio of the plans, and the plan's waits."""
    own, asked = evaluate(plan.model, plan.job, dataclasses.replace(plan.cluster, device=here)).time, plan.time
    return (step - exposed) * (asked.total - asked.exposed) / (own.total - own.exposed) + asked.exposed
