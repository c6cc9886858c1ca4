"""Kinds of parameters, and their buckets: what the engine must find out about a parameter before sharding it.

A feature subclasses `ParameterKind` and registers an instance. The first registered kind that accepts a parameter
becomes its kind. A parameter that no kind accepts is a plain parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import WrapError
from fullshard.engine.shard_spec import Name, RaggedShard, ReductionSettings, RowSpec, ShardSpec
from fullshard.wrap.partition import Slot, UnitPlan, names_in, other_gradient_dtype

if TYPE_CHECKING:
    from fullshard.engine.bucket import Bucket


class ParameterKind:
    """Defines how parameters of one kind are sharded. This class handles plain parameters; subclasses override it.

    Attributes:
        bucket_type: the class of their buckets; None means `Bucket`.
        is_alone: whether each parameter has a separate bucket, which is split between rows.
        is_exact: whether the bytes have a special meaning, so that they are never cast or used in arithmetic.
        is_packed: whether the bucket may round the values that it sends.
        why_no_cast: why sharded parameters cannot be cast to another dtype; empty if they can.
    """

    bucket_type: ClassVar[type[Bucket] | None] = None
    is_alone: ClassVar[bool] = False
    is_exact: ClassVar[bool] = False
    is_packed: ClassVar[bool] = True
    why_no_cast: ClassVar[str] = ""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a parameter or buffer is of this kind."""
        return True

    def form(self, parameter: torch.Tensor) -> str:
        """Return the name of the storage form (`core.forms`) of a parameter, or "" if it is stored as numbers."""
        return ""

    # -- before parameters are sharded --------------------------------------------------------------------------

    def prepare(self, model: nn.Module, *, is_read_later: bool) -> None:
        """Turn all tensors that must be sharded into parameters, before a model is divided into units.

        `is_read_later` means that tensors on the meta device get their values from files, each rank reading its part.
        """

    def why_not(self, parameter: torch.Tensor) -> str:
        """Return why a parameter cannot be sharded, or "" if it can."""
        if not torch_private.has_own_dispatch(type(parameter)):
            return ""
        return "wraps other tensors, and forward would keep using these whatever the optimizer does"

    def check(self, slots: Sequence[Slot], roots: Sequence[nn.Module], mesh: Mesh, data: DataAxes | None) -> None:
        """Check parameters of this kind against the mesh over which they will be sharded.

        `roots` are the modules that contain them. `data` is a larger mesh with its data axes, if the script names them.
        """

    def why_no_rows(self, slot: Slot) -> str:
        """Return why a parameter cannot be cut between rows (`Shard(0)`), or "" if it can."""
        return ""

    def place(self, module: nn.Module, device: torch.device) -> None:
        """Move tensors that belong to the parameters of a module, but are not parameters, to the device."""

    # -- a parameter's memory -----------------------------------------------------------------------------------

    def plain(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor of a parameter that this rank shards, without autograd."""
        return parameter.detach()

    def set_plain(self, parameter: torch.Tensor, plain: torch.Tensor) -> None:
        """Give a parameter new memory, possibly of another dtype. The object stays the same."""
        parameter.data = plain

    def like(self, parameter: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same type as `parameter` that contains `plain`."""
        return plain

    def tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the plain tensors that a parameter consists of."""
        return [self.plain(parameter)]

    def moved(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """Move a parameter to another device and return it.

        The object stays the same unless torch cannot move it in place, as with some plug-in devices.
        """
        plain = self.plain(parameter)
        data = plain.to(device)
        if torch_private.may_hold(plain, data):
            self.set_plain(parameter, data)
            return parameter
        like = self.like(parameter, data)
        if like is not data:
            return nn.Parameter(like, requires_grad=parameter.requires_grad)
        moved: nn.Parameter = torch_private.made_as(type(parameter), data, requires_grad=parameter.requires_grad)
        vars(moved).update(vars(parameter))
        return moved

    def outline(self, parameter: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return a parameter without memory, from which a unit can make its buckets when it leaves the meta device."""
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad)

    def stand_in(self, parameter: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
        """Copy this rank's part of a parameter that shares its unit with parameters on the meta device."""
        own = self.plain(parameter).reshape(-1)[spec.interval.start : spec.interval.stop]
        return own.to(spec.mesh.device, copy=True)

    # -- while it is sharded ------------------------------------------------------------------------------------

    def spec(
        self, slot: Slot, mesh: Mesh, shape: torch.Size, placement: RaggedShard, reduction: ReductionSettings
    ) -> ShardSpec:
        """Return the spec, still without a name, of a parameter. This rank shards a tensor of `shape`."""
        return (RowSpec if slot.by_rows else ShardSpec)(mesh, shape, placement, Name(), reduction=reduction)

    def from_autograd(self, slot: Slot) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that converts autograd's gradient to the gradient of `plain`, or None if they are equal."""
        return None


DataAxes = tuple[DeviceMesh, frozenset[int]]
_PLAIN = ParameterKind()
_registered: list[ParameterKind] = []


def register_kinds(*kinds: ParameterKind, first: bool = False) -> None:
    """Register kinds for parameters sharded from now on, after the existing kinds, or before them if `first`."""
    place = 0 if first else len(_registered)
    _registered[place:place] = kinds


def kind_of(tensor: torch.Tensor, *, beneath: ParameterKind | None = None) -> ParameterKind:
    """Return the kind that accepts a parameter or buffer. Skip the kind `beneath`, if there is one."""
    return next((kind for kind in _registered if kind is not beneath and kind.takes(tensor)), _PLAIN)


def prepare(model: nn.Module, *, is_read_later: bool = False) -> None:
    """Let each kind prepare a model, as described in `ParameterKind.prepare`."""
    for kind in _registered:
        kind.prepare(model, is_read_later=is_read_later)


def place(module: nn.Module, device: torch.device) -> None:
    """Let each kind move its tensors in a module to the device, as described in `ParameterKind.place`."""
    for kind in _registered:
        kind.place(module, device)


def check_kinds(
    plans: Sequence[UnitPlan], roots: Sequence[nn.Module], mesh: Mesh, data: DataAxes | None = None
) -> None:
    """Let each kind check the parameters that it accepts against the mesh, as in `ParameterKind.check`."""
    slots = [slot for plan in plans for slot in plan.slots]
    for kind in _registered:
        kind.check([slot for slot in slots if kind_of(slot.parameter) is kind], roots, mesh, data)


def check_types(plans: Sequence[UnitPlan], roots: Sequence[nn.Module]) -> None:
    """Check that every parameter owns its memory: a unit hands it to the bucket and later takes it back."""
    slots = [slot for plan in plans for slot in plan.slots]
    for slot in slots:
        wanted = getattr(slot.parameter, "grad_dtype", None)  # since torch 2.10
        if wanted not in (None, slot.parameter.dtype):
            raise other_gradient_dtype(names_in(roots, {id(slot.parameter)}), slot.parameter.dtype, wanted)
    parameters: list[Any] = [slot.parameter for slot in slots]
    wrong = {id(parameter): parameter for parameter in parameters if kind_of(parameter).why_not(parameter)}
    if wrong:
        types = sorted({type(parameter).__name__ for parameter in wrong.values()})
        first = next(iter(wrong.values()))
        raise WrapError(
            f"{names_in(roots, wrong)}: a parameter of type {', '.join(types)} {kind_of(first).why_not(first)}",
            hint="convert the model after training, or exclude frozen parameters with ignored_params",
        )


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a wrapper class wraps, keyed by the attribute names in that class."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
