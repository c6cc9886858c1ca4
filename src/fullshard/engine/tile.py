"""A parameter that tensor parallelism has split before it is sharded: what of it this rank has to shard.

    whole       shape (rows, columns), a DTensor over an axis of its own of the mesh, `tp` say
    tile        what this rank has of that; the same along the shard axis, whose ranks hold intervals of it
    interval    what this rank has of its tile

A bucket holds tiles as it holds any tensor: forward computes with the same DTensors as before, whose local part is
memory of the bucket while they are unsharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import WrapError
from fullshard.core.tiling import Tiling
from fullshard.wrap.extended import wrapped_by
from fullshard.wrap.partition import UnitPlan, names_in

_DATA_AXES: dict[DeviceMesh, tuple[DeviceMesh, frozenset[int]]] = {}
"""Of meshes with all axes of a job: the part for data, and which axes that is. See `note_data_axes`."""


class Tile:
    """This rank's part of a tensor along another axis of the mesh than those it is sharded and replicated along.

    Args:
        mesh: that axis.
        placement: `Shard(dim)`, cut as `torch.chunk` cuts, `Replicate()`, or of several matrices that are packed into
            one, each of which is cut, `_StridedShard`.
        shape: of the whole.
        around: mesh and placements that forward computes with, where they are over axes for data, too.
        is_beneath: whether there is such an axis. If not, what there is to shard is all of it, and `mesh` is that one.

    Attributes:
        tiling: along which dim into how many; None if every rank of the axis has the whole.
        shape: of this rank's part.
    """

    __slots__ = ("_around", "is_beneath", "mesh", "placement", "rank", "shape", "tiling", "whole_shape")

    def __init__(
        self,
        mesh: DeviceMesh,
        placement: Placement,
        shape: Iterable[int],
        around: tuple[DeviceMesh, Sequence[Placement]] | None = None,
        *,
        is_beneath: bool = True,
    ) -> None:
        self.mesh, self.placement, self.whole_shape = mesh, placement, torch.Size(shape)
        self._around, self.is_beneath = around or (mesh, [placement]), is_beneath
        self.rank = mesh.get_local_rank() if is_beneath else 0
        self.tiling = _tiling(placement, mesh.size()) if is_beneath and mesh.size() > 1 else None
        self.shape = self.whole_shape
        if self.tiling is not None:
            self.shape = torch.Size(self.tiling.sizes(tuple(self.whole_shape), self.rank))

    @classmethod
    def of(cls, parameter: DTensor) -> Tile:
        """That of a DTensor over one axis, beside those for data."""
        mesh, placements = parameter.device_mesh, parameter.placements
        data, around = _data_axes(mesh), (mesh, placements)
        if not data:
            return cls(mesh, placements[0], parameter.shape)
        for axis, name in enumerate(mesh.mesh_dim_names or ()):
            if axis not in data:
                return cls(mesh[name], placements[axis], parameter.shape, around)
        return cls(mesh, Replicate(), parameter.shape, around, is_beneath=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tile) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return self.mesh, self.placement, self.whole_shape

    @property
    def start(self) -> int:
        """Where this rank's part begins in the whole, flattened as `tiling` says."""
        return 0 if self.tiling is None else self.tiling.start(tuple(self.whole_shape), self.rank)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part, a view of `whole` if it is in one piece."""
        if self.tiling is None:
            return whole
        dim, pieces = self.tiling.dim, self.tiling.pieces(tuple(self.whole_shape), self.rank)
        parts = [whole.narrow(dim, start, length) for start, _, length in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gather(self, tile: torch.Tensor) -> torch.Tensor:
        """The whole, of which each rank of the axis gives its part. A collective over it."""
        if self.tiling is None:
            return tile
        whole: torch.Tensor = self.wrap(tile).full_tensor()
        return whole

    def wrap(self, tile: torch.Tensor) -> DTensor:
        """The DTensor that has this part of it on this rank."""
        mesh, placements = self._around
        layout = torch_private.layout_of(mesh, placements, self.whole_shape, tile.dtype)
        dtensor: DTensor = torch_private.wrap(DTensor, tile, layout)
        return dtensor

    def of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of what autograd has made: of a replicated parameter it may be a sum still to be made.

        Along axes for data such a sum is left to the reduction.
        """
        if not isinstance(gradient, DTensor):
            return gradient
        data = _data_axes(gradient.device_mesh)
        wanted = [made if axis in data else self.placement for axis, made in enumerate(gradient.placements)]
        if list(gradient.placements) != wanted:
            gradient = gradient.redistribute(placements=wanted)
        return torch_private.local_of(gradient)


