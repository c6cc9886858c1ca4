"""The arguments of a torch kernel: the tensors in them, those that it writes, and combinations that are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.core.errors import LifecycleError
from fullshard.engine.sharded_tensor import ShardedTensor, SpreadTensor
from fullshard.features.dtensor_ops import torch_private


def map_arguments(value: Any, kind: type[torch.Tensor], function: Callable[[Any], Any]) -> Any:
    """Return `value`, a kernel's arguments or result, with `function` applied to each tensor of that kind."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {key: map_arguments(item, kind, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([map_arguments(item, kind, function) for item in value])
    return value


def call_with(
    func: torch_private.Kernel,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    kind: type[torch.Tensor],
    function: Callable[[Any], Any],
) -> Any:
    """Call a kernel with `function` applied to each tensor of that kind in its arguments, and return the result."""
    return func(*map_arguments(args, kind, function), **map_arguments(kwargs, kind, function))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a kernel's arguments or result."""
    found: list[torch.Tensor] = []
    map_arguments(value, torch.Tensor, found.append)
    return found


def first_sharded(value: Any) -> ShardedTensor | None:
    """Return the first sharded tensor in a value."""
    return next((tensor for tensor in tensors_in(value) if isinstance(tensor, ShardedTensor)), None)


def target_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the target of a kernel that writes; `features.dtensor_ops` has made sure that it writes nothing else."""
    return kwargs.get("out", args[0])


def written_tensors(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return all tensors that a kernel writes to."""
    places = torch_private.written(func)
    return tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in places])


def may_differ(tensor: torch.Tensor) -> bool:
    """Return whether ranks may differ in a tensor: a plain one of several elements, unless the script excludes that.

    With gradients a script cannot exclude it: gradients that come back to a plain tensor would be spread over ranks.
    """
    if isinstance(tensor, DTensor) or tensor.numel() == 1:
        return False
    return torch.is_grad_enabled() or not torch_private.takes_plain_as_replicated()


def refuse_plain(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for a plain tensor of several elements beside one that is spread over ranks, or was computed of such."""
    tensors = tensors_in((args, kwargs))
    plain = next(filter(may_differ, tensors), None)
    if plain is not None:
        raise mixed(func, next(t for t in tensors if isinstance(t, SpreadTensor)), plain)


def mixed(func: torch_private.Kernel, spread: SpreadTensor, plain: torch.Tensor) -> LifecycleError:
    """Return the error for a mix of a spread and a plain tensor."""
    whole = "unsharded(model, writeback=True)" if torch_private.written(func) else "unsharded(model)"
    return LifecycleError(
        f"`{func.overloadpacket.__name__}` of {spread.name} {tuple(spread.shape)}, a DTensor, and of a plain tensor "
        f"{tuple(plain.shape)}, of which nobody knows whether every rank has the same",
        hint="use what .full_tensor() gives on every rank, or distribute_tensor(other, p.device_mesh, [Replicate()]); "
        "if all have the same, say so by torch's implicit_replication(), under no_grad(); or compute in forward or "
        f"inside `with fullshard.{whole}`; an average of the weights is fullshard.EMA(model), or of copies that were "
        "made after sharding, or of a model that is sharded alike",
    )
