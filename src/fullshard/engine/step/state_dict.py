"""An optimizer's state dict, whose tensors are slices: they say so, and whole ones are cut when they are loaded."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fullshard.comm import torch_private
from fullshard.core.errors import OptimizerError
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.slices import Slice

SEEN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have stepped or loaded a state, so all that have one."""


@functools.wraps(torch_private.state_dict.torchs)
def state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Torch's, with a `Slice` in place of each tensor that is one."""
    return _map_states(optimizer, torch_private.state_dict.torchs(optimizer), _as_slices)


def _as_slices(state: dict[str, Any], parameter: ShardedParameter) -> dict[str, Any]:
    return {
        key: Slice.of(value, parameter) if type(value) is torch.Tensor and value.shape == parameter.shape else value
        for key, value in state.items()
    }


@functools.wraps(torch_private.load_state_dict.torchs)
def load_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Torch's loading, after whole tensors are cut to this rank's intervals."""
    torch_private.load_state_dict.torchs(optimizer, _map_states(optimizer, state_dict, cut_state))
    SEEN.add(optimizer)


@functools.wraps(torch_private.set_state.torchs)
def set_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Where every optimizer's loading ends: each `Slice` becomes a plain tensor, if it is this rank's."""
    states = state.get("state", {})
    for parameter, held in states.items():
        if isinstance(parameter, ShardedParameter) and any(isinstance(value, Slice) for value in held.values()):
            states[parameter] = {key: _own(value, parameter, key) for key, value in held.items()}
    torch_private.set_state.torchs(optimizer, state)


def _own(value: Any, parameter: ShardedParameter, key: str) -> Any:
    if not isinstance(value, Slice):
        return value
    if value.interval != parameter.interval or value.global_shape != parameter.global_shape:
        raise OptimizerError(
            f"rank {parameter.mesh.rank}: state {key!r} of {'='.join(parameter.names)} {tuple(parameter.global_shape)} "
            f"is that of {'='.join(value.names)} {tuple(value.global_shape)}, its elements {value.interval.start} to "
            f"{value.interval.stop}, expected {parameter.interval.start} to {parameter.interval.stop}",
            hint="load whole tensors, or a checkpoint with fullshard.checkpoint.load_checkpoint",
        )
    return value.plain()


def _map_states(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    function: Callable[[dict[str, Any], ShardedParameter], dict[str, Any]],
) -> dict[str, Any]:
    """`state_dict` with `function` applied to the state of each sharded parameter."""
    saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    held = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state = dict(state_dict["state"])
    for key, parameter in zip(saved, held, strict=False):  # other lengths are torch's to refuse
        if key in state and isinstance(parameter, ShardedParameter):
            state[key] = function(state[key], parameter)
    return {**state_dict, "state": state}


def optimizer_among_seen(state_dict: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """The optimizer whose `state_dict()` this is, recognised by the tensors in it; None for anything else."""
    given = _owner_ids(state_dict["state"])
    return next((optimizer for optimizer in SEEN if given & _owner_ids(optimizer.state)), None)


def _owner_ids(state: Mapping[Any, Mapping[str, Any]]) -> set[int]:
    """Of the sharded parameters that an optimizer or its state dict has state of, and of the tensors of other state."""
    values = itertools.chain.from_iterable(values.values() for values in state.values())
    ids = {id(v.parameter if isinstance(v, Slice) else v) for v in values if isinstance(v, torch.Tensor)}
    return ids | {id(key) for key in state if isinstance(key, ShardedParameter)}


def cut_state(state: dict[str, Any], sharded: ShardedParameter) -> dict[str, Any]:
    """The state of a whole parameter, cut to this rank's interval."""
    interval = sharded.interval
    cut = {}
    for key, value in state.items():
        # The step count is a 0-D tensor, and so is all state of a scalar parameter.
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, Slice)
        per_element = is_tensor and value.shape == sharded.global_shape and key != "step"
        cut[key] = value.reshape(-1)[interval.start : interval.stop].clone() if per_element else value
    return cut