def _tiling(placement: Placement, parts: int) -> Tiling | None:
    groups = torch_private.groups_of(placement)
    if groups is not None:
        return Tiling(groups[0], parts, groups[1])
    return Tiling(placement.dim, parts) if isinstance(placement, Shard) else None


def note_data_axes(mesh: DeviceMesh, data: DeviceMesh) -> None:
    """Parameters that are DTensors over all axes of `mesh` are to be sharded over `data`, a part of it.

    Until then they are replicated along its axes, and so forward has them: these are none of tensor parallelism.
    """
    axes = list(mesh.mesh_dim_names or ())
    _DATA_AXES[mesh] = data, frozenset(map(axes.index, data.mesh_dim_names or ()))


def _data_axes(mesh: DeviceMesh) -> frozenset[int]:
    return _DATA_AXES[mesh][1] if mesh in _DATA_AXES else frozenset()


def tile_of(parameter: torch.Tensor) -> Tile | None:
    """The tile that this rank has; None if no tensor parallelism has split the parameter."""
    return Tile.of(parameter) if isinstance(parameter, DTensor) else None


def plain_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has to shard of a parameter, without autograd: its tile, or all of it."""
    return torch_private.local_of(parameter) if isinstance(parameter, DTensor) else wrapped_by(parameter).detach()


def storage_of(parameter: torch.Tensor) -> torch.UntypedStorage:
    """The memory of what this rank computes with, of a parameter that wraps nothing but its tile."""
    return (torch_private.local_of(parameter) if isinstance(parameter, DTensor) else parameter).untyped_storage()


def set_plain(parameter: torch.Tensor, plain: torch.Tensor) -> None:
    """Have a parameter compute with other memory, maybe of another dtype. It stays the same object."""
    if isinstance(parameter, DTensor):
        torch_private.set_local(parameter, Tile.of(parameter).wrap(plain))
        return
    wrapped = wrapped_by(parameter)
    wrapped.data = plain
    if parameter is not wrapped and parameter.dtype != plain.dtype:
        parameter.data = parameter.detach().to(plain.dtype)  # for its dtype alone, by which autograd goes


def check_tiles(plans: Sequence[UnitPlan], roots: Sequence[nn.Module], mesh: Mesh) -> None:
    """See to it that what is a DTensor is one over another axis of the mesh than parameters are sharded over.

    Raises:
        WrapError: one over the same ranks, over several axes, or with a placement that is neither `Shard` nor
            `Replicate`; by name.
    """
    parameters: list[torch.Tensor] = [slot.parameter for plan in plans for slot in plan.slots]
    # Of torch's own class: that a parameter is a unit's already is found elsewhere.
    dtensors = [p for p in parameters if isinstance(p, DTensor) and type(p) is DTensor]
    wrong = {id(parameter): problem for parameter in dtensors if (problem := _problem(parameter, mesh))}
    if wrong:
        raise WrapError(
            f"{names_in(roots, wrong)}: a DTensor {next(iter(wrong.values()))}",
            hint="tensor parallelism needs one mesh for both: init_device_mesh(..., mesh_dim_names=('dp', 'tp')), "
            "modules split over mesh['tp'], and fully_shard(..., mesh=mesh['dp']); of DTensors over all axes say with "
            "dp_mesh_dims which of them are for data",
        )


def _problem(parameter: DTensor, mesh: Mesh) -> str:
    whole, data = parameter.device_mesh, _data_axes(parameter.device_mesh)
    if data and _DATA_AXES[whole][0] != mesh.device_mesh:
        return f"over {whole}, of which {_DATA_AXES[whole][0]} is for data: it is to be sharded over {mesh.device_mesh}"
    sharded = [placement for axis, placement in enumerate(parameter.placements) if axis in data]
    if any(not placement.is_replicate() for placement in sharded):
        return f"placed as {sharded} along what it is to be sharded over. Expected Replicate"
    if whole.ndim - len(data) > 1:
        return f"over {whole}: of one axis beside those that it is sharded over was expected"
    tile = Tile.of(parameter)
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
