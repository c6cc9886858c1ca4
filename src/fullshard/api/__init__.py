"""What users import: Accelerate's names, and one call for loops of one's own."""

from fullshard.api.accelerator import Accelerator
from fullshard.api.data import ShardedDataLoader, skip_first_batches
from fullshard.api.entry import accelerate
from fullshard.api.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from fullshard.api.plugin import FullyShardedDataParallelPlugin

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ProjectConfiguration",
    "ShardedDataLoader",
    "accelerate",
    "skip_first_batches",
]
