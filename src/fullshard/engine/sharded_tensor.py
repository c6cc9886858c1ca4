"""The tensors that code outside the engine sees: DTensors of which each rank stores only an interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.tensor import DTensor, Placement

from fullshard.comm import torch_private
from fullshard.core.boxes import IntervalBox
from fullshard.core.layout import Interval
from fullshard.engine.shard_spec import RowSpec, ShardSpec


class SpreadTensor(DTensor):
    """A DTensor over the ranks of a parameter's spec, or of a tensor computed from it. Each rank stores part or all."""

    spec: ShardSpec

    def __init__(self, *_args: object, **_options: object) -> None:
        """Skip DTensor's own `__init__`, which takes as long as creating the tensor."""

    @property
    def name(self) -> str:
        """Return the name of the parameter from which the values come. If it is tied, return all its names."""
        return str(self.spec.name)

    @property
    def __tensor_flatten__(self) -> NoReturn:
        # If it existed, moving a module would replace its parameters, and a compiler would build torch's own class
        # from the parts.
        raise AttributeError("a compiler cannot decompose a sharded tensor")


class ShardedTensor(SpreadTensor):
    """A DTensor that stores, on each rank, an interval of the flattened elements, shape (n,).

    Args:
        local: this rank's interval.
        spec: the spec that defines which elements each rank owns.
        requires_grad: whether autograd computes a gradient for the tensor.

    Attributes:
        local: this rank's interval, detached from autograd.
    """

    _compute: ClassVar[Callable[[torch_private.Kernel, Sequence[Any], dict[str, Any]], Any]]
    """Runs a kernel on sharded tensors. Code outside the engine sets it."""
    # By identity like a tensor's, but in C, because every look-up of optimizer state calls it.
    __hash__ = object.__hash__

    def __new__(cls, local: torch.Tensor, spec: ShardSpec, *, requires_grad: bool = False) -> ShardedTensor:
        """Create the tensor from this rank's interval `local`."""
        cls = RowTensor if cls is ShardedTensor and isinstance(spec, RowSpec) else cls
        self: ShardedTensor = torch_private.wrap(cls, local, spec.layout(local.dtype), requires_grad=requires_grad)
        self.spec = spec
        return self

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's interval, shape (n,), detached from autograd."""
        return torch_private.local_of(self)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameter. A tied parameter has several."""
        return self.spec.name.names

    @property
    def interval(self) -> Interval:
        """Return the indices of this rank's elements in the flattened tensor, of shape `ShardSpec.sharded_shape`."""
        return self.spec.interval

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch_private.Kernel, _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch kernel that has a sharded tensor among its arguments. torch calls this for every such kernel."""
        return cls._compute(func, args, kwargs or {})

    def boxes(self) -> list[IntervalBox]:
        """Return the boxes in the full tensor that make up this rank's interval."""
        return list(self.spec.boxes())


class RowTensor(ShardedTensor):
    """A sharded tensor of which each rank owns complete rows (`RowSpec`). For torch, its placement is `Shard(0)`."""

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.local.view(self.spec.row_shape)

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        torch_private.put_local(self, value if value.dim() == 1 else value.view(-1))


def shard_of(tensor: DTensor, spec: ShardSpec) -> torch.Tensor | None:
    """Return this rank's part of a DTensor, shape (n,), or None if the DTensor does not have the layout of `spec`."""
    if isinstance(tensor, ShardedTensor):
        return tensor.local if spec.is_like(tensor.spec) else None
    layout, expected = torch_private.layout_from(tensor), spec.layout(tensor.dtype)
    is_alike = (layout.mesh, layout.placements, layout.shape) == (expected.mesh, expected.placements, expected.shape)
    local = torch_private.local_of(tensor)
    return local.view(-1) if isinstance(spec, RowSpec) and is_alike and local.is_contiguous() else None


def dtensor_of(local: torch.Tensor, spec: ShardSpec, placement: Placement | None = None) -> DTensor:
    """Return a DTensor of torch's own class, with `local` as this rank's part, over the ranks of a spec.

    If `placement` is given, it applies to the axes along which the spec cuts tensors. All other axes replicate.
    """
    placements = spec.placements(
        placement if spec.mesh.shard_size > 1 else None, placement if spec.is_chunked else None
    )
    layout = torch_private.layout_of(spec.device_mesh, placements, local.shape, local.dtype, local.stride())
    dtensor: DTensor = torch_private.wrap(DTensor, local, layout)
    return dtensor
