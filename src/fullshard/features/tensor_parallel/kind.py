"""The kind of parameters that are DTensors because of tensor parallelism. Each rank shards its local part of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.comm.mesh import Mesh
from fullshard.core.errors import WrapError
from fullshard.engine.kinds import DataAxes, ParameterKind
from fullshard.engine.shard_spec import Name, RaggedShard, ReductionSettings, ShardSpec
from fullshard.features.tensor_parallel import torch_private
from fullshard.features.tensor_parallel.local_shard import (
    LocalShard,
    TensorParallelRowSpec,
    TensorParallelSpec,
    wrapped,
)
from fullshard.wrap.partition import Slot, names_in


class TensorParallel(ParameterKind):
    """The kind of parameters that are DTensors. They share buckets with plain parameters."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is a DTensor."""
        return isinstance(tensor, DTensor)

    def why_not(self, parameter: Any) -> str:
        """Return why the local part of a parameter cannot be sharded, or an empty string if it can."""
        return super().why_not(torch_private.local_of(parameter))

    def check(self, slots: Sequence[Slot], roots: Sequence[nn.Module], mesh: Mesh, data: DataAxes | None) -> None:
        """Raise an error if a DTensor is already split along the axes to shard over, or along a data axis in `data`."""
        wrong: dict[int, str] = {}
        for slot in slots:
            parameter: Any = slot.parameter
            if data is not None and parameter.device_mesh == data[0]:
                slot.data_axes = data[1]
            # Check only torch's own class; parameters of existing units are checked elsewhere.
            if type(parameter) is DTensor and (problem := _problem(slot, mesh)):
                wrong[id(parameter)] = problem
        if wrong:
            raise WrapError(
                f"{names_in(roots, wrong)}: the parameter is a DTensor {next(iter(wrong.values()))}",
                hint=(
                    "use one mesh for tensor parallelism and sharding: init_device_mesh(..., mesh_dim_names=('dp', "
                    "'tp')), split modules over mesh['tp'], and call fully_shard(..., mesh=mesh['dp']); for DTensors "
                    "over all axes, use dp_mesh_dims to name the data axes"
                ),
            )

    def why_no_rows(self, slot: Slot) -> str:
        """Return the reason why a parameter cannot be split between rows, or an empty string if it can."""
        shard = LocalShard.of(slot)
        if not shard.is_beneath or torch_private.groups_of(shard.placement) is None:
            return ""
        return (
            f"tensor parallelism has placed its packed matrices {tuple(shard.whole_shape)} as {shard.placement}, and "
            "torch has no placement for the rows of one rank"
        )

    def plain(self, parameter: Any) -> torch.Tensor:
        """Return this rank's local part of a DTensor."""
        return torch_private.local_of(parameter)

    def set_plain(self, parameter: Any, plain: torch.Tensor) -> None:
        """Make a DTensor use `plain` as its local part."""
        # `.data` has a separate version counter. With a view, each gather would invalidate tensors saved for backward.
        torch_private.set_local(parameter, self.like(parameter, plain.data))

    def like(self, parameter: Any, plain: torch.Tensor) -> DTensor:
        """Return a DTensor like `parameter` with `plain` as its local part."""
        return wrapped(plain, parameter.device_mesh, parameter.placements, parameter.shape)

    def spec(
        self, slot: Slot, mesh: Mesh, shape: torch.Size, placement: RaggedShard, reduction: ReductionSettings
    ) -> ShardSpec:
        """Return the spec that adds sharding to a tensor-parallel split, or a plain spec if nothing is split."""
        shard = LocalShard.of(slot)
        if not shard.is_beneath:
            return super().spec(slot, mesh, shape, placement, reduction)
        spec_type = TensorParallelRowSpec if slot.by_rows else TensorParallelSpec
        return spec_type(mesh, shard.whole_shape, placement, Name(), local_shard=shard, reduction=reduction)

    def from_autograd(self, slot: Slot) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that redistributes a gradient as the parameter is placed, and returns its local part."""
        return LocalShard.of(slot).of_gradient


def _problem(slot: Slot, mesh: Mesh) -> str:
    parameter: Any = slot.parameter
    along_data = [parameter.placements[axis] for axis in sorted(slot.data_axes)]
    if any(not placement.is_replicate() for placement in along_data):
        return f"placed as {along_data} along the axes to shard over, expected Replicate"
    if parameter.device_mesh.ndim - len(slot.data_axes) > 1:
        return f"over {parameter.device_mesh}, expected one axis in addition to those to shard over"
    shard = LocalShard.of(slot)
    if not shard.is_beneath:
        return ""
    groups = torch_private.groups_of(shard.placement)
    if groups is None and type(shard.placement) not in (Shard, Replicate):
        return f"placed as {shard.placement}, expected Shard or Replicate"
    if groups is not None and parameter.shape[groups[0]] % (groups[1] * shard.mesh.size()):
        return f"of shape {tuple(parameter.shape)} placed as {shard.placement}, which does not split it evenly"
    try:
        mesh.joined(shard.mesh)
    except RuntimeError as error:
        return f"over {shard.mesh}, which is not another axis of the mesh to shard over ({error})"
    return ""
