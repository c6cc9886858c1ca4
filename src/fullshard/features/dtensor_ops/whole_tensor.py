"""Tensors that are complete on every rank: results of sharded tensors, and copies in place of views."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement

from fullshard.core.errors import LifecycleError
from fullshard.engine.shard_spec import ShardSpec
from fullshard.engine.sharded_tensor import ShardedTensor, SpreadTensor, dtensor_of
from fullshard.features.dtensor_ops import torch_private
from fullshard.features.dtensor_ops.arguments import (
    call_with,
    map_arguments,
    refuse_plain,
    target_of,
    tensors_in,
    written_tensors,
)
from fullshard.features.dtensor_ops.methods import reduced


class _Whole(SpreadTensor):
    """Base class of DTensors that are complete on every rank."""

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the complete tensor. Its gradients are reduced as in `ShardedTensor.full_tensor`."""
        if grad_placements is None and torch.is_grad_enabled() and self.requires_grad:
            return _leave(self, is_plain=True)
        return super().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the complete tensor, as `to_local` does."""
        return self.to_local(grad_placements=grad_placements)

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Change the placements or the mesh, as DTensor's `redistribute` does."""
        own: Any = _leave(self, is_plain=False)
        return own.redistribute(device_mesh, placements, **options)  # type: ignore[no-any-return]


class WholeTensor(_Whole):
    """A complete result on every rank, such as a norm. With plain numbers, it becomes a plain tensor."""

    @classmethod
    def of(cls, whole: torch.Tensor, spec: ShardSpec) -> WholeTensor:
        """Return `whole` as a `WholeTensor`. It was computed from tensors that are sharded as in `spec`."""
        self: WholeTensor = torch_private.wrap(cls, whole, torch_private.layout_from(dtensor_of(whole, spec)))
        self.spec = spec
        return self

    def tolist(self) -> Any:
        """Return all elements as nested lists. This is not a collective."""
        return torch_private.local_of(self).tolist()

    def plain(self) -> DTensor:
        """Return this tensor as an ordinary torch DTensor."""
        dtensor: DTensor = torch_private.wrap(DTensor, torch_private.local_of(self), torch_private.layout_from(self))
        return dtensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle calls of torch functions with a `WholeTensor` before autograd records them."""
        kwargs = kwargs or {}
        others = [tensor for tensor in tensors_in((args, kwargs)) if not isinstance(tensor, SpreadTensor)]
        plain = [tensor for tensor in others if not isinstance(tensor, DTensor)]
        with torch_private.without_functions():
            target = kwargs.get("out", args[0] if _is_in_place(func) else None)
            changed = next((tensor for tensor in tensors_in(target) if isinstance(tensor, WholeTensor)), None)
            if plain and changed is not None:
                if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in plain):
                    raise LifecycleError(
                        f"`{func.__name__}` would change a tensor computed from {changed.name} in place, with a "
                        "plain tensor that requires a gradient",
                        hint="create a new tensor instead: total = total + loss, not total += loss",
                    )
            elif others and changed is None:
                leave = functools.partial(_leave, is_plain=bool(plain))
                args, kwargs = map_arguments((list(args), kwargs), WholeTensor, leave)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch_private.Kernel, _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        kinds = {type(t) for t in tensors if isinstance(t, DTensor)}
        if any(issubclass(kind, ShardedTensor) for kind in kinds):
            return ShardedTensor.__torch_dispatch__(func, _types, args, kwargs)
        if kinds != {WholeTensor}:
            return call_with(func, args, kwargs, WholeTensor, WholeTensor.plain)
        refuse_plain(func, args, kwargs)
        result = call_with(func, args, kwargs, WholeTensor, torch_private.local_of)
        if torch_private.writes(func):
            return None if result is None else target_of(args, kwargs)  # torch ignores the result for lists
        held = next(t for t in tensors if isinstance(t, WholeTensor))
        return map_arguments(result, torch.Tensor, lambda made: WholeTensor.of(made, held.spec))


_OPERATORS_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    return name in _OPERATORS_IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class _Leave(torch.autograd.Function):
    """Converts a `WholeTensor` to a plain tensor of this rank, or to a DTensor. Backward reduces its gradient."""

    @staticmethod
    def forward(ctx: Any, whole: _Whole, is_plain: bool) -> torch.Tensor:
        ctx.spec, local = whole.spec, torch_private.local_of(whole).clone()  # the caller may change it
        return local if is_plain else torch_private.wrap(DTensor, local, torch_private.layout_from(whole))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[WholeTensor, None]:
        return WholeTensor.of(reduced(grad, ctx.spec), ctx.spec), None


def _leave(whole: _Whole, *, is_plain: bool) -> torch.Tensor:
    left: torch.Tensor = _Leave.apply(whole, is_plain)
    return left


class WholeCopy(_Whole):
    """A read-only copy in place of a view, such as a transposed matrix. It is invalid once its source changes."""

    _source: torch.Tensor
    _source_version: int

    @classmethod
    def of(cls, dtensor: DTensor, held: ShardedTensor | WholeCopy) -> WholeCopy:
        """Return `dtensor` as a copy that replaces a view of `held`."""
        self: WholeCopy = torch_private.wrap(cls, torch_private.local_of(dtensor), torch_private.layout_from(dtensor))
        self.spec = held.spec
        if isinstance(held, WholeCopy):
            self._source, self._source_version = held._source, held._source_version
        else:
            self._source, self._source_version = held.local, _version(held.local)
        return self

    def plain(self) -> WholeTensor:
        """Return this tensor as a `WholeTensor`, which has no checks."""
        return WholeTensor.of(torch_private.local_of(self), self.spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch_private.Kernel, _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        changed = next((t for t in written_tensors(func, args, kwargs) if isinstance(t, WholeCopy)), None)
        if changed is not None:
            raise LifecycleError(
                f"`{func.overloadpacket.__name__}` would change a copy of {changed.name} and not its values, because "
                "a view that is not an interval on any rank is returned as a copy",
                hint=(
                    "change rows or unsharded tensors, or work inside `with fullshard.unsharded(model, writeback=True)`"
                ),
            )
        copies = [t for t in tensors_in((args, kwargs)) if isinstance(t, WholeCopy)]
        for copy in copies:
            copy.check_is_current()
        refuse_plain(func, args, kwargs)
        result = call_with(func, args, kwargs, WholeCopy, WholeCopy.plain)
        if not torch_private.is_view(func):
            return result
        return map_arguments(result, DTensor, lambda view: WholeCopy.of(view, copies[0]))

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the local tensor. First check that the copy is valid, because no kernel does so here."""
        self.check_is_current()
        return super().to_local(grad_placements=grad_placements)

    def check_is_current(self) -> None:
        """Raise an error if the source has changed since the copy was made."""
        if _version(self._source) != self._source_version:
            raise LifecycleError(
                f"a view of {self.name} that is not an interval on any rank is out of date, because its source has "
                "changed",
                hint="create the view again after a change",
            )


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, or 0 in inference mode, where torch does not count changes."""
    return 0 if tensor.is_inference() else tensor._version


for _dispatched in (WholeTensor.__torch_function__, WholeTensor.__torch_dispatch__, WholeCopy.__torch_dispatch__):
    torch_private.keep_compiler_out(_dispatched.__func__)  # type: ignore[attr-defined]  # see features.dtensor_ops
