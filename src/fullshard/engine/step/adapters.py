"""Adapters for optimizers that do not accept sharded parameters. Features register them."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fullshard.comm.mesh import Mesh
from fullshard.engine.parameter import ShardedParameter


class OptimizerAdapter:
    """Base class of adapters from optimizers to sharded parameters. It does nothing, which suits most optimizers."""

    # Whether the optimizer accesses a tensor's memory directly, and so rejects a wrapper of several tensors.
    needs_plain_memory: ClassVar[bool] = False
    # Whether its state consists of plain tensors of this rank's intervals, even between steps.
    keeps_plain_state: ClassVar[bool] = False
    # Whether it can update parts of tensors, even if its update rule is not element-wise.
    works_on_parts: ClassVar[bool] = False

    def takes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the adapter is for this optimizer."""
        return True

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare the optimizer for a step. Return the arguments with which `step` is to be called."""
        return args, kwargs

    def restore(self, optimizer: Any, *, has_stepped: bool = False) -> None:
        """Undo `before_step` if it has changed anything. If `has_stepped` is False, the step did not take place."""

    def why_no_full_state(self, optimizer: Any, mesh: Mesh) -> str:
        """Return which part of the optimizer's state a state dict cannot hold, or "" if it can hold everything."""
        return ""

    def is_laid_out(self, optimizer: Any, key: str) -> bool:
        """Return whether state under this key, if it has a parameter's shape, is sharded like the parameter."""
        return True

    def values(self, kept: Any) -> Any:
        """Return the values in a state entry of any optimizer, decoded if this adapter knows the entry's type."""
        return kept

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return one parameter's state as a state dict stores it, before tensors get the parameter's layout."""
        return state

    def kept(self, optimizer: Any, parameter: ShardedParameter, state: dict[str, Any]) -> Mapping[str, Any]:
        """Return one parameter's state as the optimizer keeps it. This is the inverse of `saved`, for intervals."""
        return state


_NONE = OptimizerAdapter()
_registered: list[OptimizerAdapter] = []


def register_adapters(*adapters: OptimizerAdapter) -> None:
    """Register adapters. For each optimizer, those registered earlier are tried first."""
    _registered.extend(adapters)


def adapter_of(optimizer: torch.optim.Optimizer) -> OptimizerAdapter:
    """Return the first adapter that accepts the optimizer, or one that does nothing."""
    return next((adapter for adapter in _registered if adapter.takes(optimizer)), _NONE)


def values_of(kept: Any) -> Any:
    """Return the values in a state entry, decoded by an adapter if one knows the entry's type."""
    for adapter in _registered:
        kept = adapter.values(kept)
    return kept
