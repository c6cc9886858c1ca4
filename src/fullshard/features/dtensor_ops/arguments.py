"""Find the tensors among a torch kernel's arguments, and refuse combinations that are not supported."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.core.errors import LifecycleError
from fullshard.engine.sharded_tensor import ShardedTensor, SpreadTensor
from fullshard.features.dtensor_ops import torch_private


def map_arguments(value: Any, kind: type[torch.Tensor], function: Callable[[Any], Any]) -> Any:
    """Apply `function` to each tensor of type `kind` in a kernel's arguments or result, and return the outcome."""
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
    """Apply `function` to each tensor of type `kind` in the arguments, then call the kernel and return its result."""
    return func(*map_arguments(args, kind, function), **map_arguments(kwargs, kind, function))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a kernel's arguments or result."""
    found: list[torch.Tensor] = []
    map_arguments(value, torch.Tensor, found.append)
    return found


def first_sharded(value: Any) -> ShardedTensor | None:
    """Return the first sharded tensor in a kernel's arguments or result, or None if there is none."""
    return next((tensor for tensor in tensors_in(value) if isinstance(tensor, ShardedTensor)), None)


def target_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the tensor that a kernel writes to: `out` or the first argument. `_check_changes` rejects others."""
    return kwargs.get("out", args[0])


def written_tensors(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return all tensors that a kernel writes to."""
    places = torch_private.written(func)
    return tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in places])


def may_differ(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may have different values on different ranks.

    This is true for a plain tensor with several elements, unless the script uses torch's `implicit_replication()` to
    declare such tensors equal. The declaration is ignored while gradients are enabled, because the gradient of the
    plain tensor would be sharded.
    """
    if isinstance(tensor, DTensor) or tensor.numel() == 1:
        return False
    return torch.is_grad_enabled() or not torch_private.takes_plain_as_replicated()


def refuse_plain(func: torch_private.Kernel, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise an error if a plain tensor with several elements is used with a sharded tensor or a result of one."""
    tensors = tensors_in((args, kwargs))
    plain = next(filter(may_differ, tensors), None)
    if plain is not None:
        raise mixed(func, next(t for t in tensors if isinstance(t, SpreadTensor)), plain)


def mixed(func: torch_private.Kernel, spread: SpreadTensor, plain: torch.Tensor) -> LifecycleError:
    """Return the error to raise when a kernel receives a sharded tensor together with a plain tensor."""
    whole = "unsharded(model, writeback=True)" if torch_private.written(func) else "unsharded(model)"
    return LifecycleError(
        f"`{func.overloadpacket.__name__}` was called with {spread.name} {tuple(spread.shape)}, a DTensor, and a "
        f"plain tensor {tuple(plain.shape)}, which may differ between ranks",
        hint=(
            "use the result of .full_tensor(), or distribute_tensor(other, p.device_mesh, [Replicate()]); if the "
            "plain tensor is equal on all ranks, use torch's implicit_replication() under no_grad(); or compute in "
            f"forward or inside `with fullshard.{whole}`. For an average of the weights, use fullshard.EMA(model), or "
            "average copies that were made after sharding or from a model with the same sharding"
        ),
    )
