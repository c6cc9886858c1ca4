"""TP-local shards: the part of a parameter that tensor parallelism assigns to a rank, before FSDP shards it.

    whole       shape (rows, columns), a DTensor over a separate axis of the mesh, for example `tp`
    local shard this rank's part of the whole, equal on all ranks along the shard axis
    interval    this rank's part of its local shard

A bucket contains local shards in the same way as other tensors. Forward uses the original DTensors. While they are
unsharded, their local parts are views of the bucket's memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard.comm.mesh import Mesh
from fullshard.core.boxes import UNCUT, Chunking, IntervalBox, boxes, in_full_tensor
from fullshard.engine.shard_spec import RaggedShard, RowSpec, ShardSpec
from fullshard.features.tensor_parallel import torch_private
from fullshard.wrap.partition import Slot


class LocalShard:
    """The part of a tensor that tensor parallelism assigns to this rank.

    The tensor is split along a mesh axis that is neither the shard nor the replicate axis. The placement is
    `Shard(dim)`, split like `torch.chunk`; `Replicate()`; or `_StridedShard` if the tensor consists of several matrices
    and each of them is split. `data_axes` are the data axes of the DTensor's mesh. If that mesh has only data axes,
    `is_beneath` is False, and the part is the complete tensor.
    """

    __slots__ = ("_data_axes", "chunking", "is_beneath", "mesh", "placement", "rank", "shape", "whole_shape")

    def __init__(
        self,
        mesh: DeviceMesh,
        placement: Placement,
        shape: Iterable[int],
        *,
        data_axes: frozenset[int] = frozenset(),
        is_beneath: bool = True,
    ) -> None:
        self.mesh, self.placement, self.whole_shape = mesh, placement, torch.Size(shape)
        self._data_axes, self.is_beneath = data_axes, is_beneath
        self.rank = mesh.get_local_rank() if is_beneath else 0
        self.chunking = _chunking(placement, mesh.size()) if is_beneath and mesh.size() > 1 else UNCUT
        self.shape = self.whole_shape
        if self.is_chunked:
            self.shape = torch.Size(self.chunking.sizes(tuple(self.whole_shape), self.rank))

    @classmethod
    def of(cls, slot: Slot) -> Self:
        """Return the local shard of a DTensor. Its mesh may have one axis besides the data axes."""
        parameter: Any = slot.parameter
        mesh, shape, data_axes = parameter.device_mesh, parameter.shape, slot.data_axes
        for axis, placement in enumerate(parameter.placements):
            if axis not in data_axes:
                beneath = mesh[mesh.mesh_dim_names[axis]] if data_axes and mesh.mesh_dim_names else mesh
                return cls(beneath, placement, shape, data_axes=data_axes)
        return cls(mesh, Replicate(), shape, data_axes=data_axes, is_beneath=False)

    @property
    def is_chunked(self) -> bool:
        """Return whether tensor parallelism splits the tensor, so that ranks along the axis hold different elements."""
        return self.chunking is not UNCUT

    @property
    def start(self) -> int:
        """Return the offset of this rank's part in the complete tensor, flattened in the order of `chunking`."""
        return self.chunking.start(tuple(self.whole_shape), self.rank) if self.is_chunked else 0

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the complete tensor, as a view if the part is one slice."""
        if not self.is_chunked:
            return whole
        dim, pieces = self.chunking.dim, self.chunking.pieces(tuple(self.whole_shape), self.rank)
        parts = [whole.narrow(dim, start, length) for start, _, length in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the complete tensor from the parts on all ranks of the axis. This is a collective along the axis."""
        if not self.is_chunked:
            return part
        return wrapped(part, self.mesh, [self.placement], self.whole_shape).full_tensor()

    def of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a gradient, with partial sums reduced except along data axes."""
        if not isinstance(gradient, DTensor):
            return gradient
        made = enumerate(gradient.placements)
        wanted = [placement if axis in self._data_axes else self.placement for axis, placement in made]
        if list(gradient.placements) != wanted:
            gradient = gradient.redistribute(placements=wanted)
        return torch_private.local_of(gradient)


def _chunking(placement: Placement, parts: int) -> Chunking:
    groups = torch_private.groups_of(placement)
    if groups is not None:
        return Chunking(groups[0], parts, groups[1])
    return Chunking(placement.dim, parts) if isinstance(placement, Shard) else UNCUT


def local_shard_of(slot: Slot) -> LocalShard | None:
    """Return this rank's local shard of a parameter, or None if the parameter is not a DTensor."""
    return LocalShard.of(slot) if isinstance(slot.parameter, DTensor) else None


def wrapped(part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """Return a DTensor of the given shape with `part` as this rank's local part."""
    dtensor: DTensor = torch_private.wrap(DTensor, part, torch_private.layout_of(mesh, placements, shape, part.dtype))
    return dtensor


class TensorParallelSpec(ShardSpec):
    """The spec of a tensor that is sharded within its tensor-parallel part. Its first arguments are `ShardSpec`'s."""

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
        """Return a flat spec for a tensor of another shape that is split over the same ranks."""
        shard = LocalShard(self._local_shard.mesh, self._local_shard.placement, shape)
        options: dict[str, Any] = {"reduction": self.reduction, "local_shard": shard}
        return TensorParallelSpec(self.mesh, shape, placement, self.name, **options)

    def boxes(self) -> Iterator[IntervalBox]:
        """Yield boxes that cover this rank's elements in the complete tensor."""
        for box in boxes(tuple(self.sharded_shape), self.interval):
            if self.is_chunked:
                yield from in_full_tensor(box, self.chunking, tuple(self.shape), self._local_shard.rank)
            else:
                yield box

    def to_sharded(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's local shard of the complete tensor, as a view if the shard is one slice."""
        return self._local_shard.cut(whole)

    def to_full(self, sharded: torch.Tensor) -> torch.Tensor:
        """Return the complete tensor from the local shards. This is a collective along the tensor-parallel axis."""
        return self._local_shard.gather(sharded)


class TensorParallelRowSpec(TensorParallelSpec, RowSpec):
    """A `TensorParallelSpec` for intervals that consist of complete rows of the local shard."""

    def __init__(self, *args: Any, local_shard: LocalShard, **options: Any) -> None:
        super().__init__(*args, local_shard=local_shard, **options)
        if local_shard.placement.is_shard(0):
            self.along_shard = torch_private.rows_of_chunks(local_shard.mesh.size())
