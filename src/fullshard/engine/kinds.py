"""Kinds of parameters, and which bucket holds each: what the engine asks about a parameter before it is sharded.

A capability subclasses `ParameterKind` and registers an instance. The first registered kind that takes a parameter is
its kind; plain parameters are what no other kind takes.
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
    """The way parameters of one kind are sharded. This class is for plain parameters; subclasses override it.

    Attributes:
        bucket_type: the class of their buckets; None: `Bucket`.
        is_alone: each parameter has a bucket of its own, which is cut between rows.
        is_exact: the bytes have a meaning of their own: they are never cast and never computed with.
        is_packed: the bucket may round what it sends.
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
        """Return the name of the form (`core.forms`) in which a parameter is stored and sent; empty: as numbers."""
        return ""

    # -- before parameters are sharded --------------------------------------------------------------------------

    def prepare(self, model: nn.Module, *, is_read_later: bool) -> None:
        """Make each tensor of a model that is to be sharded a parameter, before they are divided into units.

        `is_read_later`: tensors on the meta device get their values from files, a part on each rank.
        """

    def why_not(self, parameter: torch.Tensor) -> str:
        """Return why a parameter cannot be sharded; empty if it can."""
        if not torch_private.has_own_dispatch(type(parameter)):
            return ""
        return "wraps other tensors, with which forward would go on computing whatever the optimizer does"

    def check(self, slots: Sequence[Slot], roots: Sequence[nn.Module], mesh: Mesh, data: DataAxes | None) -> None:
        """Check parameters of this kind against the mesh that they are about to be sharded over.

        `roots`: the modules around them; `data`: a larger mesh and its axes for data, if the script has named them.
        """

    def why_no_rows(self, slot: Slot) -> str:
        """Return why a parameter cannot be cut between rows, as `Shard(0)`; empty if it can."""
        return ""

    def place(self, module: nn.Module, device: torch.device) -> None:
        """Bring tensors that belong to a module's parameters, but are no parameters themselves, to the device."""

    # -- a parameter's memory -----------------------------------------------------------------------------------

    def plain(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor of a parameter that this rank has to shard, without autograd."""
        return parameter.detach()

    def set_plain(self, parameter: torch.Tensor, plain: torch.Tensor) -> None:
        """Have a parameter compute with other memory, maybe of another dtype. It stays the same object."""
        parameter.data = plain

    def like(self, parameter: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `parameter` around `plain`."""
        return plain

    def tensors(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Return the plain tensors that a parameter consists of."""
        return [self.plain(parameter)]

    def moved(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """Move a parameter to another device: the same object, unless torch has no way to (plugged-in devices)."""
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
        """Return a parameter without memory from which a unit that leaves the meta device makes its buckets."""
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad)

    def stand_in(self, parameter: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
        """Return a copy of this rank's part of a parameter whose unit has other parameters on the meta device."""
        own = self.plain(parameter).reshape(-1)[spec.interval.start : spec.interval.stop]
        return own.to(spec.mesh.device, copy=True)

    # -- while it is sharded ------------------------------------------------------------------------------------

    def spec(
        self, slot: Slot, mesh: Mesh, shape: torch.Size, placement: RaggedShard, reduction: ReductionSettings
    ) -> ShardSpec:
        """Return the spec of a parameter of which this rank has `shape` to shard; it has no name yet."""
        return (RowSpec if slot.by_rows else ShardSpec)(mesh, shape, placement, Name(), reduction=reduction)

    def from_autograd(self, slot: Slot) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that makes of autograd's gradient that of `plain`; None if they are the same."""
        return None


DataAxes = tuple[DeviceMesh, frozenset[int]]
_PLAIN = ParameterKind()
_registered: list[ParameterKind] = []


def register_kinds(*kinds: ParameterKind, first: bool = False) -> None:
    """Let these kinds take parameters that are sharded from now on, after those registered before, or `first`."""
    place = 0 if first else len(_registered)
    _registered[place:place] = kinds


def kind_of(tensor: torch.Tensor, *, beneath: ParameterKind | None = None) -> ParameterKind:
    """Return the kind that takes a parameter or buffer; `beneath`: that would take it if it were not for this kind."""
    return next((kind for kind in _registered if kind is not beneath and kind.takes(tensor)), _PLAIN)


def prepare(model: nn.Module, *, is_read_later: bool = False) -> None:
    """Have each kind prepare a model; see `ParameterKind.prepare`."""
    for kind in _registered:
        kind.prepare(model, is_read_later=is_read_later)


def place(module: nn.Module, device: torch.device) -> None:
    """Have each kind bring its tensors in a module to the device; see `ParameterKind.place`."""
    for kind in _registered:
        kind.place(module, device)


def check_kinds(
    plans: Sequence[UnitPlan], roots: Sequence[nn.Module], mesh: Mesh, data: DataAxes | None = None
) -> None:
    """Let each kind check the parameters that it takes against the mesh; see `ParameterKind.check`."""
    slots = [slot for plan in plans for slot in plan.slots]
    for kind in _registered:
        kind.check([slot for slot in slots if kind_of(slot.parameter) is kind], roots, mesh, data)


def check_types(plans: Sequence[UnitPlan], roots: Sequence[nn.Module]) -> None:
    """Check that every parameter is its own memory: a unit gives that to the bucket, and takes it back."""
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
            hint="convert the model after training, or leave frozen ones out with ignored_params",
        )


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that an instance of a wrapper class wraps, by its own names for them."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
