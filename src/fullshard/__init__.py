"""Fully Sharded Data Parallel training for PyTorch.

The names below are imported on first use, so `import fullshard` and `fullshard --help` do not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fullshard.core.imports import on_demand
from fullshard.core.version import __version__

if TYPE_CHECKING:
    # Names of Accelerate that are not in `__all__`. `x as x` re-exports them.
    from accelerate import AutocastKwargs as AutocastKwargs
    from accelerate import DataLoaderConfiguration as DataLoaderConfiguration
    from accelerate import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accelerate import DistributedType as DistributedType
    from accelerate import GradScalerKwargs as GradScalerKwargs
    from accelerate import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accelerate import ProfileKwargs as ProfileKwargs
    from accelerate import cpu_offload as cpu_offload
    from accelerate import cpu_offload_with_hook as cpu_offload_with_hook
    from accelerate import disk_offload as disk_offload
    from accelerate import dispatch_model as dispatch_model
    from accelerate import find_executable_batch_size as find_executable_batch_size
    from accelerate import infer_auto_device_map as infer_auto_device_map
    from accelerate import init_empty_weights as init_empty_weights
    from accelerate import init_on_device as init_on_device
    from accelerate import is_rich_available as is_rich_available
    from accelerate import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from accelerate import load_checkpoint_in_model as load_checkpoint_in_model
    from accelerate import synchronize_rng_states as synchronize_rng_states
    from accelerate.utils import GradientAccumulationPlugin as GradientAccumulationPlugin

    from fullshard import optim
    from fullshard.api import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        PartialState,
        ProjectConfiguration,
        accelerate,
        skip_first_batches,
    )
    from fullshard.api.accelerates import ParallelismConfig
    from fullshard.api.notebooks import debug_launcher, notebook_launcher
    from fullshard.api.planning import plan_model
    from fullshard.api.planning import plan_model as plan
    from fullshard.checkpoint import from_pretrained, stream_weights
    from fullshard.features import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardedParameter,
        ShardedTensor,
        UnshardHandle,
        clip_grad_norm_,
        describe,
        fully_shard,
        meta_parameters,
        no_sync,
        park,
        register_fsdp_forward_method,
        repoint,
        shard_model,
        share_comm_ctx,
        unpark,
        unsharded,
    )
    from fullshard.features.chunked_loss import use_chunked_loss
    from fullshard.features.quantized_weights.quantize import quantize
    from fullshard.features.steps_in_backward.stepper import step_in_backward
    from fullshard.launch.journal import record_events
    from fullshard.launch.preemption import should_stop
    from fullshard.optim import EMA

__all__ = [  # noqa: RUF022 -- alphabetical, capitals or not
    "Accelerator",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "EMA",
    "FSDPModule",
    "FullyShardedDataParallelPlugin",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelismConfig",
    "PartialState",
    "ProjectConfiguration",
    "ShardedParameter",
    "ShardedTensor",
    "UnshardHandle",
    "__version__",
    "accelerate",
    "clip_grad_norm_",
    "debug_launcher",
    "describe",
    "from_pretrained",
    "fully_shard",
    "meta_parameters",
    "no_sync",
    "notebook_launcher",
    "optim",
    "park",
    "plan",
    "plan_model",
    "quantize",
    "record_events",
    "register_fsdp_forward_method",
    "repoint",
    "shard_model",
    "share_comm_ctx",
    "should_stop",
    "skip_first_batches",
    "step_in_backward",
    "stream_weights",
    "unpark",
    "unsharded",
    "use_chunked_loss",
]

_ENGINE = (
    "CPUOffloadPolicy", "DataParallelMeshDims", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy",
    "ShardedParameter", "ShardedTensor", "UnshardHandle", "clip_grad_norm_", "describe", "fully_shard",
    "meta_parameters", "no_sync", "park", "register_fsdp_forward_method", "repoint", "shard_model", "share_comm_ctx",
    "unpark", "unsharded",
)  # fmt: skip
_PACKAGES = ("optim", "plan")  # of which the second can be called
_HOMES = {
    "EMA": "fullshard.optim",
    **dict.fromkeys(_ENGINE, "fullshard.features"),
    **dict.fromkeys(("from_pretrained", "stream_weights"), "fullshard.checkpoint"),
    **dict.fromkeys(("debug_launcher", "notebook_launcher"), "fullshard.api.notebooks"),
    "ParallelismConfig": "fullshard.api.accelerates",
    "plan_model": "fullshard.api.planning",
    "quantize": "fullshard.features.quantized_weights.quantize",
    "record_events": "fullshard.launch.journal",
    "should_stop": "fullshard.launch.preemption",
    "step_in_backward": "fullshard.features.steps_in_backward.stepper",
    "use_chunked_loss": "fullshard.features.chunked_loss",
}


def _otherwise(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"fullshard.{name}")
    return importlib.import_module("fullshard.api.refused").from_accelerate(name)


if not TYPE_CHECKING:
    _names = {name: _HOMES.get(name, "fullshard.api") for name in __all__ if name not in _PACKAGES}
    __getattr__, __dir__ = on_demand(__name__, _names, _otherwise)
