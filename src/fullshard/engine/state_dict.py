"""State dicts of sharded models: DTensors when they are taken, cut to this rank's interval when they are loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import torch_private
from fullshard.core.errors import LifecycleError
from fullshard.engine.lookup import qualified, require_unit
from fullshard.engine.schedule import schedule_of
from fullshard.engine.sharded_tensor import ShardedTensor


def _entries(module: nn.Module, prefix: str) -> list[tuple[str, ShardedTensor]]:
    """(state dict key, sharded parameter) of every place of the unit's own parameters below `module`."""
    unit = require_unit(module)
    places: dict[int, list[str]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        places.setdefault(id(inner), []).append(path)
    entries = []
    for slot, parameter in unit.entries:
        for owner, attribute in slot.owners:
            paths = [prefix + qualified(_state_dict_path(path), attribute) for path in places.get(id(owner), ())]
            entries += [(path, parameter) for path in paths]
    return entries


def after_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """At rest the values are DTensors, and so they are where modules hold the original parameters."""
    if require_unit(module).is_pinned or require_unit(module).stand_ins is not None:
        return
    for key, parameter in _entries(module, prefix):
        if key in state_dict:
            is_kept = isinstance(state_dict[key], nn.Parameter)  # with keep_vars=True
            state_dict[key] = parameter if is_kept else parameter.data


def _state_dict_path(path: str) -> str:
    """A module path as state dicts have it: of torch's wrappers, the one for checkpointing hides itself there."""
    return ".".join(part for part in path.split(".") if part != torch_private.HIDDEN_WRAPPER)


def before_load_state_dict(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> None:
    """Cut whole tensors down to this rank's interval."""
    unit = require_unit(module)
    schedule = schedule_of(unit)
    schedule.lockstep.loads += 1
    given = {
        key: value for key, _ in _entries(module, prefix) if isinstance(value := state_dict.get(key), torch.Tensor)
    }
    if unit.stand_ins is not None and any(not value.is_meta for value in given.values()):
        unit.make_real(is_filled=False)
    if unit.stand_ins is None:
        unit.reshard()
        schedule.settle()
    replaces = bool(local_metadata.get("assign_to_params_buffers"))
    if unit.is_pinned and replaces:
        raise LifecycleError(
            f"unit {unit.name!r}: load_state_dict(assign=True) would replace parameters that are kept unsharded",
            hint="leave assign out, or load outside of `with unsharded(model)`",
        )
    if unit.is_pinned:
        return
    for key, parameter in _entries(module, prefix):
        value = given.get(key)
        if value is None or value.is_meta or value.shape != parameter.shape:
            continue  # torch has something to say about it
        if isinstance(value, DTensor) and value.placements == parameter.placements:
            # PEFT takes sharded parameters for tensor parallelism's, and puts whole tensors where their intervals go.
            local = value.to_local()
            value = local if local.shape == value.shape else value
        if not isinstance(value, DTensor):
            value = state_dict[key] = ShardedTensor(parameter.span.cut(value.detach()), parameter.span)
        if replaces:
            _take(parameter, value)
            state_dict[key] = parameter


def _take(parameter: ShardedTensor, value: torch.Tensor) -> None:
    """What `load_state_dict(assign=True)` does to a sharded parameter, which stays a view of its bucket."""
    if value.dtype != parameter.dtype:
        raise LifecycleError(
            f"load_state_dict(assign=True) of {parameter.name}: got {value.dtype}, sharded as {parameter.dtype}",
            hint="leave assign out to cast, or cast the model before sharding it",
        )
    with torch.no_grad():
        parameter.copy_(value)
