"""Adapters for optimizers that do not accept sharded parameters. A feature registers the adapters it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fullshard.comm.mesh import Mesh
from fullshard.engine.parameter import ShardedParameter


class OptimizerAdapter:
    """Base class that adapts an optimizer to sharded parameters. It does nothing, which suits most optimizers.

    Attributes:
        needs_plain_memory: whether the optimizer accesses a tensor's memory directly, and so rejects a wrapper of
            several tensors.
        keeps_plain_state: whether its state consists of plain tensors of this rank's intervals, even between steps.
        works_on_parts: whether the optimizer can update each rank's part, whatever its update rule depends on.
    """

    needs_plain_memory: ClassVar[bool] = False
    keeps_plain_state: ClassVar[bool] = False
    works_on_parts: ClassVar[bool] = False

    def takes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the adapter is for this optimizer."""
        return True

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with which `step` must be called."""
        return args, kwargs

    def rest(self, optimizer: Any, *, has_stepped: bool = False) -> None:
        """Undo `before_step` if it has changed anything. The optimizer may not have stepped in between."""

    def why_not_whole(self, optimizer: Any, mesh: Mesh) -> str:
        """Return which part of the optimizer's state a state dict cannot hold, or "" if it can hold everything."""
        return ""

    def is_laid_out(self, optimizer: Any, key: str) -> bool:
        """Return whether a state tensor with this key and a parameter's shape gets the parameter's layout."""
        return True

    def values(self, kept: Any) -> Any:
        """Return the values behind a state entry of any optimizer."""
        return kept

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of one parameter in the form for a state dict, before tensors get their layout."""
        return state

    def kept(self, optimizer: Any, parameter: ShardedParameter, state: dict[str, Any]) -> Mapping[str, Any]:
        """Undo `saved`, with this rank's intervals instead of full tensors."""
        return state


_NONE = OptimizerAdapter()
_registered: list[OptimizerAdapter] = []


def register_adapters(*adapters: OptimizerAdapter) -> None:
    """Register adapters, which are tried after those registered before."""
    _registered.extend(adapters)


def adapter_of(optimizer: torch.optim.Optimizer) -> OptimizerAdapter:
    """Return the adapter for the optimizer."""
    return next((adapter for adapter in _registered if adapter.takes(optimizer)), _NONE)


def values_of(kept: Any) -> Any:
    """Return the values behind a state entry that an adapter recognizes. Return any other entry unchanged."""
    for adapter in _registered:
        kept = adapter.values(kept)
    return kept
