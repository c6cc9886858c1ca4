"""A parameter that tensor parallelism has split before it is sharded: the part of it that this rank has to shard.

    whole       shape (rows, columns), a DTensor over an axis of its own of the mesh, `tp` say
    tile        this rank's part of that; the same along the shard axis, whose ranks hold intervals of it
    interval    this rank's part of its tile

A bucket holds tiles as it holds any tensor: forward computes with the same DTensors as before, whose local part is
memory of the bucket while they are unsharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import WrapError
from fullshard.core.tiling import Tiling
from fullshard.wrap.extended import wrapped_by
from fullshard.wrap.partition import Slot, UnitPlan, names_in


class Tile:
    """A rank's part of a tensor along another axis of the mesh than those it is sharded and replicated along.

    Args:
        mesh: the axis.
        placement: `Shard(dim)`, cut as `torch.chunk` cuts, `Replicate()`, or, for several matrices that are packed into
            one, each of which is cut, `_StridedShard`.
        shape: shape of the whole.
        data_axes: the axes for data of the mesh that forward computes over, if it has any.
        is_beneath: whether such an axis exists. If not, the whole tensor is to be sharded; `mesh` is the one for data.

    Attributes:
        tiling: the dim of the cut and the number of parts; None if every rank of the axis has the whole.
        shape: shape of this rank's part.
    """

    __slots__ = ("_data_axes", "is_beneath", "mesh", "placement", "rank", "shape", "tiling", "whole_shape")

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
        self.tiling = _tiling(placement, mesh.size()) if is_beneath and mesh.size() > 1 else None
        self.shape = self.whole_shape
        if self.tiling is not None:
            self.shape = torch.Size(self.tiling.sizes(tuple(self.whole_shape), self.rank))

    @classmethod
    def of(cls, parameter: DTensor, data_axes: frozenset[int]) -> Tile:
        """Return the tile of a DTensor over one axis, beside those for data."""
        mesh, shape = parameter.device_mesh, parameter.shape
        for axis, placement in enumerate(parameter.placements):
            if axis not in data_axes:
                beneath = mesh[mesh.mesh_dim_names[axis]] if data_axes and mesh.mesh_dim_names else mesh
                return cls(beneath, placement, shape, data_axes=data_axes)
        return cls(mesh, Replicate(), shape, data_axes=data_axes, is_beneath=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tile) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return self.mesh, self.placement, self.whole_shape

    @property
    def start(self) -> int:
        """Return where this rank's part begins in the whole, flattened as `tiling` says."""
        return 0 if self.tiling is None else self.tiling.start(tuple(self.whole_shape), self.rank)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, a view of `whole` if it is in one piece."""
        if self.tiling is None:
            return whole
        dim, pieces = self.tiling.dim, self.tiling.pieces(tuple(self.whole_shape), self.rank)
        parts = [whole.narrow(dim, start, length) for start, _, length in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gather(self, tile: torch.Tensor) -> torch.Tensor:
        """Return the whole, of which each rank of the axis gives its part. A collective over it."""
        if self.tiling is None:
            return tile
        return _wrapped(tile, self.mesh, [self.placement], self.whole_shape).full_tensor()

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


def _tiling(placement: Placement, parts: int) -> Tiling | None:
    groups = torch_private.groups_of(placement)
    if groups is not None:
        return Tiling(groups[0], parts, groups[1])
    return Tiling(placement.dim, parts) if isinstance(placement, Shard) else None


def note_data_axes(plan: UnitPlan, mesh: DeviceMesh, dims: Any) -> None:
    """Take DTensor parameters over all axes of `mesh` for replicated along those that `dims` names.

    Forward sees them that way, whichever of these axes they are sharded along: these are no axes of tensor parallelism.
    """
    names = list(mesh.mesh_dim_names or ())
    for slot in plan.slots:
        if isinstance(slot.parameter, DTensor) and slot.parameter.device_mesh == mesh:
            slot.data_axes = frozenset(map(names.index, (*dims.replicate_names, *dims.shard_names)))


def tile_of(slot: Slot) -> Tile | None:
    """Return the tile that this rank has; None if no tensor parallelism has split the parameter."""
    parameter: torch.Tensor = slot.parameter
    return Tile.of(parameter, slot.data_axes) if isinstance(parameter, DTensor) else None


def wrapped_as(parameter: torch.Tensor, plain: torch.Tensor) -> Any:
    """Return `plain`, or, if `parameter` is a DTensor, one like it with `plain` as its local part."""
    if not isinstance(parameter, DTensor):
        return plain
    return _wrapped(plain, parameter.device_mesh, parameter.placements, parameter.shape)


def _wrapped(tile: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    dtensor: DTensor = torch_private.wrap(DTensor, tile, torch_private.layout_of(mesh, placements, shape, tile.dtype))
    return dtensor


def plain_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this rank has to shard, without autograd: its tile, or the whole parameter."""
    return torch_private.local_of(parameter) if isinstance(parameter, DTensor) else wrapped_by(parameter).detach()


