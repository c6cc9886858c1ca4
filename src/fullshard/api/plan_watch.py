"""Comparison of one step of an Accelerator's models with the plan, for the setting `training.check_plan`."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING

from fullshard.core.errors import ConfigError

if TYPE_CHECKING:
    from fullshard.api.accelerator import Accelerator, Listener


def watch_plan(accelerator: Accelerator) -> Listener | None:
    """Return a listener that compares the models of an Accelerator with the plan for its configuration.

    Return None if the configuration does not request a comparison.

    Raises:
        ConfigError: the check is requested, but the planner does not support such a job.
    """
    config = accelerator._config
    if not config.training.check_plan:
        return None
    if accelerator._tensor_parallel_size > 1:
        raise ConfigError("check_plan does not support tensor parallelism", hint="remove check_plan")
    from fullshard.api.plan_check import PlanWatch  # the planner is not imported where nothing is planned
    from fullshard.plan.job import Job

    # How sequences are divided changes neither events nor what is compared, and their length is unknown here.
    job = Job.from_run(config, accumulation=accelerator._micro_batches_per_step, cp=1, sp=1)
    watch = PlanWatch(job, accelerator._say)
    atexit.register(watch.close)
    return watch.watch
