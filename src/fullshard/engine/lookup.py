"""Functions that find the unit of a module, the units of a model, and the names of modules."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from fullshard.comm import torch_private
from fullshard.core.errors import ConfigError, LifecycleError
from fullshard.engine.unit import Unit

UNIT = "_fullshard_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of `module`, or None if the module is not a unit."""
    return module.__dict__.get(UNIT)


def require_unit(module: Any) -> Unit:
    """Return the unit of `module`. Raise `LifecycleError` if the module is not a unit."""
    unit = unit_of(module)
    if unit is None:
        raise LifecycleError(f"{type(module).__name__} is not a unit", hint="call fully_shard on it first")
    return unit


def require_module(model: object) -> None:
    """Raise `ConfigError` if `model` is not a module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a module, got {type(model).__name__}", hint="pass the model itself")


def units_of(model: nn.Module) -> list[Unit]:
    """Return all units in `model`, inner units before the units that contain them."""
    require_module(model)
    found: dict[Unit, None] = {}
    for module in reversed(list(model.modules())):
        unit = unit_of(module)
        if unit is not None:
            found[unit] = None
    return list(found)


def require_units(model: nn.Module) -> list[Unit]:
    """Return all units in `model`. Raise `LifecycleError` if there are none."""
    units = units_of(model)
    if not units:
        raise LifecycleError(f"{type(model).__name__} is not sharded", hint="call fully_shard or shard_model first")
    return units


def refuse_pinned(units: Iterable[Unit], what: str, hint: str) -> None:
    """Raise `LifecycleError` if a unit is pinned unsharded, because the action `what` is then impossible."""
    pinned = next((unit for unit in units if unit.is_pinned), None)
    if pinned is not None:
        raise LifecycleError(f"{what} while {pinned} is kept unsharded", hint=hint)


def clean_name(path: str) -> str:
    """Return a module path without the components that torch's wrappers add."""
    return ".".join(part for part in path.split(".") if part not in torch_private.WRAPPERS)


def qualified(path: str, attribute: str) -> str:
    """Return `path.attribute`, or only `attribute` if the path is empty because the module is the root."""
    return f"{path}.{attribute}" if path else attribute
