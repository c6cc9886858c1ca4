"""Torch kernels for sharded tensors, with the same results as for the unsharded tensors.

elementwise kernels, copies, casts          computed on each rank's interval; the result is a `ShardedTensor`
rows, reshapes, splits along the first dim  views: a `ShardedTensor` for a part of the same memory
sums, means, norms                          computed on each rank's part and reduced immediately, in a collective. The
                                            result is a `WholeTensor`, which becomes a plain tensor when combined with
                                            plain numbers, for example when a penalty is added to a loss
random numbers                              same values as in a single process: each rank draws the numbers for the
                                            complete tensor and keeps those of its interval
all other kernels                           computed on the gathered tensor, in a collective, as in torch's DTensor

A kernel that changes a tensor in place changes it on every rank or raises an error. No kernel treats one rank's
elements as if they were the complete tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement

from fullshard.core.errors import LifecycleError
from fullshard.engine.shard_spec import ShardSpec
from fullshard.engine.sharded_tensor import ShardedTensor, dtensor_of, shard_of
from fullshard.features.dtensor_ops import torch_private
from fullshard.features.dtensor_ops.arguments import (
    call_with,
    first_sharded,
    map_arguments,
    may_differ,
    mixed,
    refuse_plain,
    target_of,
    tensors_in,
    written_tensors,
)
from fullshard.features.dtensor_ops.whole_tensor import WholeCopy, WholeTensor

_ALIKE = frozenset(
    torch_private.COPY_KERNELS
    | {"alias", "clone", "copy_", "detach", "empty_like", "fill_", "full_like", "ones_like", "zero_", "zeros_like"}
    | {"is_pinned", "lift_fresh", "pin_memory"}
)
"""Kernels that work element by element although torch does not tag them as pointwise."""


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


def _check_changes(func: torch_private.Kernel, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise an error if a kernel changes a tensor's shape or writes to an argument other than the first or `out`."""
    if not torch_private.writes(func) or name.startswith(torch_private.MANY_KERNELS):
        return
    is_known = all(index == 0 or argument == "out" for index, argument in torch_private.written(func))
    if is_known and (torch.Tag.inplace_view not in func.tags or name == "detach_"):
        return
    held = first_sharded((args, kwargs))
    raise LifecycleError(
        f"`{name}` of {'a tensor' if held is None else held.name} would change more than the values of one tensor",
        hint="use .full_tensor(), or a function that returns a new tensor; register parametrizations before sharding",
    )


