"""Sharding of models that tensor parallelism has already split. Sharding uses the other axes of the mesh."""

from fullshard.features.tensor_parallel.kind import TensorParallel
from fullshard.features.tensor_parallel.local_shard import LocalShard, local_shard_of

__all__ = ["LocalShard", "TensorParallel", "local_shard_of"]
