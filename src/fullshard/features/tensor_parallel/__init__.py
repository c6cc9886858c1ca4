"""Tensor parallelism beneath: parameters that another axis of the mesh has split are sharded over the rest."""

from fullshard.features.tensor_parallel.kind import TensorParallel
from fullshard.features.tensor_parallel.local_shard import LocalShard, local_shard_of

__all__ = ["LocalShard", "TensorParallel", "local_shard_of"]
