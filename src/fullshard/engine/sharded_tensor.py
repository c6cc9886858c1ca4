"""What leaves the engine is a DTensor: a whole tensor for whoever computes with it, of which each rank has an interval.

    p, p.grad, optimizer state, state dicts     `ShardedTensor`s, of global shape; `to_local()` is this rank's interval
    element by element, a copy, a cast          interval by interval; the result is a `ShardedTensor` again
    rows, reshaped, split along the first dim   views: a `ShardedTensor` of a part of the same memory
    a sum, a mean, a norm                       each rank's part, put together at once: a collective; a `WholeTensor`,
                                                which becomes plain with plain numbers: a penalty and a loss
    random numbers                              those that one process draws: every rank draws all and keeps its own
    anything else                               of the whole, gathered for it: a collective, as torch's DTensor does
    pickle, safetensors, a raw address          an error, and the way out

What a kernel changes in place it changes everywhere, or it is an error. Nothing is computed of one rank's elements
as if they were all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement

from fullshard.comm import torch_private
from fullshard.core.boxes import IntervalBox
from fullshard.core.errors import LifecycleError
from fullshard.core.layout import Interval
from fullshard.engine.span import Span

WAY_OUT = (
    "call, on every rank, fullshard.checkpoint.save_checkpoint or torch.distributed.checkpoint.save; whole tensors are "
    "fullshard.checkpoint.full_state_dict(model), export_hf, or .full_tensor() of each"
)

_ALIKE = frozenset(
    torch_private.COPY_KERNELS
    | {"alias", "clone", "copy_", "detach", "empty_like", "fill_", "full_like", "ones_like", "zero_", "zeros_like"}
    | {"is_pinned", "lift_fresh", "pin_memory"}
)
"""Kernels that treat elements alike, besides those that torch marks so."""


class ShardedTensor(DTensor):
    """A tensor of which each rank has an interval, shape (n,), of the flattened elements.

    Args:
        local: this rank's interval.
        span: which one that is.

    Attributes:
        local: the same, without autograd.
    """

    span: Span
    __hash__ = object.__hash__  # by identity like a tensor's, but in C: every look-up of optimizer state asks for it

    def __new__(cls, local: torch.Tensor, span: Span, *, requires_grad: bool = False) -> ShardedTensor:
        """Wrap `local`."""
        self: ShardedTensor = torch_private.wrap(cls, local, span.layout(local.dtype), requires_grad=requires_grad)
        self.span = span
        return self

    def __init__(self, *_args: object, **_options: object) -> None:
        """Nothing is left to do: torch's own takes as long as making the tensor."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's interval, shape (n,); no part of autograd's graph."""
        return torch_private.local_of(self)

    @property
    def name(self) -> str:
        """Whose values these are, or were computed from: all names of a tied parameter."""
        return str(self.span.name)

    @property
    def names(self) -> tuple[str, ...]:
        """The same, apart."""
        return self.span.name.names

    @property
    def __tensor_flatten__(self) -> NoReturn:
        # With it, moving a module would swap its parameters for others, and a compiler would trace what it cannot make.
        raise AttributeError("a compiler cannot take it apart")

    @property
    def interval(self) -> Interval:
        """The elements of the flattened whole that this rank has; of its tile, if tensor parallelism has split it."""
        return self.span.interval

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's interval, shape (n,); in the whole's shape where every rank has all of it. Differentiable."""
        local = super().to_local(grad_placements=grad_placements)
        is_whole = self.span.mesh.shard_size == 1 and not self.span.is_by_rows
        return local.view(self.span.tile_shape) if is_whole else local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole, a new tensor on this rank's device. A collective: every rank calls it, in the same order.

        Differentiable: what comes back is taken for the gradient of the whole, equal on every rank, unless
        `grad_placements` says otherwise.
        """
        whole: torch.Tensor = self._replicate().to_local(grad_placements=grad_placements)
        return whole

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """As torch's: to replicated, to shards along a dim, to another mesh. A collective."""
        own = self.placements
        mesh = device_mesh or self.device_mesh
        if mesh == self.device_mesh and placements is not None and tuple(placements) == own:
            return self.view(self.shape)  # type: ignore[return-value]
        redistributed: DTensor = self._replicate().redistribute(device_mesh, placements, **options)
        return redistributed

    def _replicate(self) -> DTensor:
        if torch.is_grad_enabled() and self.requires_grad:
            replicated: DTensor = _Replicate.apply(self)
            return replicated
        return replicated_of(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}({self.name}, shape={tuple(self.shape)}, "
            f"interval=[{self.interval.start}, {self.interval.stop}), dtype={self.dtype}, local={self.local})"
        )

    def __copy__(self) -> ShardedTensor:
        """The same memory, in a tensor of its own that may be given other memory."""
        return self._like(self.local.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        memo[id(self)] = copied = self._like(self.local.detach().clone())
        return copied

    def _like(self, local: torch.Tensor) -> ShardedTensor:
        like = ShardedTensor(local, self.span, requires_grad=self.requires_grad)
        like._is_param = isinstance(self, torch.nn.Parameter)
        return like

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise LifecycleError(
            f"cannot pickle {self.name}: this rank has elements {self.interval.start} to {self.interval.stop} of "
            f"{self.span.numel}",
            hint=WAY_OUT,
        )

    def data_ptr(self) -> int:
        """0, as torch's DTensor has it: there is no address of the whole."""
        return 0

    def untyped_storage(self) -> NoReturn:
        """Refused: it has no memory as a whole, and this rank's interval is not what somebody asks for."""
        raise LifecycleError(
            f"{self.name} has no memory of its own: this rank has elements {self.interval.start} to "
            f"{self.interval.stop} of {self.span.numel}",
            hint=f"take .to_local() for this rank's elements; {WAY_OUT}",
        )

    def __dlpack__(self, *_args: object, **_options: object) -> NoReturn:
        """Refused for the same reason; torch's own would end the process."""
        self.untyped_storage()

    def tolist(self) -> Any:
        """The elements of the whole. A collective."""
        return self.full_tensor().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch_private.Kernel, _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every kernel of torch that is given one comes through here."""
        return _compute(func, args, kwargs or {})

    # -- what torch.distributed.checkpoint asks of a tensor ---------------------------------------------------------

    def boxes(self) -> list[IntervalBox]:
        """This rank's interval as boxes of the whole."""
        return list(self.span.boxes())

    def __create_write_items__(self, fqn: str, _object: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        torch_private.keep_every_box()
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # not before somebody saves

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self.boxes()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        if self.span.is_by_rows:
            return self.local  # its one box
        for box in self.boxes():
            if torch.Size(box.offsets) == index.offset:
                start = int(self.local.storage_offset()) + box.start
                return self.local.as_strided(box.sizes, box.strides, start)
        raise LifecycleError(
            f"{self.name}: this rank has no elements from {tuple(index.offset)} on, but {self}", hint="see its boxes()"
        )


class _Replicate(torch.autograd.Function):
    """To a tensor that every rank has whole; a gradient of that comes back as this rank's interval."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> DTensor:
        ctx.span = tensor.span
        return replicated_of(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardedTensor:
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        return ShardedTensor(ctx.span.cut(whole).clone(), ctx.span)


def replicated_of(tensor: ShardedTensor) -> DTensor:
    """The whole as a DTensor that every rank has; no part of autograd's graph."""
    return dtensor_of(tensor.span.gather(tensor.local), tensor.span)


def dtensor_of(local: torch.Tensor, span: Span, placement: Placement | None = None) -> DTensor:
    """Torch's own DTensor over a span's ranks: replicated along all axes, or along those that it is not cut along."""
    placements = span.placements(placement if span.mesh.shard_size > 1 else None, placement if span.is_tiled else None)
    layout = torch_private.layout_of(span.device_mesh, placements, local.shape, local.dtype)
    dtensor: DTensor = torch_private.wrap(DTensor, local, layout)
    return dtensor


class WholeTensor(DTensor):
    """What was computed of sharded tensors and every rank has whole: a norm, a penalty, a product of matrices.

    With plain numbers it becomes a plain tensor, so that a penalty can be added to a loss, each rank to its own.
    """

    span: Span

    @classmethod
    def of(cls, whole: torch.Tensor, span: Span) -> WholeTensor:
        """`whole`, that was computed of what has that span."""
        layout = torch_private.layout_as(torch_private.layout_from(dtensor_of(whole, span)), whole)
        self: WholeTensor = torch_private.wrap(cls, whole, layout)
        self.span = span
        return self

    def __init__(self, *_args: object, **_options: object) -> None: ...

    @property
    def name(self) -> str:
        """Of the parameter that it was computed of."""
        return str(self.span.name)

    @property
    def __tensor_flatten__(self) -> NoReturn:
        raise AttributeError("a compiler would put torch's own class together again")

    def tolist(self) -> Any:
        """Its elements, on every rank."""
        return torch_private.local_of(self).tolist()

    def like(self, whole: torch.Tensor) -> WholeTensor:
        """`whole`, that was computed of this."""
        layout = torch_private.layout_as(torch_private.layout_from(self), whole)
        made: WholeTensor = torch_private.wrap(WholeTensor, whole, layout)
        made.span = self.span
        return made

    def plain(self) -> DTensor:
        """The same as torch's own class."""
        dtensor: DTensor = torch_private.wrap(DTensor, torch_private.local_of(self), torch_private.layout_from(self))
        return dtensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every function of torch that is given one comes through here, above autograd."""
        kwargs = kwargs or {}
        plain = [tensor for tensor in _tensors((args, kwargs)) if not isinstance(tensor, DTensor)]
        with torch_private.without_functions():
            if plain and isinstance(args[0], WholeTensor) and _is_in_place(func):
                if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in plain):
                    raise LifecycleError(
                        f"`{func.__name__}` of what is computed of {args[0].name} and a plain tensor with a gradient",
                        hint="write total = total + loss, which makes a plain tensor",
                    )
            elif plain:
                args, kwargs = _map((list(args), kwargs), WholeTensor, _MakePlain.apply)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch_private.Kernel, _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        kinds = {type(t) for t in tensors if isinstance(t, DTensor)}
        if any(issubclass(kind, ShardedTensor) for kind in kinds):
            return _compute(func, args, kwargs)
        if kinds != {WholeTensor}:
            return func(*_map(args, WholeTensor, WholeTensor.plain), **_map(kwargs, WholeTensor, WholeTensor.plain))
        _refuse_plain(func, args, kwargs)
        result = func(
            *_map(args, WholeTensor, torch_private.local_of), **_map(kwargs, WholeTensor, torch_private.local_of)
        )
        if torch_private.writes(func):
            return _changed(args, kwargs)
        held = next(t for t in tensors if isinstance(t, WholeTensor))
        return _map(result, torch.Tensor, held.like)


_OPERATORS_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}


def _is_in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    return name in _OPERATORS_IN_PLACE or name.strip("_") + "_" == name


class _MakePlain(torch.autograd.Function):
    """To a plain tensor, each rank's own from here on. Gradients that come back are, too: what counts is their mean."""

    @staticmethod
    def forward(ctx: Any, whole: WholeTensor) -> torch.Tensor:
        ctx.span = whole.span
        return torch_private.local_of(whole).clone()  # which may be changed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> WholeTensor:
        mesh, mean = ctx.span.mesh, grad.clone()
        if mesh.world_group is not None:
            dist.all_reduce(mean, group=mesh.world_group)
            mean /= mesh.world_size
        return WholeTensor.of(mean, ctx.span)


class _WholeCopy(DTensor):
    """What a view becomes that is no interval, a transposed matrix for example: a copy, which must not be changed.

    Nor be read when what it was copied from has changed, as a view would have changed with it. So are views of it.
    """

    span: Span
    _source: torch.Tensor
    _source_version: int

    @classmethod
    def of(cls, dtensor: DTensor, held: ShardedTensor | _WholeCopy) -> _WholeCopy:
        """A copy for a view of `held`."""
        self: _WholeCopy = torch_private.wrap(cls, torch_private.local_of(dtensor), torch_private.layout_from(dtensor))
        self.span = held.span
        if isinstance(held, _WholeCopy):
            self._source, self._source_version = held._source, held._source_version
        else:
            self._source, self._source_version = held.local, _version(held.local)
        return self

    def __init__(self, *_args: object, **_options: object) -> None: ...

    @property
    def name(self) -> str:
        """Of the parameter that it is a view of."""
        return str(self.span.name)

    def plain(self) -> WholeTensor:
        """The same without the guard."""
        return WholeTensor.of(torch_private.local_of(self), self.span)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch_private.Kernel, _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        changed = next((t for t in _written(func, args, kwargs) if isinstance(t, _WholeCopy)), None)
        if changed is not None:
            raise LifecycleError(
                f"`{func.overloadpacket.__name__}` would change a copy of {changed.name}, not its values: the "
                "copy was gathered for a view that no rank has as an interval",
                hint="change rows, or whole tensors, or work inside `with fullshard.unsharded(model, writeback=True)`",
            )
        copies = [t for t in _tensors((args, kwargs)) if isinstance(t, _WholeCopy)]
        for copy in copies:
            copy.check_is_current()
        _refuse_plain(func, args, kwargs)
        result = func(*_map(args, _WholeCopy, _WholeCopy.plain), **_map(kwargs, _WholeCopy, _WholeCopy.plain))
        if not torch_private.is_view(func):
            return result
        return _map(result, DTensor, lambda view: _WholeCopy.of(view, copies[0]))

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """As torch's, which is no kernel."""
        self.check_is_current()
        return super().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """As torch's, which is no kernel."""
        self.check_is_current()
        return super().full_tensor(grad_placements=grad_placements)

    def check_is_current(self) -> None:
        """Raise if what it was copied from has changed since."""
        if _version(self._source) != self._source_version:
            raise LifecycleError(
                f"a view of {self.name} that no rank has as an interval is out of date: what it was gathered from has "
                "changed since",
                hint="take the view again after a change",
            )


def _version(tensor: torch.Tensor) -> int:
    """How often it was changed in place; of what was made in inference mode torch does not know."""
    return 0 if tensor.is_inference() else tensor._version


# -- kernels ----------------------------------------------------------------------------------------------------


def _compute(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    _check_changes(func, name, args, kwargs)
    special = _SPECIAL.get(name)
    if special is not None:
        result = special(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    if name.startswith(torch_private.MANY_KERNELS):
        return _many(func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random(func, args, kwargs)
    if torch.Tag.pointwise in func.tags or name in _ALIKE:
        return _alike(func, args, kwargs)
    if torch_private.is_view(func):
        return _view(func, args, kwargs)
    return _gathered(func, args, kwargs)


for _dispatched in (
    _compute,
    WholeTensor.__torch_function__.__func__,  # type: ignore[attr-defined]
    WholeTensor.__torch_dispatch__.__func__,  # type: ignore[attr-defined]
    _WholeCopy.__torch_dispatch__.__func__,  # type: ignore[attr-defined]
):
    torch_private.keep_compiler_out(_dispatched)  # it would trace half of a rule, and reduce twice


def _map(value: Any, kind: type[torch.Tensor], function: Callable[[Any], Any]) -> Any:
    """`value`, a kernel's arguments or result, with `function` applied to each tensor of that kind."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(item, kind, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_map(item, kind, function) for item in value])
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map(value, torch.Tensor, found.append)
    return found


def _first(value: Any) -> ShardedTensor | None:
    return next((tensor for tensor in _tensors(value) if isinstance(tensor, ShardedTensor)), None)


def _changed(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a kernel that writes writes to; `_check_changes` has seen to it that it is nothing else."""
    return kwargs.get("out", args[0])


def _written(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors that a kernel writes to."""
    places = torch_private.written(func)
    return _tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in places])


def _check_changes(func: torch_private.Kernel, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for a kernel that writes to what is neither its first argument nor `out`, or changes a shape."""
    if not torch_private.writes(func) or name.startswith(torch_private.MANY_KERNELS):
        return
    is_known = all(index == 0 or argument == "out" for index, argument in torch_private.written(func))
    if is_known and (torch.Tag.inplace_view not in func.tags or name == "detach_"):
        return
    held = _first((args, kwargs))
    raise LifecycleError(
        f"`{name}` of {'a tensor' if held is None else held.name} would change more than the values of one tensor",
        hint="compute with .full_tensor() of it, or with a function that returns a new tensor",
    )


def _alike(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Interval by interval."""
    target = _changed(args, kwargs) if torch_private.writes(func) else _first((args, kwargs))
    if not isinstance(target, ShardedTensor) or not all(_fits(t, target.span) for t in _tensors((args, kwargs))):
        return _gathered(func, args, kwargs)
    made = _Locals(target, func)
    result = func(*_map(args, torch.Tensor, made.of), **_map(kwargs, torch.Tensor, made.of))
    _count_changes(func, args, kwargs)
    return _map(result, torch.Tensor, made.wrap)


def _count_changes(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Torch counts changes of tensors before it comes here: of the wrappers, but not of what they wrap."""
    locals_ = [tensor.local for tensor in _written(func, args, kwargs) if isinstance(tensor, ShardedTensor)]
    if locals_:
        torch.autograd.graph.increment_version(locals_)


def _fits(tensor: torch.Tensor, span: Span) -> bool:
    """Whether broadcasting makes it a tensor of the span's shape."""
    sizes = zip(reversed(tensor.shape), reversed(span.shape), strict=False)
    return tensor.dim() <= len(span.shape) and all(size in (1, wanted) for size, wanted in sizes)


class _Locals:
    """This rank's intervals of a kernel's arguments, and the way back from its results."""

    def __init__(self, target: ShardedTensor, func: torch_private.Kernel) -> None:
        self._target, self._span, self._func = target, target.span, func
        self._wrapped: dict[int, ShardedTensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the kernel is to be given in place of an argument."""
        if isinstance(tensor, ShardedTensor) and self._span.is_like(tensor.span):
            self._wrapped[id(tensor.local)] = tensor
            return tensor.local
        if isinstance(tensor, DTensor):
            tensor = _plain_whole(tensor)
        elif tensor.numel() != 1:
            raise _mixed(self._func, self._target, tensor)
        if tensor.dim() == 0:
            return tensor
        if tensor.numel() == 1:
            return tensor.reshape([1] * len(self._span.local_shape))
        return self._span.cut(tensor)

    def wrap(self, result: torch.Tensor) -> torch.Tensor:
        """What the caller is given in place of a result."""
        known = self._wrapped.get(id(result))
        return ShardedTensor(result, self._span) if known is None else known


def _many(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Kernels that take lists of tensors, position by position: optimizers', mostly."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
    first = next(value for value in lists if _first(value) is not None)
    made = [_Locals(tensor, func) if isinstance(tensor, ShardedTensor) else None for tensor in first]

    def local(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return _plain_whole(value) if isinstance(value, DTensor) else value
        if len(value) != len(first):
            return value
        return [
            one.of(tensor) if one is not None and isinstance(tensor, torch.Tensor) else tensor
            for one, tensor in zip(made, value, strict=True)
        ]

    result = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    _count_changes(func, args, kwargs)
    if result is None:
        return None
    return [tensor if one is None else one.wrap(tensor) for one, tensor in zip(made, result, strict=True)]


def _view(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Views that are intervals of the flattened whole share memory; of others there is a guarded copy."""
    tensor = args[0]
    if isinstance(tensor, ShardedTensor) and _first((args[1:], kwargs)) is None:
        views = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs)
        parts = views if isinstance(views, (list, tuple)) else [views]
        is_whole = all(part.shape == tensor.shape for part in parts)
        is_row_by_row = is_whole or not (tensor.span.is_tiled or tensor.span.is_by_rows)
        if is_row_by_row and all(part.is_contiguous() and part.dtype == tensor.dtype for part in parts):
            made = [_part_of(tensor, part) for part in parts]
            return made if isinstance(views, (list, tuple)) else made[0]
    held = _first((args, kwargs))
    assert held is not None  # noqa: S101 -- else this would not have been asked
    return _map(_gathered(func, args, kwargs), DTensor, lambda copy: _WholeCopy.of(copy, held))


def _part_of(tensor: ShardedTensor, view: torch.Tensor) -> ShardedTensor:
    if tensor.span.is_by_rows:
        return ShardedTensor(tensor.local, tensor.span)
    start, span = int(view.storage_offset()), tensor.span
    part = span.part(view.shape, start)
    own = part.interval.shift(start - span.interval.start)
    return ShardedTensor(tensor.local[own.start : own.stop] if own.numel else tensor.local[:0], part)


def _random(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Random numbers as one process draws them: every rank draws all, from a generator in the same state."""
    tensor = args[0]
    is_fresh = torch_private.writes(func) or func.overloadpacket.__name__.endswith("_like")
    if not isinstance(tensor, ShardedTensor):
        return _gathered(func, args, kwargs)
    span, local = tensor.span, tensor.local
    whole = torch.empty(span.shape, dtype=local.dtype, device=local.device) if is_fresh else tensor.full_tensor()
    others = _map(args[1:], DTensor, _plain_whole)
    result = func(whole, *others, **_map(kwargs, DTensor, _plain_whole))
    if torch_private.writes(func):
        local.copy_(span.cut(whole))
        _count_changes(func, args, kwargs)
        return tensor
    return _map(
        result,
        torch.Tensor,
        lambda made: (
            ShardedTensor(span.cut(made).clone(), span) if made.shape == span.shape else WholeTensor.of(made, span)
        ),
    )


def _plain_whole(tensor: DTensor) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        return tensor.span.gather(tensor.local)
    detached: Any = tensor.detach()  # else torch does it in place, which it could not before 2.12
    whole: torch.Tensor = detached.full_tensor()
    return whole


def _gathered(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of whole tensors, which every rank has then; what a kernel writes is cut to this rank's interval again."""
    _refuse_plain(func, args, kwargs)
    wholes: dict[int, torch.Tensor] = {}

    def whole(tensor: DTensor) -> torch.Tensor:
        if id(tensor) not in wholes:
            wholes[id(tensor)] = _plain_whole(tensor)
        return wholes[id(tensor)]

    held = _first((args, kwargs))
    assert held is not None  # noqa: S101 -- else this would not have been asked
    result = func(*_map(args, DTensor, whole), **_map(kwargs, DTensor, whole))
    if not torch_private.writes(func):
        return _map(result, torch.Tensor, lambda made: WholeTensor.of(made, held.span))
    target = _changed(args, kwargs)
    if not isinstance(target, DTensor) or whole(target).shape != target.shape:
        raise LifecycleError(
            f"`{func.overloadpacket.__name__}` of {held.name} would write what is no tensor of its shape",
            hint="compute with .full_tensor() of it",
        )
    if isinstance(target, ShardedTensor):
        target.local.copy_(target.span.cut(whole(target)))
        _count_changes(func, args, kwargs)
    else:
        target.copy_(dtensor_of(whole(target), held.span))
    return target


def _refuse_plain(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    tensors = _tensors((args, kwargs))
    plain = next((t for t in tensors if not isinstance(t, DTensor) and t.numel() != 1), None)
    if plain is not None:
        raise _mixed(func, next(t for t in tensors if isinstance(t, (ShardedTensor, WholeTensor, _WholeCopy))), plain)


def _mixed(
    func: torch_private.Kernel, tensor: ShardedTensor | _WholeCopy | WholeTensor, other: torch.Tensor
) -> LifecycleError:
    return LifecycleError(
        f"`{func.overloadpacket.__name__}` of {tensor.name} {tuple(tensor.shape)}, whose elements are spread over the "
        f"ranks, and of a plain tensor {tuple(other.shape)}, of which nobody knows whether every rank has the same",
        hint="use what .full_tensor() gives on every rank, or distribute_tensor(other, p.device_mesh, [Replicate()]); "
        "or compute in forward or inside `with fullshard.unsharded(model)`; copies of parameters (an average of the "
        "weights) are to be made after sharding",
    )


# -- reductions and other kernels with a rule of their own ------------------------------------------------------


def _all_dims(tensor: ShardedTensor, dim: Any, keepdim: bool) -> bool:
    dims = [dim] if isinstance(dim, int) else dim
    return not keepdim and (not dims or len(dims) == tensor.dim())


def _reduced(local: torch.Tensor, span: Span, placement: Placement) -> torch.Tensor:
    """What the ranks' parts come to. At once: `item()` of what torch has left partial is one rank's part of it."""
    parts = dtensor_of(local, span, placement)
    if span.is_tiled:  # torch warns of both axes in one go
        parts = parts.redistribute(placements=span.placements(None, placement))
    whole: torch.Tensor = parts.full_tensor()
    return whole


def _sum(func: torch_private.Kernel, tensor: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if not isinstance(tensor, ShardedTensor) or "out" in options or not _all_dims(tensor, dim, keepdim):
        return NotImplemented
    return WholeTensor.of(_reduced(tensor.local.sum(**options), tensor.span, Partial()), tensor.span)


def _mean(func: torch_private.Kernel, tensor: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    total = _sum(func, tensor, dim, keepdim, **options)
    return total if total is NotImplemented else total / tensor.numel()


def _norm(
    func: torch_private.Kernel, tensor: Any, order: float = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    if not isinstance(tensor, ShardedTensor) or "out" in options or not _all_dims(tensor, dim, keepdim):
        return NotImplemented
    span = tensor.span
    return WholeTensor.of(_reduced(_local_norm(tensor, order, **options), span, _placement_of_norm(order)), span)


def _local_norm(tensor: ShardedTensor, order: float, **options: Any) -> torch.Tensor:
    # Not every norm of nothing is 0; one of negative order is as small as the smallest element makes it.
    nothing = float("inf") if order < 0 else 0.0
    local = tensor.local if tensor.local.numel() else tensor.local.new_full((1,), nothing)
    norm: torch.Tensor = torch.linalg.vector_norm(local, order, **options)
    return norm


def _placement_of_norm(order: float) -> Placement:
    """A maximum, a minimum and a count need no root."""
    plain = {float("inf"): Partial("max"), float("-inf"): Partial("min"), 0.0: Partial()}
    return plain.get(float(order)) or torch_private.norm_partial(order)


def _norms(func: torch_private.Kernel, tensors: Sequence[torch.Tensor], order: float = 2, dtype: Any = None) -> Any:
    spans = [tensor.span for tensor in tensors if isinstance(tensor, ShardedTensor)]
    if (
        len(spans) < len(tensors)
        or len({(span.groups, tensor.dtype) for span, tensor in zip(spans, tensors, strict=True)}) > 1
    ):
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    locals_ = [_local_norm(tensor, order, dtype=dtype) for tensor in tensors]  # type: ignore[arg-type]
    norms = _reduced(torch.stack(locals_), spans[0], _placement_of_norm(order))
    return [WholeTensor.of(norm, span) for norm, span in zip(norms.unbind(), spans, strict=True)]


def _maxima(_func: torch_private.Kernel, tensors: Sequence[torch.Tensor]) -> Any:
    return [tensor.max() for tensor in tensors]


def _equal(_func: torch_private.Kernel, left: Any, right: Any) -> Any:
    are_both = isinstance(left, ShardedTensor) and isinstance(right, ShardedTensor)
    if left.shape != right.shape or not are_both or not left.span.is_like(right.span):
        return NotImplemented if left.shape == right.shape else False
    return _everywhere(torch.equal(left.local, right.local), left.span)


def _all_close(_func: torch_private.Kernel, left: Any, right: Any, *args: Any, **options: Any) -> bool:
    close = torch.isclose(left, right, *args, **options)
    if not isinstance(close, ShardedTensor):
        return bool(close.full_tensor().all() if isinstance(close, DTensor) else close.all())
    return _everywhere(bool(close.local.all()), close.span)


def _everywhere(holds: bool, span: Span) -> bool:
    """Whether something holds for the intervals of all ranks."""
    return not _reduced(torch.tensor(int(not holds), device=span.mesh.device), span, Partial()).item()


def _item(_func: torch_private.Kernel, tensor: ShardedTensor) -> Any:
    return tensor.span.gather(tensor.local).item()


def _new(func: torch_private.Kernel, tensor: ShardedTensor, size: Sequence[int], *args: Any, **options: Any) -> Any:
    """Of its shape it is laid out as the tensor, of any other every rank has it whole."""
    if tuple(size) == tuple(tensor.shape) and not func.overloadpacket.__name__.endswith("strided"):
        return ShardedTensor(func(tensor.local, tensor.local.shape, *args, **options), tensor.span)
    return dtensor_of(func(tensor.local, size, *args, **options), tensor.span)


def _is_same_size(_func: torch_private.Kernel, left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape


_SPECIAL: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "linalg_vector_norm": _norm,
    torch_private.MAX_OF_MANY: _maxima,
    torch_private.NORM_OF_MANY: _norms,
    "allclose": _all_close,
    "equal": _equal,
    torch_private.ITEM: _item,
    "is_same_size": _is_same_size,
    **dict.fromkeys(("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"), _new),
}
