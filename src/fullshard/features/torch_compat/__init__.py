"""Attributes and methods that torch, Transformers and PEFT expect on a module sharded with torch's `fully_shard`."""

from fullshard.features.torch_compat.library_methods import TorchCompat
from fullshard.features.torch_compat.methods import (
    TorchMethods,
    check_data_parallel,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.features.torch_compat.older_torch import DataParallelMeshDims
from fullshard.features.torch_compat.state import state_of

__all__ = [
    "DataParallelMeshDims",
    "TorchCompat",
    "TorchMethods",
    "check_data_parallel",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "state_of",
]
