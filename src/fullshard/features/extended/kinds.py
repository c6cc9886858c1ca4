"""The two kinds of parameters that define their own all-gather: extended and composed parameters."""

import itertools
import math
import operator

import torch
from torch import nn

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import LifecycleError, WrapError
from fullshard.engine.extension import Extension
from fullshard.engine.kinds import ParameterKind, inner_tensors
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.shard_spec import Name, RaggedShard, ReductionSettings, ShardSpec
from fullshard.features.extended.bucket import ExtendedBucket
from fullshard.features.extended.composed import ComposedBucket, ComposedSpec
from fullshard.features.extended.protocol import (
    PRE,
    Composition,
    cannot_be_sharded,
    is_composed,
    is_extended,
    wrapped_by,
)
from fullshard.wrap.partition import Slot


class Extended(ParameterKind):
    """The kind of parameters that define their own all-gather and wrap one plain tensor of the same shape and dtype."""

    bucket_type = ExtendedBucket
    is_alone = True
    is_packed = False
    why_no_cast = "that define their own all-gather"

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor defines its own all-gather."""
        return is_extended(tensor)

    def why_not(self, parameter: torch.Tensor) -> str:
        """Return the reason why a parameter cannot be sharded, or an empty string if it can."""
        reason = cannot_be_sharded(parameter)
        return "" if reason is None else f"defines its own all-gather with `fsdp_pre_all_gather`, but {reason}"

    def plain(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the parameter wraps."""
        return wrapped_by(parameter).detach()

    def set_plain(self, parameter: torch.Tensor, plain: torch.Tensor) -> None:
        """Make a parameter wrap the tensor `plain` instead of its current one."""
        wrapped_by(parameter).data = plain
        if parameter.dtype != plain.dtype:
            parameter.data = parameter.detach().to(plain.dtype)  # only for its dtype, which autograd uses


class Composed(Extended):
    """The kind of extended parameters that wrap several tensors, or one tensor of another shape or dtype."""

    bucket_type = ComposedBucket

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor defines its own all-gather and is a composed parameter."""
        return is_composed(tensor)

    def tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return all tensors that the parameter wraps."""
        return list(inner_tensors(parameter).values())

    def moved(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """Return a copy of a parameter on another device."""
        plain = parameter.detach()
        data = plain.to(device)
        if type(data) is not type(plain):
            raise WrapError(
                f"a parameter of type {type(plain).__name__} becomes a {type(data).__name__} when moved to {device}, "
                "because its class does not define a copy to another device",
                hint="implement aten._to_copy in its __torch_dispatch__, or create the parameter on the device",
            )
        return nn.Parameter(data, requires_grad=parameter.requires_grad)

    def outline(self, parameter: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return a parameter on the meta device that describes the given one and has the same class."""
        return nn.Parameter(parameter.detach(), requires_grad)

    def stand_in(self, parameter: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
        """Raise an error, because a unit on the meta device is filled from plain tensors when it is made real."""
        raise WrapError(
            f"a parameter of type {type(parameter).__name__} and shape {tuple(parameter.shape)} has values, but other "
            "parameters of its unit are on the meta device",
            hint="materialize all parameters of the unit before fully_shard, or none of them",
        )

    def spec(
        self, slot: Slot, mesh: Mesh, shape: torch.Size, placement: RaggedShard, reduction: ReductionSettings
    ) -> ShardSpec:
        """Return a spec that shards a composed parameter by rows. The caller sets its name later."""
        by_rows = RaggedShard(placement.shard_numel, placement.offset, math.prod(shape[1:]))
        composition = Composition.of(slot.parameter)
        return ComposedSpec(mesh, shape, by_rows, Name(), composition=composition, reduction=reduction)


class LateProtocol(Extension):
    """Detects `p._local_tensor.fsdp_pre_all_gather = ...` after sharding, when only torch's engine would use it."""

    _sharded: tuple[ShardedParameter, ...] = ()

    def materialized(self) -> None:
        """Remember the sharded parameters that do not define their own all-gather, to check them in each forward."""
        buckets = [bucket for unit in self.model.units if unit.stand_ins is None for bucket in unit.buckets]
        plain = [bucket for bucket in buckets if not isinstance(bucket, ExtendedBucket)]
        self._sharded = tuple(parameter for bucket in plain for parameter in bucket.sharded_parameters)
        self._attributes = list(map(vars, self._sharded))

    def forward_begins(self) -> None:
        """Raise an error if a parameter was given `fsdp_pre_all_gather` after sharding, when it has no effect."""
        of_locals = map(vars, map(torch_private.local_of, self._sharded))  # runs in every step, so avoid a Python loop
        is_told = map(operator.contains, itertools.chain(self._attributes, of_locals), itertools.repeat(PRE))
        for parameter in itertools.compress(self._sharded * 2, is_told):
            raise LifecycleError(
                f"rank {parameter.mesh.rank}: `{PRE}` was added to {parameter.name} after sharding, but the parameter "
                "is gathered with the others of its unit, so the method would never be called",
                hint="before fully_shard, replace the parameter with one whose class defines the method",
            )
