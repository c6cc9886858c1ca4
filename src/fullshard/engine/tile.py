"""A parameter that tensor parallelism has split before it is sharded: what of it this rank has to shard.

    whole       shape (rows, columns), a DTensor over an axis of its own of the mesh, `tp` say
    tile        what this rank has of that; the same along the shard axis, whose ranks hold intervals of it
    interval    what this rank has of its tile

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
from fullshard.wrap.partition import UnitPlan, names_in


class Tile:
    """This rank's part of a tensor along another axis of the mesh than those it is sharded and replicated along.

    Args:
        mesh: that axis.
        placement: `Shard(dim)`, cut as `torch.chunk` cuts, `Replicate()`, or of several matrices that are packed into
            one, each of which is cut, `_StridedShard`.
        shape: of the whole.

    Attributes:
        tiling: along which dim into how many; None if every rank of the axis has the whole.
        shape: of this rank's part.
    """

    __slots__ = ("mesh", "placement", "rank", "shape", "tiling", "whole_shape")

    def __init__(self, mesh: DeviceMesh, placement: Placement, shape: Iterable[int]) -> None:
        self.mesh, self.placement, self.whole_shape = mesh, placement, torch.Size(shape)
        self.rank = mesh.get_local_rank()
        self.tiling = None if mesh.size() == 1 else _tiling(placement, mesh.size())
        self.shape = self.whole_shape
        if self.tiling is not None:
            self.shape = torch.Size(self.tiling.sizes(tuple(self.whole_shape), self.rank))

    @classmethod
    def of(cls, parameter: DTensor) -> Tile:
        """That of a DTensor over one axis."""
        placement: Any = parameter.placements[0]
        return cls(parameter.device_mesh, placement, parameter.shape)

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
        layout = torch_private.layout_of(self.mesh, [self.placement], self.whole_shape, tile.dtype)
        dtensor: DTensor = torch_private.wrap(DTensor, tile, layout)
        return dtensor

    def of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of what autograd has made: of a replicated parameter it may be a sum still to be made."""
        if not isinstance(gradient, DTensor):
            return gradient
        if gradient.placements != (self.placement,):
            gradient = gradient.redistribute(placements=[self.placement])
        return torch_private.local_of(gradient)


def _tiling(placement: Placement, parts: int) -> Tiling | None:
    groups = torch_private.groups_of(placement)
    if groups is not None:
        return Tiling(groups[0], parts, groups[1])
    return Tiling(placement.dim, parts) if isinstance(placement, Shard) else None


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
            "modules split over mesh['tp'], and fully_shard(..., mesh=mesh['dp'])",
        )


def _problem(parameter: DTensor, mesh: Mesh) -> str:
    placements = parameter.placements
    if len(placements) != 1:
        return f"over {parameter.device_mesh}: of one axis beside those that it is sharded over was expected"
    groups = torch_private.groups_of(placements[0])
    if groups is None and type(placements[0]) not in (Shard, Replicate):
        return f"placed as {placements[0]}: expected Shard or Replicate"
    if groups is not None and parameter.shape[groups[0]] % (groups[1] * parameter.device_mesh.size()):
        return f"of shape {tuple(parameter.shape)} placed as {placements[0]}, which does not cut it evenly"
    try:
        mesh.joined(parameter.device_mesh)
    except RuntimeError as error:
        return f"over {parameter.device_mesh}, which is no other axis of what it is to be sharded over ({error})"
    return ""
