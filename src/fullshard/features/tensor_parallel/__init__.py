"""Sharding on top of tensor parallelism: parameters split along one mesh axis are sharded over the others."""

from fullshard.features.tensor_parallel.kind import TensorParallel
from fullshard.features.tensor_parallel.local_shard import LocalShard, local_shard_of

__all__ = ["LocalShard", "TensorParallel", "local_shard_of"]
