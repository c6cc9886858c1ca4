"""The DTensors that leave the engine: whole tensors to other code, of which each rank has an interval.

They are parameters, gradients, optimizer state and the values of state dicts. What other code computes with them, and
calls on them, is added from outside (`ShardedTensor._compute`).
"""

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
    """A DTensor over a spec's ranks, each of which has a part of it or all.

    `spec` belongs to the parameter itself, or to the one that it was computed from.
    """

    spec: ShardSpec

    def __init__(self, *_args: object, **_options: object) -> None:
        """Do nothing: torch's own takes as long as making the tensor."""

    @property
    def name(self) -> str:
        """Return the name of the parameter these values belong to or come from; all names if it is tied."""
        return str(self.spec.name)

    @property
    def __tensor_flatten__(self) -> NoReturn:
        # With it, moving a module would swap its parameters for others, and a compiler would build torch's own class
        # from the parts.
        raise AttributeError("a compiler cannot take it apart")


class ShardedTensor(SpreadTensor):
    """A tensor of which each rank has an interval, shape (n,), of the flattened elements.

    Args:
        local: this rank's interval.
        spec: the place of that interval.
        requires_grad: whether autograd makes a gradient of it.

    Attributes:
        local: the same, without autograd.
    """

    _compute: ClassVar[Callable[[torch_private.Kernel, Sequence[Any], dict[str, Any]], Any]]
    """Runs a kernel on sharded tensors; set from outside the engine."""
    __hash__ = object.__hash__  # by identity like a tensor's, but in C: every look-up of optimizer state calls it

    def __new__(cls, local: torch.Tensor, spec: ShardSpec, *, requires_grad: bool = False) -> ShardedTensor:
        """Wrap `local`."""
        cls = RowTensor if cls is ShardedTensor and isinstance(spec, RowSpec) else cls
        self: ShardedTensor = torch_private.wrap(cls, local, spec.layout(local.dtype), requires_grad=requires_grad)
        self.spec = spec
        return self

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's interval, shape (n,); no part of autograd's graph."""
        return torch_private.local_of(self)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parameter, those of a tied one separately."""
        return self.spec.name.names

    @property
    def interval(self) -> Interval:
        """Return the elements of the flattened whole, or of `ShardSpec.sharded_shape`, that this rank has."""
        return self.spec.interval

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch_private.Kernel, _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a kernel of torch that is given a sharded tensor; every such kernel comes through here."""
        return cls._compute(func, args, kwargs or {})

    def boxes(self) -> list[IntervalBox]:
        """Return this rank's interval as boxes of the whole."""
        return list(self.spec.boxes())


class RowTensor(ShardedTensor):
    """A tensor of which this rank has whole rows (`RowSpec`): torch sees their shape, and `Shard(0)`."""

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.local.view(self.spec.row_shape)

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        torch_private.put_local(self, value if value.dim() == 1 else value.view(-1))


def part_of(tensor: DTensor, spec: ShardSpec) -> torch.Tensor | None:
    """Return this rank's part, shape (n,), of any DTensor that is laid out as `spec`; None if it is not."""
    if isinstance(tensor, ShardedTensor):
        return tensor.local if spec.is_like(tensor.spec) else None
    layout, expected = torch_private.layout_from(tensor), spec.layout(tensor.dtype)
    is_alike = (layout.mesh, layout.placements, layout.shape) == (expected.mesh, expected.placements, expected.shape)
    local = torch_private.local_of(tensor)
    return local.view(-1) if isinstance(spec, RowSpec) and is_alike and local.is_contiguous() else None


def dtensor_of(local: torch.Tensor, spec: ShardSpec, placement: Placement | None = None) -> DTensor:
    """Return torch's own DTensor over a spec's ranks.

    It is replicated along all axes, or along those that it is not cut along.
    """
    placements = spec.placements(
        placement if spec.mesh.shard_size > 1 else None, placement if spec.is_chunked else None
    )
    layout = torch_private.layout_of(spec.device_mesh, placements, local.shape, local.dtype, local.stride())
    dtensor: DTensor = torch_private.wrap(DTensor, local, layout)
    return dtensor
