"""State dicts of optimizers with sharded parameters.

Saving wraps each rank's state tensors as sharded tensors, and loading cuts plain tensors to this rank's intervals. The
functions that replace torch's methods have the same argument names as the methods, because torch itself calls
`state_dict(self=optimizer)`.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.core.errors import CheckpointError, OptimizerError
from fullshard.core.imports import Replaced, replace
from fullshard.engine.lookup import units_of
from fullshard.engine.parameter import ShardedParameter, sharded_parameter_of
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.step.adapters import adapter_of, values_of
from fullshard.engine.step.hooks import check_optimizer

STATE_DICT = Replaced.of(torch.optim.Optimizer, "state_dict")
LOAD_STATE_DICT = Replaced.of(torch.optim.Optimizer, "load_state_dict")
"""The methods themselves are replaced, because torch's hooks for them are registered on each optimizer, and scripts do
not pass their optimizers to the engine."""


@functools.wraps(STATE_DICT.torchs)
def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
    """Return torch's state dict, in which this rank's parts of the state are wrapped as `ShardedTensor`s."""
    adapter = adapter_of(self)
    adapter.restore(self)
    for parameter in (p for p in self.state if isinstance(p, ShardedParameter)):
        if how := adapter.why_no_full_state(self, parameter.mesh):
            raise OptimizerError(
                f"rank {parameter.mesh.rank}: {type(self).__name__}.state_dict() cannot return the state of "
                f"{parameter.name}, which is {how}",
                hint=(
                    "on every rank, call fullshard.checkpoint.save_checkpoint and load_checkpoint, or "
                    "Accelerator.save_state and load_state, which support any number of ranks"
                ),
            )
    kept = STATE_DICT.torchs(self)
    return _map_states(self, kept, lambda state, parameter: _wrapped(self, adapter.saved(state), parameter))


def as_sharded(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Wrap plain state as sharded tensors, unless the parameter is plain or the optimizer keeps plain state."""
    if isinstance(parameter, ShardedParameter) and not adapter_of(optimizer).keeps_plain_state:
        return _wrapped(optimizer, state, parameter)
    return state


def _wrapped(optimizer: torch.optim.Optimizer, state: dict[str, Any], parameter: ShardedParameter) -> dict[str, Any]:
    def is_interval(key: str, value: Any) -> bool:
        is_alike = type(value) is torch.Tensor and value.dim() > 0 and value.shape == parameter.spec.local_shape
        return is_alike and adapter_of(optimizer).is_laid_out(optimizer, key)

    spec = parameter.spec
    return {key: ShardedTensor(value, spec) if is_interval(key, value) else value for key, value in state.items()}


@functools.wraps(LOAD_STATE_DICT.torchs)
def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state dict as torch does, but first cut unsharded tensors to this rank's intervals."""
    if missing := {"state", "param_groups"} - state_dict.keys():
        what = f"{type(self).__name__}: the state dict has no {' and no '.join(sorted(missing))}"
        raise CheckpointError(what, hint="pass the result of optimizer.state_dict()")
    adapter_of(self).restore(self)
    LOAD_STATE_DICT.torchs(self, _map_states(self, state_dict, partial(cut_state, optimizer=self)))


def _map_states(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    function: Callable[[dict[str, Any], ShardedParameter], Mapping[str, Any]],
) -> dict[str, Any]:
    """Return a copy of `state_dict` in which `function` has been applied to the state of each sharded parameter."""
    saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    held = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state = dict(state_dict["state"])
    for key, parameter in zip(saved, held, strict=False):  # torch checks the lengths
        if key in state and isinstance(parameter, ShardedParameter):
            state[key] = function(state[key], parameter)
    return {**state_dict, "state": state}


def cut_state(
    state: dict[str, Any], sharded: ShardedParameter, *, optimizer: torch.optim.Optimizer
) -> Mapping[str, Any]:
    """Cut the state of an unsharded parameter to this rank's interval of the sharded parameter.

    State that is already sharded must cover this rank's interval. State that does not have the parameter's layout (see
    `OptimizerAdapter.is_laid_out`) is not changed.
    """
    cut = {}
    for key, kept in state.items():
        value = values_of(kept)
        if not adapter_of(optimizer).is_laid_out(optimizer, key):
            cut[key] = value
            continue
        # The step count is a 0-D tensor, and so is all state of a scalar parameter.
        per_element = isinstance(value, torch.Tensor) and (value.dim() or key != "step")
        if isinstance(value, DTensor) and value.shape == sharded.shape:
            cut[key] = sharded.wrap(sharded.interval_of(value, f"optimizer state {key!r}"))
        elif per_element and value.shape == sharded.shape:
            cut[key] = ShardedTensor(sharded.spec.cut(value).clone(), sharded.spec)
        elif isinstance(value, DTensor):
            raise OptimizerError(
                f"rank {sharded.mesh.rank}: state {key!r} of {sharded.name} {tuple(sharded.shape)} has the shape "
                f"{tuple(value.shape)}: {value}",
                hint="load the state of this model's optimizer, or use fullshard.checkpoint.load_checkpoint",
            )
        else:
            cut[key] = kept
    return adapter_of(optimizer).kept(optimizer, sharded, cut)


@functools.cache
def install() -> None:
    """Replace torch's methods with the functions of this module."""
    replace({STATE_DICT: state_dict, LOAD_STATE_DICT: load_state_dict})


def repoint(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
    """Replace the unsharded parameters that an optimizer holds with their sharded versions, in place.

    Hyperparameters and the order of groups do not change. Optimizer state is cut to this rank's intervals.

    Args:
        optimizer: an optimizer created before the model was sharded. Any other optimizer is left unchanged.
        model: if given, check that the optimizer holds some of its parameters.

    Raises:
        OptimizerError: The optimizer fails `check_optimizer`, or holds no parameter of `model`.
    """
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            sharded = sharded_parameter_of(parameter)
            if sharded is None or sharded is parameter:
                continue
            group["params"][index] = sharded
            if parameter in optimizer.state:
                optimizer.state[sharded] = cut_state(optimizer.state.pop(parameter), sharded, optimizer=optimizer)
    check_optimizer(optimizer)
    if model is not None:
        own = {id(p) for unit in units_of(model) for bucket in unit.buckets for p in bucket.sharded_parameters}
        own |= {id(p) for p in model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise OptimizerError(
                f"{type(optimizer).__name__} holds no parameters of {type(model).__name__}",
                hint="create the optimizer with this model's parameters",
            )
