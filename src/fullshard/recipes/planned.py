"""The planner's figures for a run before it begins; the run's measurements stand beside them later."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.api.planning import plan_model
from fullshard.api.plugin import configured_policy
from fullshard.core.errors import ConfigError, WrapError
from fullshard.core.sizes import format_nbytes
from fullshard.launch import RankEnvironment, cuda
from fullshard.launch.device import name_of
from fullshard.plan.evaluate import Plan
from fullshard.plan.hardware import find_device
from fullshard.plan.job import Job
from fullshard.plan.report import as_dict
from fullshard.recipes.arguments import TrainArguments

_DECIDED = ("method", "base_dtype")
"""Fields of a job that the model shows."""
_SAME_MEMORY = 0.15
"""The fraction of a device's memory that its driver may keep to itself."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A plan of a run that begins here and now.

    Attributes:
        plan: the planner's.
        before: bytes this process had before there was a model, on a CPU, where what is measured is all of a process.
    """

    plan: Plan
    before: int

    @property
    def nbytes(self) -> int:
        """The upper limit of `memory_nbytes`."""
        return self.plan.memory.needed + self.before

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the model FLOP utilisation at a speed; None on a CPU, whose peak is unmeasured."""
        time = self.plan.time
        return None if self.plan.cluster.device.is_cpu else time.mfu * tokens_per_second / time.tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: the planner's, and the units."""
        units = [
            {
                "name": unit.name,
                "buckets": [
                    {
                        "dtype": bucket.dtype,
                        "compute_dtype": bucket.compute_dtype,
                        "trainable": bucket.trainable,
                        "elements": bucket.layout.numel,
                        "per_rank": bucket.layout.shard_numel,
                        "bytes": bucket.full_nbytes,
                    }
                    for bucket in unit.buckets
                ],
            }
            for unit in self.plan.setting.layout.units
        ]
        return as_dict(self.plan) | {"process": self.before, "units": units}


def plan_run(
    model: nn.Module,
    arguments: TrainArguments,
    environment: RankEnvironment,
    device: torch.device,
    say: Callable[[str], None],
    *,
    before: int,
) -> RunPlan | None:
    """Return the plan of a run on its own hardware; None if the planner knows not enough, which is said.

    Args:
        model: not sharded yet.
        arguments: of the run.
        environment: says how many ranks there are, on how many hosts.
        device: of this rank.
        say: takes a line for the user.
        before: bytes it uses already.
    """
    world_size = environment.world_size
    hosts = max(1, world_size // max(1, environment.local_world_size))
    policy = configured_policy(arguments.run_config().sharding)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sharding will say the same
        try:
            devices = f"{world_size}x{planned_device(device)}"
            job = Job.from_run(arguments.run_config(), **job_values(arguments, world_size))
            settings = {n: v for n, v in job.model_dump().items() if n not in _DECIDED and not n.startswith("lora_")}
            settings["optimizer"] = arguments.optimizer
            plan = plan_model(model, devices, hosts=hosts, policy=policy, **settings)
        except (ConfigError, WrapError) as error:  # no reason to stop; what sharding minds it says itself
            say(f"plan: none for this run: {str(error).splitlines()[0]}")
            return None
    return RunPlan(plan, before if plan.cluster.device.is_cpu else 0)


def job_values(arguments: TrainArguments, world_size: int) -> dict[str, Any]:
    """Return the values that a plan needs and a run's configuration does not have."""
    rows = math.ceil(arguments.batch_size / world_size)
    micro_batch = min(arguments.micro_batch_size or rows, rows)
    return {
        "loss": "eager" if arguments.loss_chunk is None else "fused",
        "loss_chunk": arguments.loss_chunk,
        "accumulation": math.ceil(rows / micro_batch),
        "micro_batch": micro_batch,
        "seq_len": arguments.seq_len,
    }


def planned_device(device: torch.device) -> str:
    """Return the planner's name for a device.

    Raises:
        ConfigError: it has none; or the device has not the memory that is planned with, as a part of a GPU has not.
    """
    if device.type == "cpu":
        return "CPU"
    if device.type != "cuda":
        raise ConfigError(f"the planner has no numbers for a device of type {device.type}")
    name, nbytes = name_of(device), cuda.memory_nbytes(device)
    row = find_device(name)
    if abs(row.memory / nbytes - 1) >= _SAME_MEMORY:
        raise ConfigError(
            f"{name} has {format_nbytes(nbytes)}, and plans for {row.name} are made with {format_nbytes(row.memory)}"
        )
    return row.name
