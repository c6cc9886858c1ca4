"""A slice as code sees it that knows nothing of slices: it says so before it is taken for the whole.

    p.grad, p.detach(), p ** 2, torch.exp(p)    a `Slice` for the user's code, a plain tensor for optimizers
    optimizer.state_dict()                      slices for everybody
    element by element, a copy, a cast          a `Slice` again, which is right
    a sum, a norm, a maximum, a NumPy array     this rank's part of it, with a warning, once
    rows, a matrix product, a whole tensor      an error: what it is computed with is not there
    pickle, torch's checkpoint API, safetensors an error, and the way out

Optimizers and the engine never meet one, so that none of this is on their way.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import LifecycleError
from fullshard.core.layout import Interval
from fullshard.engine.callers import WAY_OUT, knows_slices, refuse_writers

LOCAL_RESULTS = frozenset(
    {"all", "amax", "amin", "any", "argmax", "argmin", "aminmax", "count_nonzero", "logsumexp", "max", "mean", "median"}
    | {"min", "prod", "quantile", "std", "std_mean", "sum", "var", "var_mean"}
    | {"dist", "dot", "inner", "matmul", "__matmul__", "matrix_norm", "norm", "vdot", "vector_norm"}
    | {"cat", "concat", "equal", "concatenate", "hstack", "stack", "vstack", "__array__", "item", "numpy", "tolist"}
    | torch_private.LOCAL_KERNELS
)
"""Functions of torch and methods of tensors whose result, of a slice, is not that of the whole tensor."""

_has_warned = False


class SlicedParameter(Protocol):
    """What a slice asks of the parameter that it is of, a `ShardedParameter`."""

    taken_for_whole: str

    @property
    def names(self) -> tuple[str, ...]:
        """Qualified names in the model."""

    @property
    def mesh(self) -> Mesh:
        """The ranks that share it."""

    @property
    def shape(self) -> torch.Size:
        """Of this rank's slice."""

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""

    @property
    def global_shape(self) -> torch.Size:
        """Of the whole."""

    @property
    def interval(self) -> Interval:
        """The elements that this rank owns."""

    def gather_full(self, local: torch.Tensor) -> torch.Tensor:
        """The whole of something that is laid out as it."""


