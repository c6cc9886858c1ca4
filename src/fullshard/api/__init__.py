"""The names that users import: those of Accelerate, and one function for scripts that have their own training loop."""

from fullshard.api.accelerator import Accelerator
from fullshard.api.accelerator_state import PartialState
from fullshard.api.data import ShardedDataLoader, skip_first_batches
from fullshard.api.entry import accelerate
from fullshard.api.options import ProjectConfiguration
from fullshard.api.plugin import FullyShardedDataParallelPlugin
from fullshard.api.saving import register_format
from fullshard.checkpoint.torch_format import with_torch_format

__all__ = [
    "Accelerator",
    "FullyShardedDataParallelPlugin",
    "PartialState",
    "ProjectConfiguration",
    "ShardedDataLoader",
    "accelerate",
    "skip_first_batches",
]


register_format("dcp", with_torch_format)
