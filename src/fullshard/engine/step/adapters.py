"""Optimizers that do not take sharded parameters as they are: a capability registers an adapter for its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fullshard.comm.mesh import Mesh
from fullshard.engine.parameter import ShardedParameter


class OptimizerAdapter:
    """Adapt an optimizer to sharded parameters. The base class does nothing, for optimizers that need nothing.

    Attributes:
        needs_plain_memory: whether the optimizer uses a tensor's memory directly, and so takes no wrapper of several.
        keeps_plain_state: whether its state is plain tensors of this rank's intervals, also between steps.
        works_on_parts: whether the optimizer is made to work with each rank's part, whatever its update depends on.
    """

    needs_plain_memory: ClassVar[bool] = False
    keeps_plain_state: ClassVar[bool] = False
    works_on_parts: ClassVar[bool] = False

    def takes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the adapter is for this optimizer."""
        return True

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments that `step` is to be called with."""
        return args, kwargs

    def rest(self, optimizer: Any, *, has_stepped: bool = False) -> None:
        """Undo what `before_step` has done, if it has done anything; it may be that no step was made."""

    def why_not_whole(self, optimizer: Any, mesh: Mesh) -> str:
        """Return how state is kept that a state dict cannot hold; empty if it can."""
        return ""

    def is_laid_out(self, optimizer: Any, key: str) -> bool:
        """Return whether a tensor with this key that has a parameter's shape is to be laid out as the parameter."""
        return True

    def values(self, kept: Any) -> Any:
        """Return the values of something in an optimizer's state, of whichever optimizer it is."""
        return kept

    def saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of one parameter as a state dict is to hold it, before it is laid out."""
        return state

    def kept(self, optimizer: Any, parameter: ShardedParameter, state: dict[str, Any]) -> Mapping[str, Any]:
        """Undo `saved`, with this rank's intervals in place of whole tensors."""
        return state


_NONE = OptimizerAdapter()
_registered: list[OptimizerAdapter] = []


def register_adapters(*adapters: OptimizerAdapter) -> None:
    """Ask these adapters, after those registered before, which optimizers they are for."""
    _registered.extend(adapters)


def adapter_of(optimizer: torch.optim.Optimizer) -> OptimizerAdapter:
    """Return the adapter that takes the optimizer."""
    return next((adapter for adapter in _registered if adapter.takes(optimizer)), _NONE)


def values_of(kept: Any) -> Any:
    """Return the values of something in an optimizer's state that an adapter knows; of anything else, itself."""
    for adapter in _registered:
        kept = adapter.values(kept)
    return kept
