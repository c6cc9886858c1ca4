"""The plan of the model that a rehearsed script trains, to be read beside what is measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.api.plan_check import planned_optimizer
from fullshard.api.planning import base_dtype, model_shape, planned_device
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
from fullshard.plan.work import step_flops

_MODES: dict[Any, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Batches:
    """What a rank reads in a step: `calls` micro-batches of `sequences` sequences of `tokens` tokens."""

    calls: int
    sequences: int
    tokens: int

    @classmethod
    def of(cls, tokens: int, sequences: int, calls: int, steps: int) -> Batches:
        """Return the mean over some steps of what was read in all of them. At least one sequence was read."""
        return cls(max(1, round(calls / steps)), round(sequences / calls), round(tokens / sequences))


def engine_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return whose `fully_shard` has sharded what an optimizer trains: `fullshard`, `torch`, or None for nobody's."""
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


def device_at_hand() -> Device | None:
    """Return the planner's row of the device at hand, or None if it has none."""
    try:
        return find_device(planned_device(torch.accelerator.current_accelerator() or torch.device("cpu")))
    except ConfigError:
        return None


class Planned:
    """The plan of a job of which a step was measured, on the devices that were asked for.

    Raises:
        ConfigError: the planner does not support such a job.
    """

    def __init__(self, shape: ModelShape, settings: dict[str, Any], batches: Batches, cluster: Cluster) -> None:
        sizes = {"micro_batch": batches.sequences, "seq_len": batches.tokens, "accumulation": batches.calls}
        self.cluster = dataclasses.replace(cluster, shares_memory=False)
        self.plan: Plan = evaluate(shape, Job.of({**settings, **sizes}), self.cluster)

    @property
    def flops(self) -> float:
        """The FLOP of one rank in a step, without recomputation."""
        return step_flops(self.plan.setting.model, self.plan.job)

    @property
    def peaks(self) -> dict[str, int]:
        """The peak of each phase in bytes, without what the runtime takes. Before the first step there is no state."""

        def total(phase: str, *left_out: str) -> int:
            held = self.plan.memory.phases[phase]
            return sum(nbytes for name, nbytes in held.items() if name not in ("framework", *left_out))

        first = (total(phase, "optimizer state", "gradients") for phase in ("load", "forward"))
        return {
            "load and first forward": max(first),
            **{phase: total(phase) for phase in ("forward", "backward", "optimizer")},
        }

    def seconds(self, step: float, exposed: float, here: Device) -> float:
        """Return the seconds of a step on the devices that were asked for.

        The measured computation is scaled by the ratio of the two plans' computation. The exposed communication is the
        plan's.
        """
        own = evaluate(self.plan.model, self.plan.job, dataclasses.replace(self.cluster, device=here)).time
        asked = self.plan.time
        ratio = (asked.total - asked.exposed) / (own.total - own.exposed)
        return (step - exposed) * ratio + asked.exposed
