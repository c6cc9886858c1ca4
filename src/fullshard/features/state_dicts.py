"""Hooks that put DTensors into the state dicts of sharded models, and reduce loaded tensors to this rank's interval.

The hooks are on the modules that hold the parameters, not on the unit. torch passes each module the current prefix of
its keys, so the keys are correct even if wrappers, compilers or hooks around the module have changed the names.
"""

import functools
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.core.errors import LifecycleError
from fullshard.engine.extension import Extension
from fullshard.engine.schedule import Schedule
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.unit import Unit


class StateDicts(Extension):
    """Registers state dict hooks on every module of one model that holds a parameter."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._watched: set[Unit] = set()

    def absorbed(self, earlier: Extension) -> None:
        """Take over the record of which units have hooks from a model that became part of this one."""
        self._watched |= cast("StateDicts", earlier)._watched

    def assembled(self) -> None:
        """Register the hooks for each unit that does not have them yet."""
        for unit in self.model.units:
            if unit not in self._watched:
                self._watched.add(unit)
                own = weakref.ref(unit)  # the hooks of a copied module also keep it
                for holder in {id(m): m for slot in unit.slots for m, _ in slot.owners}.values():
                    holder.register_state_dict_post_hook(functools.partial(_after_state_dict, own))
                    holder.register_load_state_dict_pre_hook(functools.partial(_before_load_state_dict, own))


def _held_by(module: nn.Module, unit: Unit) -> Iterator[tuple[str, ShardedTensor]]:
    """Yield (attribute, sharded parameter) for each parameter of the unit that the module holds."""
    for slot, parameter in unit.entries:
        for holder, attribute in slot.owners:
            if holder is module:
                yield attribute, parameter


def _after_state_dict(
    own: weakref.ref[Unit], module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object
) -> None:
    """Replace the parameters in a module's state dict, which may be unsharded, with DTensors."""
    unit = own()
    if unit is None or unit.is_pinned or unit.stand_ins is not None:
        return
    for attribute, parameter in _held_by(module, unit):
        value = state_dict.get(prefix + attribute)
        if value is not None:
            is_kept = isinstance(value, nn.Parameter)  # with keep_vars=True
            state_dict[prefix + attribute] = parameter if is_kept else parameter.data


def _before_load_state_dict(
    own: weakref.ref[Unit],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *_arguments: object,
) -> None:
    """Before a module loads values, replace complete tensors among them with this rank's intervals."""
    unit = own()
    values = {attribute: state_dict.get(prefix + attribute) for attribute in module._parameters}
    given = {key: value for key, value in values.items() if isinstance(value, torch.Tensor) and not value.is_meta}
    if unit is None or not given or given.keys().isdisjoint(attribute for attribute, _ in _held_by(module, unit)):
        return
    unit.reshard()
    unit.schedule.settle()
    replaces = bool(local_metadata.get("assign_to_params_buffers"))
    if unit.is_pinned and replaces:
        raise LifecycleError(
            f"{unit}: load_state_dict(assign=True) would replace parameters that are kept unsharded",
            hint="omit assign=True, or load outside of `with unsharded(model)`",
        )
    if unit.is_pinned:
        return
    for attribute, parameter in _held_by(module, unit):
        value = given.get(attribute)
        if value is None or value.shape != parameter.shape:
            continue  # torch reports this
        if isinstance(value, DTensor) and value.placements == parameter.placements:
            # PEFT assumes that every DTensor was split before, and replaces intervals with unsharded tensors.
            local = value.to_local()
            value = local if local.shape == value.shape else value
        if not isinstance(value, DTensor):
            value = state_dict[prefix + attribute] = ShardedTensor(parameter.spec.cut(value.detach()), parameter.spec)
        if replaces and unit.stand_ins is None:  # the modules of a unit on the meta device will hold the values
            _take(parameter, value)
            state_dict[prefix + attribute] = parameter


def _take(parameter: ShardedTensor, value: torch.Tensor) -> None:
    """Copy a value into a sharded parameter, so that `load_state_dict(assign=True)` does not replace the parameter."""
    if value.dtype != parameter.dtype:
        raise LifecycleError(
            f"load_state_dict(assign=True) of {parameter.name}: the value is {value.dtype}, but the parameter is "
            f"sharded as {parameter.dtype}",
            hint="omit assign=True to cast the value, or cast the model before sharding it",
        )
    with torch.no_grad():
        parameter.copy_(value)
