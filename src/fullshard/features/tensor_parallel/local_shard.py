"""TP-local shards: the part of a parameter that tensor parallelism leaves on a rank, before that is sharded.

    whole       shape (rows, columns), a DTensor over an axis of its own of the mesh, `tp` say
    local shard this rank's part of that; the same along the shard axis, whose ranks hold intervals of it
    interval    this rank's part of its local shard

A bucket holds local shards as it holds any tensor: forward computes with the same DTensors as before, whose local part
is memory of the bucket while they are unsharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard.comm.mesh import Mesh
from fullshard.core.boxes import UNCUT, Chunking, IntervalBox, boxes, in_whole
from fullshard.engine.shard_spec import RaggedShard, RowSpec, ShardSpec
from fullshard.features.tensor_parallel import torch_private
from fullshard.wrap.partition import Slot


class LocalShard:
    """A rank's part of a tensor along another axis of the mesh than those it is sharded and replicated along.

    It is placed as `Shard(dim)`, cut as `torch.chunk` cuts, `Replicate()`, or, for several matrices that are packed
    into one, each of which is cut, `_StridedShard`. `data_axes` are the axes for data of the mesh that forward computes
    over. If there is no axis beside them (`is_beneath`), the whole is to be sharded.
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
    def of(cls, slot: Slot) -> LocalShard:
        """Return the local shard of a DTensor over one axis beside those for data."""
        parameter: Any = slot.parameter
        mesh, shape, data_axes = parameter.device_mesh, parameter.shape, slot.data_axes
        for axis, placement in enumerate(parameter.placements):
            if axis not in data_axes:
                beneath = mesh[mesh.mesh_dim_names[axis]] if data_axes and mesh.mesh_dim_names else mesh
                return cls(beneath, placement, shape, data_axes=data_axes)
        return cls(mesh, Replicate(), shape, data_axes=data_axes, is_beneath=False)

    @property
    def is_chunked(self) -> bool:
        """Return whether the ranks of the axis have different elements."""
        return self.chunking is not UNCUT

    @property
    def start(self) -> int:
        """Return where this rank's part begins in the whole, flattened as `chunking` says."""
        return self.chunking.start(tuple(self.whole_shape), self.rank) if self.is_chunked else 0

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, a view of `whole` if it is in one piece."""
        if not self.is_chunked:
            return whole
        dim, pieces = self.chunking.dim, self.chunking.pieces(tuple(self.whole_shape), self.rank)
        parts = [whole.narrow(dim, start, length) for start, _, length in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole, of which each rank of the axis gives its part. A collective over it."""
        if not self.is_chunked:
            return part
        return wrapped(part, self.mesh, [self.placement], self.whole_shape).full_tensor()

    def of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a gradient that autograd has made.

        The gradient of a replicated parameter may be a sum still to be made. Along axes for data, such a sum is left to
        the reduction.
        """
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
    """Return the part that this rank has; None if no tensor parallelism has split the parameter."""
    return LocalShard.of(slot) if isinstance(slot.parameter, DTensor) else None


def wrapped(part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """Return torch's DTensor of this shape around this rank's part."""
    dtensor: DTensor = torch_private.wrap(DTensor, part, torch_private.layout_of(mesh, placements, shape, part.dtype))
    return dtensor


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
