"""Kinds of parameters, each of which defines how parameters of that kind are checked, stored and sharded.

The first registered kind that accepts a parameter handles it. A parameter that no kind accepts is a plain parameter.
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
    """Defines how parameters of one kind are sharded. This base class does so for plain parameters."""

    bucket_type: ClassVar[type[Bucket] | None] = None  # the class of buckets for these parameters; None means `Bucket`
    is_alone: ClassVar[bool] = False  # whether each parameter has its own bucket, in which each rank owns complete rows
    # Whether the bytes have a special meaning, so that they are never cast or used in arithmetic.
    is_exact: ClassVar[bool] = False
    is_packed: ClassVar[bool] = True  # whether the bucket may send rounded values
    why_no_cast: ClassVar[str] = ""  # why sharded parameters cannot be cast to another dtype; empty if they can

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a parameter or buffer is of this kind."""
        return True

    def form(self, parameter: torch.Tensor) -> str:
        """Return the name of the storage form (`core.forms`) of a parameter, or "" if it is stored as numbers."""
        return ""

    def prepare(self, model: nn.Module, *, is_read_later: bool) -> None:
        """Turn all tensors that must be sharded into parameters, before the model is divided into units.

        If `is_read_later` is set, each rank will later read its part of the tensors on the meta device from files.
        """

    def why_not(self, parameter: torch.Tensor) -> str:
        """Return the reason why a parameter cannot be sharded, or "" if it can be."""
        if not torch_private.has_own_dispatch(type(parameter)):
            return ""
        return "wraps other tensors, which forward would keep using even after optimizer steps"

    def check(self, slots: Sequence[Slot], roots: Sequence[nn.Module], mesh: Mesh, data: DataAxes | None) -> None:
        """Raise an error if these parameters cannot be sharded over the mesh.

        `roots` are the modules that contain them. `data` is a larger mesh with its data axes, if the script names them.
        """

    def why_no_rows(self, slot: Slot) -> str:
        """Return the reason why a parameter cannot be cut by rows (`Shard(0)`), or "" if it can be."""
        return ""

    def to_device(self, module: nn.Module, device: torch.device) -> None:
        """Move tensors that belong to a module's parameters, but are not parameters themselves, to the device."""

    def plain(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor of a parameter, which is what this rank shards. It is detached from autograd."""
        return parameter.detach()

    def set_plain(self, parameter: torch.Tensor, plain: torch.Tensor) -> None:
        """Give a parameter the memory of `plain`, possibly with another dtype. The object stays the same."""
        parameter.data = plain

    def like(self, parameter: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same type as `parameter`, with the values of `plain`."""
        return plain

    def tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the plain tensors that a parameter consists of."""
        return [self.plain(parameter)]

    def moved(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """Return a parameter on another device. It is the same object unless torch cannot move it in place."""
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
        """Return a meta-device copy of a parameter, from which a unit can later make its buckets."""
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad)

    def stand_in(self, parameter: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
        """Return a copy of this rank's part of a parameter that shares a unit with parameters on the meta device."""
        own = self.plain(parameter).reshape(-1)[spec.interval.start : spec.interval.stop]
        return own.to(spec.mesh.device, copy=True)

    def spec(
        self, slot: Slot, mesh: Mesh, shape: torch.Size, placement: RaggedShard, reduction: ReductionSettings
    ) -> ShardSpec:
        """Return the spec, still without a name, of a parameter of which this rank shards a tensor of `shape`."""
        return (RowSpec if slot.by_rows else ShardSpec)(mesh, shape, placement, Name(), reduction=reduction)

    def from_autograd(self, slot: Slot) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that converts autograd's gradient to that of `plain`, or None if the two are equal."""
        return None


DataAxes = tuple[DeviceMesh, frozenset[int]]
_PLAIN = ParameterKind()
_registered: list[ParameterKind] = []


def register_kinds(*kinds: ParameterKind, first: bool = False) -> None:
    """Register kinds for parameters sharded from now on. They have precedence over existing kinds if `first` is set."""
    place = 0 if first else len(_registered)
    _registered[place:place] = kinds


def kind_of(tensor: torch.Tensor, *, beneath: ParameterKind | None = None) -> ParameterKind:
    """Return the first kind that accepts a parameter or buffer. The kind `beneath`, if given, is skipped."""
    return next((kind for kind in _registered if kind is not beneath and kind.takes(tensor)), _PLAIN)


def prepare(model: nn.Module, *, is_read_later: bool = False) -> None:
    """Let every registered kind prepare a model, as `ParameterKind.prepare` describes."""
    for kind in _registered:
        kind.prepare(model, is_read_later=is_read_later)


def to_device(module: nn.Module, device: torch.device) -> None:
    """Let every registered kind move its tensors in a module to the device, as `ParameterKind.to_device` describes."""
    for kind in _registered:
        kind.to_device(module, device)


def check_kinds(
    plans: Sequence[UnitPlan], roots: Sequence[nn.Module], mesh: Mesh, data: DataAxes | None = None
) -> None:
    """Let every registered kind check the parameters that it accepts, as `ParameterKind.check` describes."""
    slots = [slot for plan in plans for slot in plan.slots]
    for kind in _registered:
        kind.check([slot for slot in slots if kind_of(slot.parameter) is kind], roots, mesh, data)


def check_types(plans: Sequence[UnitPlan], roots: Sequence[nn.Module]) -> None:
    """Raise an error if a parameter's type cannot be sharded or if its `grad_dtype` differs from its dtype."""
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
    """Return the tensors inside a tensor of a wrapper subclass, keyed by their attribute names."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
