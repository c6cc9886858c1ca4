"""Accelerate's names that fullshard refuses, with reasons, and the names that it takes from Accelerate unchanged."""

from importlib import import_module
from typing import Any

from fullshard.config.accelerate import ONLY_TORCHAO

ONE_ENGINE = "fullshard has only one engine; SHARD_OPTIMIZER is ZeRO-1, SHARD_GRAD_OPTIMIZER ZeRO-2, FULL_SHARD ZeRO-3"
_PIPELINES = "pipelines are not configured here; torch's schedules run around sharded stages"

ARGUMENTS = {
    "deepspeed_plugin": ONE_ENGINE,
    "deepspeed_plugins": ONE_ENGINE,
    "megatron_lm_plugin": ONE_ENGINE,
    "torch_tp_plugin": "use parallelism_config=ParallelismConfig(tp_size=...)",
}
"""Refused arguments of the Accelerator, in the order of its signature, with the reasons."""

METHODS = {
    "pipeline_parallel_rank": _PIPELINES,
    "lomo_backward": "set training.step_in_backward in the launcher's configuration, for torch's own optimizers",
}
"""Refused methods and properties of the Accelerator, with the reasons."""

HANDLERS = dict.fromkeys(("FP8RecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs"), ONLY_TORCHAO)
"""Refused kinds of `kwargs_handlers`, with the reasons."""

NAMES = {
    "DeepSpeedPlugin": ONE_ENGINE,
    "prepare_pippy": _PIPELINES,
    "DDPCommunicationHookType": "gradients are not reduced by DDP; precision.reduce_as rounds what is sent",
}
"""Refused names that can be imported from `accelerate`, with the reasons."""

ACCELERATES_OWN = (
    "AutocastKwargs", "DataLoaderConfiguration", "DistributedDataParallelKwargs", "DistributedType",
    "GradScalerKwargs", "GradientAccumulationPlugin", "InitProcessGroupKwargs", "ProfileKwargs",
    "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model",
    "find_executable_batch_size", "infer_auto_device_map", "init_empty_weights", "init_on_device", "is_rich_available",
    "load_checkpoint_and_dispatch", "load_checkpoint_in_model", "synchronize_rng_states",
)  # fmt: skip
"""Names that work unchanged: options, tools unrelated to training, and functions that read Accelerate's state."""


def from_accelerate(name: str) -> Any:
    """Return a name of the `accelerate` package that fullshard uses unchanged."""
    if name not in ACCELERATES_OWN:
        reason = f" ({NAMES[name]})" if name in NAMES else ""
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}{reason}")
    return getattr(import_module("accelerate"), name, None) or getattr(import_module("accelerate.utils"), name)