def set_plain(parameter: torch.Tensor, plain: torch.Tensor) -> None:
    """Have a parameter compute with other memory, maybe of another dtype. It stays the same object."""
    if isinstance(parameter, DTensor):
        torch_private.set_local(parameter, wrapped_as(parameter, plain))
        return
    wrapped = wrapped_by(parameter)
    wrapped.data = plain
    if parameter is not wrapped and parameter.dtype != plain.dtype:
        parameter.data = parameter.detach().to(plain.dtype)  # for its dtype alone, which autograd uses


def check_tiles(plans: Sequence[UnitPlan], roots: Sequence[nn.Module], mesh: Mesh) -> None:
    """Check that each DTensor is over another axis of the mesh than parameters are sharded over.

    Raises:
        WrapError: one over the same ranks, over several axes, or with a placement that is neither `Shard` nor
            `Replicate`; by name.
    """
    # Only torch's own class: parameters that are a unit's already are found elsewhere.
    dtensor: Any = DTensor
    tiled = [slot for plan in plans for slot in plan.slots if type(slot.parameter) is dtensor]
    wrong = {id(slot.parameter): problem for slot in tiled if (problem := _problem(slot, mesh))}
    if wrong:
        raise WrapError(
            f"{names_in(roots, wrong)}: a DTensor {next(iter(wrong.values()))}",
            hint="tensor parallelism needs one mesh for both: init_device_mesh(..., mesh_dim_names=('dp', 'tp')), "
            "modules split over mesh['tp'], and fully_shard(..., mesh=mesh['dp']); of DTensors over all axes say with "
            "dp_mesh_dims which of them are for data",
        )


def _problem(slot: Slot, mesh: Mesh) -> str:
    parameter: Any = slot.parameter
    along_data = [parameter.placements[axis] for axis in sorted(slot.data_axes)]
    if any(not placement.is_replicate() for placement in along_data):
        return f"placed as {along_data} along what it is to be sharded over. Expected Replicate"
    if parameter.device_mesh.ndim - len(slot.data_axes) > 1:
        return f"over {parameter.device_mesh}: of one axis beside those that it is sharded over was expected"
    tile = Tile.of(parameter, slot.data_axes)
    if not tile.is_beneath:
        return ""
    groups = torch_private.groups_of(tile.placement)
    if groups is None and type(tile.placement) not in (Shard, Replicate):
        return f"placed as {tile.placement}: expected Shard or Replicate"
    if groups is not None and parameter.shape[groups[0]] % (groups[1] * tile.mesh.size()):
        return f"of shape {tuple(parameter.shape)} placed as {tile.placement}, which does not cut it evenly"
    try:
        mesh.joined(tile.mesh)
    except RuntimeError as error:
        return f"over {tile.mesh}, which is no other axis of what it is to be sharded over ({error})"
    return ""
