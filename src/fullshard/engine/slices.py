"""A slice as code sees it that knows nothing of slices: it says so before it is taken for the whole.

    p.grad, p.detach(), p.data, p ** 2, ...     a `Slice` for the user's code, a plain tensor for optimizers
    optimizer.state_dict()                      slices for everybody
    element by element, a copy, a cast          a `Slice` again, which is right
    a sum, a norm, a maximum, a NumPy array     this rank's part of it, with a warning, once
    pickle, torch's checkpoint API, safetensors an error, and the way out

Optimizers and the engine never meet one, so that none of this is on their way.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from fullshard.core.errors import LifecycleError
from fullshard.core.layout import Interval
from fullshard.engine.callers import WAY_OUT, knows_slices, refuse_writers

if TYPE_CHECKING:
    from fullshard.comm.mesh import Mesh
    from fullshard.engine.parameter import ShardedParameter

LOCAL_RESULTS = frozenset(
    {"all", "amax", "amin", "any", "argmax", "argmin", "aminmax", "count_nonzero", "logsumexp", "max", "mean", "median"}
    | {"min", "prod", "quantile", "std", "std_mean", "sum", "var", "var_mean"}
    | {"_foreach_norm", "dist", "dot", "inner", "matmul", "__matmul__", "matrix_norm", "norm", "vdot", "vector_norm"}
    | {"cat", "concat", "concatenate", "hstack", "stack", "vstack"}
    | {"__array__", "item", "numpy", "tolist"}
)
"""Functions of torch and methods of tensors whose result, of a slice, is not that of the whole tensor."""

_has_warned = False


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
        with torch._C.DisableTorchFunctionSubclass():
            return super().untyped_storage()  # type: ignore[misc, no-any-return]

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        """As of any tensor, with the same exception: safetensors asks this of each."""
        refuse_writers(sys._getframe(1), "=".join(self.names))
        with torch._C.DisableTorchFunctionSubclass():
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

    parameter: ShardedParameter

    @classmethod
    def of(cls, tensor: torch.Tensor, parameter: ShardedParameter) -> Slice:
        """The same memory, and the same place in autograd's graph."""
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
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @torch.no_grad()
    def full_tensor(self) -> torch.Tensor:
        """The whole, a new tensor of shape `global_shape`. A collective, as `ShardedParameter.full_tensor`."""
        return gather_interval(self.plain(), self.parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Slice:
        copied = memo[id(self)] = Slice.of(self.plain().detach().clone(), self.parameter)
        return copied

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            held = next(_slices((*args, *(kwargs or {}).values())), None)
            if held is None:
                return result
            if func.__name__.removeprefix("linalg_") in LOCAL_RESULTS:
                warn_of_local_result(held.parameter, func.__name__)
            elif type(result) is torch.Tensor and result.shape == held.shape:
                return Slice.of(result, held.parameter)
            return result


def _slices(values: Sequence[Any]) -> Iterator[Slice]:
    for value in values:
        if isinstance(value, Slice):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _slices(value)


def warn_of_local_result(parameter: ShardedParameter, function: str) -> None:
    """Say once that something was computed from this rank's slice alone. Nothing to say where that is the whole."""
    global _has_warned
    if _has_warned or parameter.mesh.shard_size == 1:
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


def gather_interval(local: torch.Tensor, parameter: ShardedParameter) -> torch.Tensor:
    """The whole tensor of which `local` is this rank's interval, laid out as `parameter` (itself, or its state).

    Every owner broadcasts its interval straight into place. At large world sizes few ranks own any of it.
    """
    layout, index, mesh = parameter._bucket.layout, parameter._index, parameter.mesh
    full = torch.empty(parameter.global_shape.numel(), dtype=local.dtype, device=mesh.device)
    full[parameter.interval.start : parameter.interval.stop] = local
    for owner in range(mesh.shard_size):
        interval = layout.interval(index, owner)
        if interval.numel and mesh.shard_group is not None:
            dist.broadcast(full[interval.start : interval.stop], group=mesh.shard_group, group_src=owner)
    return full.view(parameter.global_shape)


def method_of_slice(name: str) -> Callable[..., Any]:
    """Method `name` of a sharded parameter: a tensor's for who knows slices, a `Slice`'s for everybody else."""
    plain = getattr(torch.Tensor, name)

    def method(self: ShardedParameter, *args: Any, **kwargs: Any) -> Any:
        if knows_slices(sys._getframe(1)):
            return plain(self, *args, **kwargs)
        return getattr(Slice.of(self, self), name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, plain.__doc__
    return method