class NotWhole:
    """What a slice refuses, whoever holds it. Mixed into `Slice` and `ShardedParameter`."""

    names: tuple[str, ...]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise LifecycleError(
            f"cannot pickle the slice of {self.names}: it is only this rank's part of the whole", hint=WAY_OUT
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory, for everybody who does not write it to a file."""
        refuse_writers(sys._getframe(1), "=".join(self.names))
        with torch_private.without_function():
            return super().untyped_storage()  # type: ignore[misc, no-any-return]

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """As of any tensor, with the same exception: safetensors asks this of each."""
        refuse_writers(sys._getframe(1), "=".join(self.names))
        with torch_private.without_function():
            return super().is_contiguous(*args, **kwargs)  # type: ignore[misc, no-any-return]

    def _refused(self, *_args: object) -> NoReturn:
        raise LifecycleError(
            f"torch.distributed.checkpoint would take this rank's slice of {'='.join(self.names)} for the whole",
            hint=WAY_OUT,
        )

    # What torch.distributed.checkpoint asks a tensor that is not all there (its `_Checkpointable`).
    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = _refused


class Slice(NotWhole, torch.Tensor):
    """This rank's slice of a parameter's values, gradient or optimizer state, shape (n,).

    Attributes:
        parameter: whose slice it is.
    """

    parameter: SlicedParameter

    @classmethod
    def of(cls, tensor: torch.Tensor, parameter: SlicedParameter) -> Slice:
        """The same memory, and the same place in autograd's graph."""
        with torch_private.without_dispatch():  # of a sharded parameter itself
            self = tensor.as_subclass(cls)
        self.parameter = parameter
        return self

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The parameter's qualified names."""
        return self.parameter.names

    @property
    def global_shape(self) -> torch.Size:
        """Shape of the whole."""
        return self.parameter.global_shape

    @property
    def interval(self) -> Interval:
        """The elements of the flattened whole that this is."""
        return self.parameter.interval

    @property
    def _fullshard_mesh(self) -> Mesh:
        return self.parameter.mesh

    def plain(self) -> torch.Tensor:
        """The same memory as an ordinary tensor."""
        with torch_private.without_function():
            return self.as_subclass(torch.Tensor)

    @torch.no_grad()
    def full_tensor(self) -> torch.Tensor:
        """The whole, a new tensor of shape `global_shape`. A collective, as `ShardedParameter.full_tensor`."""
        return self.parameter.gather_full(self.plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Slice:
        copied = memo[id(self)] = Slice.of(self.plain().detach().clone(), self.parameter)
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        held = next(_slices((*args, *kwargs.values())), None)
        with torch_private.without_function():
            return func(*args, **kwargs) if held is None else _compute_with_slice(func, held, args, kwargs)


def _compute_with_slice(func: Callable[..., Any], held: Slice, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A `Slice` again, if elements are treated alike; else a warning, or an error where the whole was meant.

    Raises:
        LifecycleError: rows are taken, a loss is made of it, or it meets a tensor of another shape.
    """
    name = func.__name__.removeprefix("linalg_")
    others = [value for value in (*args, *kwargs.values()) if _is_whole(value)]
    takes_rows = name == "__getitem__" and not isinstance(args[1], Slice)
    if takes_rows or name == "backward" or (held.requires_grad and _are_in_a_loss(held.parameter, others)):
        raise not_there(held.parameter, name)
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if others:
            raise not_there(held.parameter, name) from error
        error.add_note(f"fullshard: {_where(held.parameter)}\nhint: {_ELSEWHERE}")
        raise
    if type(result) is torch.Tensor and name not in LOCAL_RESULTS:
        if result.shape == held.shape:
            return Slice.of(result, held.parameter)
        if others:
            raise not_there(held.parameter, name)
    if name in LOCAL_RESULTS or type(result) in (torch.Tensor, tuple, list):
        warn_of_local_result(held.parameter, name, requires_grad=held.requires_grad)
    return result


def _slices(values: Sequence[Any]) -> Iterator[Slice]:
    for value in values:
        if isinstance(value, Slice):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _slices(value)


def warn_of_local_result(parameter: SlicedParameter, function: str, *, requires_grad: bool) -> None:
    """Say once that something was computed of this rank's slice alone. Nothing to say where that is the whole.

    Args:
        parameter: whose slice it was.
        function: what was computed.
        requires_grad: whether autograd comes back through it.
    """
    global _has_warned
    if parameter.mesh.shard_size == 1:
        return
    if function != "sum" and requires_grad and torch.is_grad_enabled():
        parameter.taken_for_whole = function
    if _has_warned:
        return
    _has_warned = True
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and knows_slices(frame):  # the line of the script's
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{function} of {parameter.names[0] if parameter.names else 'a sharded parameter'} or its gradient is that of "
        f"this rank's slice, elements {parameter.interval.start} to {parameter.interval.stop} of "
        f"{parameter.global_shape.numel()}, not of the whole. The whole: .full_tensor() on every rank; "
        "fullshard.clip_grad_norm_(model, float('inf')) is the norm of all gradients; a sum or a squared norm becomes "
        "the whole's by an all_reduce. Said once.",
        stacklevel=level,
    )


def compute_with(
    func: torch_private.Kernel, parameter: SlicedParameter, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """What a kernel of torch makes of a sharded parameter, for code that does not know slices.

    Raises:
        LifecycleError: the kernel does not treat elements alike, or has a tensor with other elements besides.
    """
    name = func.overloadpacket.__name__
    function = name.removeprefix("linalg_")
    if function in LOCAL_RESULTS:
        warn_of_local_result(parameter, function, requires_grad=parameter.requires_grad)
        return func(*args, **kwargs)
    if name.startswith(torch_private.FOREACH_KERNELS):
        for together in zip(*(arg for arg in args if isinstance(arg, (list, tuple))), strict=False):
            shapes = {tensor.shape for tensor in together if isinstance(tensor, NotWhole)}  # type: ignore[attr-defined]
            if any(_is_whole(tensor) and tensor.shape not in shapes for tensor in together if shapes):
                raise not_there(parameter, name)
        return func(*args, **kwargs)
    if name.startswith("new_"):
        return func(*args, **kwargs)
    is_alike = name in _ELEMENT_WISE or torch.Tag.pointwise in func.tags
    others = [value for value in (*args, *kwargs.values()) if _is_whole(value)]
    if not is_alike or any(other.shape != parameter.shape for other in others) or _are_in_a_loss(parameter, others):
        raise not_there(parameter, name)
    result = func(*args, **kwargs)
    if result is args[0] or not isinstance(result, torch.Tensor):
        return result
    if result.shape != parameter.shape:
        raise not_there(parameter, name)
    return Slice.of(result, parameter)


_ELEMENT_WISE = frozenset(
    torch_private.COPY_KERNELS
    | {"alias", "bernoulli_", "clone", "copy_", "detach", "empty_like", "fill_", "full_like", "normal_"}
    | {"ones_like", "rand_like", "randn_like", "uniform_", "view", "zero_", "zeros_like"}
)
"""Kernels that treat elements alike, besides those that torch marks so."""


def _is_whole(value: object) -> bool:
    """Whether it is a tensor of several elements, of which nobody has said that it is a slice."""
    return isinstance(value, torch.Tensor) and not isinstance(value, NotWhole) and value.numel() != 1


def _are_in_a_loss(parameter: SlicedParameter, others: Sequence[torch.Tensor]) -> bool:
    """Whether autograd would see the slice beside something of the whole's shape; on one rank that may be its own."""
    is_shape = parameter.mesh.shard_size > 1 and torch.is_grad_enabled()
    return is_shape and any(other.shape == parameter.global_shape for other in others)


_ELSEWHERE = (
    "compute with it in the forward of its unit, inside `with fullshard.unsharded(model)`, or with what .full_tensor() "
    "gives on every rank"
)


def _where(parameter: SlicedParameter) -> str:
    return (
        f"sharded parameter {'='.join(parameter.names)} {tuple(parameter.global_shape)}, of which rank "
        f"{parameter.mesh.rank} has elements {parameter.interval.start} to {parameter.interval.stop}, in one dimension"
    )


def not_there(parameter: SlicedParameter, name: str) -> LifecycleError:
    """What the function `name` wants is not there on any one rank."""
    return LifecycleError(f"`{name}` of {_where(parameter)}", hint=_ELSEWHERE)