def _alike(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise kernel on this rank's intervals, without communication if all arguments can be cut to them."""
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        held = first_sharded((args, kwargs))
        raise LifecycleError(
            f"cannot convert {'a tensor' if held is None else held.name} to {kwargs['memory_format']}: each rank "
            "holds an interval of its elements, in the original order",
            hint="convert the inputs with x.to(memory_format=...); convolutions compute in the format of their input",
        )
    target = target_of(args, kwargs) if torch_private.writes(func) else first_sharded((args, kwargs))
    if not isinstance(target, ShardedTensor) or not all(_fits(t, target.spec) for t in tensors_in((args, kwargs))):
        return _gathered(func, args, kwargs)
    made = _Locals(target, func)
    result = call_with(func, args, kwargs, torch.Tensor, made.of)
    _count_changes(func, args, kwargs)
    return map_arguments(result, torch.Tensor, made.wrap)


def _count_changes(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Increment the version counters of changed local tensors. Torch increments only the wrappers' counters."""
    locals_ = [tensor.local for tensor in written_tensors(func, args, kwargs) if isinstance(tensor, ShardedTensor)]
    if locals_:
        torch.autograd.graph.increment_version(locals_)


def _fits(tensor: torch.Tensor, spec: ShardSpec) -> bool:
    """Return whether the tensor can be broadcast to the shape of `spec`."""
    sizes = zip(reversed(tensor.shape), reversed(spec.shape), strict=False)
    return tensor.dim() <= len(spec.shape) and all(size in (1, wanted) for size, wanted in sizes)


class _Locals:
    """Converts the arguments of one kernel call to local tensors, and wraps the local results as sharded tensors."""

    def __init__(self, target: ShardedTensor, func: torch_private.Kernel) -> None:
        self.target, self._spec, self._func = target, target.spec, func
        self._wrapped: dict[int, ShardedTensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the local tensor that the kernel receives in place of `tensor`."""
        if isinstance(tensor, ShardedTensor) and self._spec.is_like(tensor.spec):
            self._wrapped[id(tensor.local)] = tensor
            return tensor.local
        if isinstance(tensor, DTensor):
            own = shard_of(tensor, self._spec)
            if own is not None:
                return own
            tensor = _plain_whole(tensor)
        elif may_differ(tensor):
            raise mixed(self._func, self.target, tensor)
        if tensor.dim() == 0:
            return tensor
        if tensor.numel() == 1:  # expand it, or the kernel would resize an empty `out`
            return tensor.reshape([1] * len(self._spec.local_shape)).expand(self._spec.local_shape)
        return self._spec.cut(tensor)

    def wrap(self, result: torch.Tensor) -> torch.Tensor:
        """Return `result` as a `ShardedTensor`, or the original argument if the kernel returned its local tensor."""
        known = self._wrapped.get(id(result))
        return ShardedTensor(result, self._spec) if known is None else known


def _many(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a kernel that takes lists of tensors, such as the `_foreach` kernels that optimizers use."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
    held = first_sharded(lists)
    assert held is not None  # noqa: S101 -- else this would not have been asked
    first = (
        lists[0] if torch_private.writes(func) else next(value for value in lists if first_sharded(value) is not None)
    )
    made = [_Locals(tensor, func) if isinstance(tensor, ShardedTensor) else None for tensor in first]
    for position, one in enumerate(made):
        if one is None and isinstance(first[position], torch.Tensor):
            at_once = [value[position] for value in lists if len(value) == len(first)]
            like, changed = first_sharded(at_once), first[position]
            if like is not None and isinstance(changed, DTensor) and shard_of(changed, like.spec) is not None:
                made[position] = _Locals(like, func)  # a torch DTensor with the same rows
            elif any(isinstance(tensor, DTensor) for tensor in at_once):
                refuse_plain(func, at_once, {})

    for changed in (args[i] if i < len(args) else kwargs.get(key) for i, key in torch_private.written(func)):
        if isinstance(changed, (list, tuple)):
            _check_laid_out(func, held, [None if one is None else one.target for one in made], changed)

    def local(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return _plain_whole(value) if isinstance(value, DTensor) else value
        if len(value) != len(first):
            return value
        return [_own(one, tensor) for one, tensor in zip(made, value, strict=True)]

    result = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    _count_changes(func, args, kwargs)
    if result is None:
        return None

    def wrapped(one: _Locals | None, of: Any, made: torch.Tensor) -> torch.Tensor:
        if one is not None:
            return one.wrap(made)
        return WholeTensor.of(made, held.spec) if isinstance(of, DTensor) else made

    return list(map(wrapped, made, first, result))


def _check_laid_out(
    func: torch_private.Kernel, held: ShardedTensor, likes: Sequence[ShardedTensor | None], changed: Sequence[Any]
) -> None:
    """Raise an error if a kernel would write to a converted copy of a tensor rather than to the tensor's own memory."""
    for like, tensor in zip(likes, changed, strict=False):  # some state is missing
        if not isinstance(tensor, DTensor):
            continue
        beside = held if like is None else like
        is_its_memory = isinstance(tensor, WholeTensor) if like is None else shard_of(tensor, like.spec) is not None
        if not is_its_memory:
            raise LifecycleError(
                f"`{func.overloadpacket.__name__}` would change a {type(tensor).__name__} {tuple(tensor.shape)} "
                f"placed as {tensor.placements} together with {beside.name}, which is placed as {beside.placements}",
                hint="make the tensor with torch.zeros_like(p) or p.detach().clone(), or change one tensor at a time",
            )


def _own(one: _Locals | None, tensor: Any) -> Any:
    """Return the local argument for an item of a list, converted by `one` unless the item is computed as a whole."""
    if one is not None and isinstance(tensor, torch.Tensor):
        return one.of(tensor)
    if isinstance(tensor, WholeTensor):
        return torch_private.local_of(tensor)  # the memory itself, because it may be written to
    return _plain_whole(tensor) if isinstance(tensor, DTensor) else tensor


def _view(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a view kernel. Return views if they are intervals of the flattened tensor, or else read-only copies."""
    tensor = args[0]
    if isinstance(tensor, ShardedTensor) and first_sharded((args[1:], kwargs)) is None:
        views = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args[1:], **kwargs)
        parts = views if isinstance(views, (list, tuple)) else [views]
        is_whole = all(part.shape == tensor.shape for part in parts)
        spec = tensor.spec
        is_row_by_row = is_whole or (spec.is_row_by_row and not (spec.is_chunked or spec.is_by_rows))
        if is_row_by_row and all(part.is_contiguous() and part.dtype == tensor.dtype for part in parts):
            made = [_part_of(tensor, part) for part in parts]
            return made if isinstance(views, (list, tuple)) else made[0]
    held = first_sharded((args, kwargs))
    assert held is not None  # noqa: S101 -- else this would not have been asked
    return map_arguments(_gathered(func, args, kwargs), DTensor, lambda copy: WholeCopy.of(copy, held))


def _part_of(tensor: ShardedTensor, view: torch.Tensor) -> ShardedTensor:
    if tensor.spec.is_by_rows:
        return ShardedTensor(tensor.local, tensor.spec)
    start, spec = int(view.storage_offset()), tensor.spec
    part = spec.narrow(view.shape, start)
    own = part.interval.shift(start - spec.interval.start)
    return ShardedTensor(tensor.local[own.start : own.stop] if own.numel else tensor.local[:0], part)


def _random(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw the numbers for the complete tensor, as a single process would, and keep this rank's interval."""
    tensor = args[0]
    is_fresh = torch_private.writes(func) or func.overloadpacket.__name__.endswith("_like")
    if not isinstance(tensor, ShardedTensor):
        return _gathered(func, args, kwargs)
    spec, local = tensor.spec, tensor.local
    whole = torch.empty(spec.shape, dtype=local.dtype, device=local.device) if is_fresh else tensor.full_tensor()
    result = call_with(func, (whole, *args[1:]), kwargs, DTensor, _plain_whole)
    if torch_private.writes(func):
        local.copy_(spec.cut(whole))
        _count_changes(func, args, kwargs)
        return tensor
    return map_arguments(
        result,
        torch.Tensor,
        lambda made: (
            ShardedTensor(spec.cut(made).clone(), spec) if made.shape == spec.shape else WholeTensor.of(made, spec)
        ),
    )


def _plain_whole(tensor: DTensor) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        return tensor.spec.gather(tensor.local)
    detached: Any = tensor.detach()  # otherwise, torch detaches in place, which failed before 2.12
    whole: torch.Tensor = detached.full_tensor()
    return whole


def _gathered(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Gather the tensors on every rank and run the kernel on them. If it writes to a tensor, shard that one again."""
    refuse_plain(func, args, kwargs)
    wholes: dict[int, torch.Tensor] = {}

    def whole(tensor: DTensor) -> torch.Tensor:
        if id(tensor) not in wholes:
            wholes[id(tensor)] = _plain_whole(tensor)
        return wholes[id(tensor)]

    held = first_sharded((args, kwargs))
    assert held is not None  # noqa: S101 -- else this would not have been asked
    result = call_with(func, args, kwargs, DTensor, whole)
    if not torch_private.writes(func):
        return map_arguments(result, torch.Tensor, lambda made: WholeTensor.of(made, held.spec))
    target = target_of(args, kwargs)
    if not isinstance(target, DTensor) or whole(target).shape != target.shape:
        raise LifecycleError(
            f"`{func.overloadpacket.__name__}` of {held.name} would write a tensor of a different shape",
            hint="use .full_tensor()",
        )
    if isinstance(target, ShardedTensor):
        target.local.copy_(target.spec.cut(whole(target)))
        _count_changes(func, args, kwargs)
    else:
        target.copy_(dtensor_of(whole(target), held.spec))
    return target


def _all_dims(tensor: ShardedTensor, dim: Any, keepdim: bool) -> bool:
    dims = [dim] if isinstance(dim, int) else dim
    return not keepdim and (not dims or len(dims) == tensor.dim())


def _reduced(local: torch.Tensor, spec: ShardSpec, placement: Placement) -> torch.Tensor:
    """Reduce the ranks' results at once, because `item()` of a partial DTensor would return one rank's part."""
    parts = dtensor_of(local, spec, placement)
    if spec.is_chunked:  # torch warns if both axes are reduced at once
        parts = parts.redistribute(placements=spec.placements(None, placement))
    whole: torch.Tensor = parts.full_tensor()
    return whole


def _sum(func: torch_private.Kernel, tensor: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if not isinstance(tensor, ShardedTensor) or "out" in options or not _all_dims(tensor, dim, keepdim):
        return NotImplemented
    return WholeTensor.of(_reduced(tensor.local.sum(**options), tensor.spec, Partial()), tensor.spec)


def _mean(func: torch_private.Kernel, tensor: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    total = _sum(func, tensor, dim, keepdim, **options)
    return total if total is NotImplemented else total / tensor.numel()


def _norm(
    func: torch_private.Kernel, tensor: Any, order: float = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    if not isinstance(tensor, ShardedTensor) or "out" in options or not _all_dims(tensor, dim, keepdim):
        return NotImplemented
    # The norm of an empty tensor is not always 0: for negative orders it is the neutral element of a minimum.
    nothing = float("inf") if order < 0 else 0.0
    local = tensor.local if tensor.local.numel() else tensor.local.new_full((1,), nothing)
    norm: torch.Tensor = torch.linalg.vector_norm(local, order, **options)
    # A maximum, a minimum and a count need no root.
    plain = {float("inf"): Partial("max"), float("-inf"): Partial("min"), 0.0: Partial()}
    placement = plain.get(float(order)) or torch_private.norm_partial(order)
    return WholeTensor.of(_reduced(norm, tensor.spec, placement), tensor.spec)


def _new(func: torch_private.Kernel, tensor: ShardedTensor, size: Sequence[int], *args: Any, **options: Any) -> Any:
    """Create a new tensor. It is sharded like `tensor` if it has the same shape, and replicated otherwise."""
    if tuple(size) == tuple(tensor.shape) and not func.overloadpacket.__name__.endswith("strided"):
        return ShardedTensor(func(tensor.local, tensor.local.shape, *args, **options), tensor.spec)
    return dtensor_of(func(tensor.local, size, *args, **options), tensor.spec)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "linalg_vector_norm": _norm,
    torch_private.MAX_OF_MANY: lambda _, tensors: [tensor.max() for tensor in tensors],
    torch_private.NORM_OF_MANY: lambda _, tensors, order=2, dtype=None: [
        torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors
    ],
    "equal": lambda func, *tensors: _gathered(func, tensors, {}),  # torch tags it as elementwise
    torch_private.ITEM: lambda _, tensor: tensor.spec.gather(tensor.local).item(),
    "is_same_size": lambda _, left, right: left.shape == right.shape,
    **dict.fromkeys(("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"), _new),
}

torch_private.keep_compiler_out(_compute)  # the compiler would trace only part of a rule, and reduce twice
ShardedTensor._compute = staticmethod(_compute)
