"""What `module.parameters()` yields at rest: this rank's slice of a parameter."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import LifecycleError
from fullshard.core.layout import BucketLayout, Interval
from fullshard.engine.callers import asker, knows_slices
from fullshard.engine.slices import (
    NotWhole,
    Slice,
    compute_with,
    not_there,
    warn_of_local_result,
)

_grad_descriptor: Any = torch.Tensor.grad
_plain_grad, _set_plain_grad = _grad_descriptor.__get__, _grad_descriptor.__set__
_plain_requires_grad: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_REFERENCE = "_fullshard_sharded_parameter"
_SLICE = "_fullshard_slice"
_METHODS = "contiguous cpu detach numpy reshape to tolist view"
"""Of a sharded parameter, for code that does not know slices, these are a `Slice`'s: views forget what they are of."""


class ParameterOwner(Protocol):
    """What a sharded parameter asks of its `Bucket`."""

    @property
    def mesh(self) -> Mesh:
        """The ranks that share it."""

    @property
    def layout(self) -> BucketLayout:
        """Where each parameter is in it."""

    @property
    def main(self) -> torch.Tensor:
        """This rank's interval of it, shape (S,)."""

    @property
    def slices(self) -> list[slice]:
        """Where in `main` each parameter is."""

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Parameter `index` was frozen or unfrozen."""


class ShardedParameter(NotWhole, nn.Parameter):
    """A 1-D slice of a parameter, and where it belongs.

    The data is a view of the bucket's main buffer, so an optimizer that updates it in place updates the bucket.
    `shape` is that of the slice (often empty); `global_shape` is that of the whole. `ndim` / `dim()` count the whole's
    dimensions, so that rules such as "decay matrices only" hold for sharded parameters too, and `numel()` its elements,
    but for optimizers and the engine. What the user's code computes from it is a `Slice`, which says so before it is
    taken for the whole.

    Attributes:
        names: qualified names in the model, several if the parameter is tied.
        global_shape: shape of the whole parameter.
        interval: elements of the flattened parameter that this rank owns.
        is_used_up: the optimizer has used up the gradient within backward (`engine.step.in_backward`), and the script
            has not come to `optimizer.step()` yet.
        taken_for_whole: a function that autograd may come back through, and whose gradient of a slice is not that of
            the whole's.
    """

    is_used_up = False
    taken_for_whole = ""
    __hash__ = object.__hash__  # by identity like a tensor's, but in C: every look-up of optimizer state asks for it

    names: tuple[str, ...]
    global_shape: torch.Size
    interval: Interval
    _bucket: ParameterOwner
    _index: int

    def __new__(cls, bucket: ParameterOwner, index: int, *, requires_grad: bool) -> ShardedParameter:
        """Cut parameter `index` of `bucket` down to this rank's slice of `main`."""
        data = bucket.main[bucket.slices[index]].detach()
        self = torch_private.make_subclass(cls, data, requires_grad)
        self._bucket, self._index = bucket, index
        self.names = ()
        self.global_shape = torch.Size(bucket.layout.specs[index].shape)
        self.interval = bucket.layout.interval(index, bucket.mesh.shard_rank)
        if requires_grad:
            torch.Tensor.register_post_accumulate_grad_hook(self, _used_in_a_loss)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch_private.Kernel, _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every kernel of torch that is given one comes through here."""
        caller = sys._getframe(1)
        with torch_private.without_dispatch():
            if not knows_slices(caller) or not knows_slices(asker(caller)):
                first = next(_among((*args, *(kwargs or {}).values())), None)
                if first is not None:
                    return compute_with(func, first, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    @property
    def name(self) -> str:
        """The first qualified name."""
        return self.names[0]

    @property
    def mesh(self) -> Mesh:
        """The mesh the parameter is sharded over."""
        return self._bucket.mesh

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Dimensions of the whole parameter."""
        return len(self.global_shape)

    def dim(self) -> int:
        """Dimensions of the whole parameter."""
        return len(self.global_shape)

    def numel(self) -> int:
        """Elements of the whole parameter; of the slice for optimizers and the engine, which see plain slices."""
        return self.interval.numel if knows_slices(sys._getframe(1)) else self.global_shape.numel()

    nelement = numel

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Refused, but for who knows slices: rows of the slice are not rows of the parameter."""
        if not knows_slices(sys._getframe(1)):
            raise not_there(self, "[...]")
        return super().__getitem__(index)

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's slice of the gradient, averaged over all ranks; None before the first backward.

        Raises:
            LifecycleError: the optimizer has stepped with it within backward. Whoever clips, unscales or logs gradients
                then must learn that there are none.
        """
        if self.is_used_up:
            raise LifecycleError(
                f"sharded parameter {self.names}: the optimizer has stepped in backward and used its gradient up",
                hint="leave step_in_backward out to clip, unscale or read gradients; call zero_grad() after step()",
            )
        grad: torch.Tensor | None = _plain_grad(self)
        return grad if grad is None or knows_slices(sys._getframe(1)) else self._slice_of(grad)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if isinstance(value, Slice):
            current = _plain_grad(self)
            if current is not None and value is getattr(current, _SLICE, _nothing)():
                return  # as after `p.grad *= 2`
            value = value.plain()
        # Marked, because torch's clip_grad_norm_ looks at gradients alone and must know that this is only a slice.
        if value is not None:
            value._fullshard_mesh = self._bucket.mesh  # type: ignore[attr-defined]
        _set_plain_grad(self, value)

    def _slice_of(self, grad: torch.Tensor) -> Slice:
        """The same one for as long as somebody holds it. Weakly: views keep what they are views of."""
        reference = getattr(grad, _SLICE, None)
        held: Slice | None = None if reference is None else reference()
        if held is None:
            held = Slice.of(grad, self)
            setattr(grad, _SLICE, weakref.ref(held))
        return held

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained. It may be changed at any time, as that of any parameter."""
        return _plain_requires_grad(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Change it; returns the parameter."""
        super().requires_grad_(requires_grad)
        self._bucket.set_requires_grad(self._index, requires_grad)
        return self

    @property
    def data(self) -> torch.Tensor:
        """The slice, without autograd."""
        data = torch.Tensor.detach(self)  # which, unlike plain `.data`, counts changes: compute shards are made of it
        return data if knows_slices(sys._getframe(1)) else Slice.of(data, self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Module.to(), half() and friends come through here; the slice must stay a view of the bucket.
        same = value.dtype == self.dtype and value.device == self.device and value.data_ptr() == self.data_ptr()
        if not same or value.shape != self.shape:
            raise LifecycleError(
                f"cannot give sharded parameter {self.names} other data ({self.dtype} on {self.device} -> "
                f"{value.dtype} on {value.device}): it is a view of its bucket",
                hint="move or cast the model before sharding it; change values in place",
            )

    @torch.no_grad()
    def full_tensor(self) -> torch.Tensor:
        """The whole parameter, a new tensor of shape `global_shape` on this rank's device.

        A collective: every rank of the shard group calls it for the same parameters in the same order.
        """
        return self.gather_full(torch.Tensor.detach(self))

    def gather_full(self, local: torch.Tensor) -> torch.Tensor:
        """The whole of something that is laid out as this parameter, its state for example; `local` is this rank's.

        Every owner broadcasts its interval straight into place. At large world sizes few ranks own any of it.
        """
        layout, mesh = self._bucket.layout, self.mesh
        full = torch.empty(self.global_shape.numel(), dtype=local.dtype, device=mesh.device)
        full[self.interval.start : self.interval.stop] = local
        for owner in range(mesh.shard_size):
            interval = layout.interval(self._index, owner)
            if interval.numel and mesh.shard_group is not None:
                dist.broadcast(full[interval.start : interval.stop], group=mesh.shard_group, group_src=owner)
        return full.view(self.global_shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardedParameter({self.names[0] if self.names else '?'}, global_shape={tuple(self.global_shape)}, "
            f"interval=[{self.interval.start}, {self.interval.stop}), dtype={self.dtype})"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise LifecycleError(
            f"cannot copy sharded parameter {self.names}: a copy would not be part of any unit",
            hint="deepcopy the model before sharding it, or build a second one and load the state dict",
        )

    def register_hook(self, hook: object) -> NoReturn:
        """Refused."""
        raise _no_hook(self, "register_hook")

    def register_post_accumulate_grad_hook(self, hook: object) -> NoReturn:
        """Refused."""
        raise _no_hook(self, "register_post_accumulate_grad_hook")


def _among(values: Iterable[Any]) -> Iterator[ShardedParameter]:
    for value in values:
        if isinstance(value, ShardedParameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _among(value)


def sharded_parameters(optimizer: torch.optim.Optimizer) -> list[ShardedParameter]:
    """Those that an optimizer holds."""
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedParameter)]


def are_same(left: Sequence[object], right: Sequence[object]) -> bool:
    """Whether two lists hold the same objects; comparing tensors would compare their elements."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


def plain_gradients(parameters: Iterable[ShardedParameter]) -> list[torch.Tensor | None]:
    """Their gradients; None, too, where the optimizer has used one up within backward."""
    return list(map(_plain_grad, parameters))


def mesh_of_gradient(gradient: torch.Tensor) -> Mesh | None:
    """The mesh of a sharded parameter's gradient; None for any other tensor."""
    return getattr(gradient, "_fullshard_mesh", None)


def sharded_parameter_of(parameter: nn.Parameter) -> ShardedParameter | None:
    """The sharded parameter that stands for an original one; None if no unit owns it."""
    if isinstance(parameter, ShardedParameter):
        return parameter
    reference = getattr(parameter, _REFERENCE, None)
    return reference() if reference is not None else None


def mark_original(parameter: nn.Parameter, sharded: ShardedParameter) -> None:
    """Remember on the original parameter which sharded one stands for it."""
    setattr(parameter, _REFERENCE, weakref.ref(sharded))


def _used_in_a_loss(parameter: torch.Tensor) -> None:
    """Autograd comes to a sharded parameter only if a script has computed with it: a penalty, say."""
    assert isinstance(parameter, ShardedParameter)  # noqa: S101 -- it is registered on these
    function, parameter.taken_for_whole = parameter.taken_for_whole, ""
    if function:
        raise LifecycleError(
            f"rank {parameter.mesh.rank}: a loss made of {function} of this rank's slice of "
            f"{'='.join(parameter.names)}: its gradient is not that of the whole's",
            hint="compute it in the forward of its unit or inside `with fullshard.unsharded(model)`; a sum over "
            "elements is right slice by slice; under torch.no_grad() nothing comes back to it",
        )
    warn_of_local_result(parameter, "a loss made", requires_grad=parameter.requires_grad)


def _nothing() -> None:
    """A weak reference to nothing."""


def _no_hook(parameter: ShardedParameter, method: str) -> LifecycleError:
    return LifecycleError(
        f"{method} on sharded parameter {parameter.names} would never fire: autograd sees the unsharded parameter",
        hint="read .grad after backward, or register the hook before fully_shard",
    )


def _method_of_slice(name: str) -> Callable[..., Any]:
    """Method `name` of a sharded parameter: a tensor's for who knows slices, a `Slice`'s for everybody else."""
    plain = getattr(torch.Tensor, name)

    def method(self: ShardedParameter, *args: Any, **kwargs: Any) -> Any:
        if knows_slices(asker(sys._getframe(1))):
            return plain(self, *args, **kwargs)
        return getattr(Slice.of(self, self), name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, plain.__doc__
    return method


for _name in _METHODS.split():
    setattr(ShardedParameter, _name, _method_of_slice(_name))
