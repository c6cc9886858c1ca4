"""The shard specs of parameters that tensor parallelism has split: one more axis than those of the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fullshard.comm.mesh import Mesh
from fullshard.core.boxes import IntervalBox, boxes, in_whole
from fullshard.engine.shard_spec import RaggedShard, RowSpec, ShardSpec
from fullshard.features.tensor_parallel import torch_private
from fullshard.features.tensor_parallel.local_shard import LocalShard


class TensorParallelSpec(ShardSpec):
    """The spec of a tensor of which this rank shards its local shard; other arguments are those of `ShardSpec`."""

    def __init__(self, mesh: Mesh, shape: Sequence[int], *args: Any, local_shard: LocalShard, **options: Any) -> None:
        self._local_shard = shard = local_shard
        self.beside, self.outer_group = shard.placement, shard.mesh.get_group()
        self.chunking, self.start = shard.chunking, shard.start
        self.note = f"tensor parallel over {shard.mesh.size()}"
        super().__init__(mesh, shape, *args, **options)
        self.device_mesh = mesh.joined(shard.mesh)

    @property
    def sharded_shape(self) -> torch.Size:
        """Return the shape of the local shard."""
        return self._local_shard.shape

    def moved(self, shape: Sequence[int], placement: RaggedShard) -> ShardSpec:
        """Return the spec of a tensor of another shape on the same ranks, flat."""
        shard = LocalShard(self._local_shard.mesh, self._local_shard.placement, shape)
        options: dict[str, Any] = {"reduction": self.reduction, "local_shard": shard}
        return TensorParallelSpec(self.mesh, shape, placement, self.name, **options)

    def boxes(self) -> Iterator[IntervalBox]:
        """Yield this rank's elements as boxes of the whole."""
        for box in boxes(tuple(self.sharded_shape), self.interval):
            if self.is_chunked:
                yield from in_whole(box, self.chunking, tuple(self.shape), self._local_shard.rank)
            else:
                yield box

    def to_sharded(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the local shard, a view of `whole` if it is in one piece."""
        return self._local_shard.cut(whole)

    def to_whole(self, sharded: torch.Tensor) -> torch.Tensor:
        """Return the whole, of which each rank of the axis gives its local shard. A collective over it."""
        return self._local_shard.gather(sharded)


class TensorParallelRowSpec(TensorParallelSpec, RowSpec):
    """The same for a tensor whose intervals are whole rows of the local shard."""

    def __init__(self, *args: Any, local_shard: LocalShard, **options: Any) -> None:
        super().__init__(*args, local_shard=local_shard, **options)
        if local_shard.placement.is_shard(0):
            self.along_shard = torch_private.rows_of_chunks(local_shard.mesh.size())
