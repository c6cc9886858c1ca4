"""Apply `model.to(...)`, `.half()`, `.to_empty(...)` and similar calls to sharded parameters.

Torch implements each of these calls as a function that is applied to every tensor. The engine applies the function
to an empty tensor to find out its effect. If the dtype changes, the unit is cast. If a unit on the meta device moves to
its own device, it is made real. An extension can move a unit to the host and back (`Extension.moves`). Any other
move is an error.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Self

import torch

from fullshard.core.errors import LifecycleError
from fullshard.engine.kinds import kind_of
from fullshard.engine.lookup import units_of
from fullshard.engine.shard_spec import ShardSpec
from fullshard.engine.unit import Unit
from fullshard.features.meta_device import torch_private
from fullshard.features.meta_device.stand_ins import MetaDevice, StandIns

Function = Callable[[torch.Tensor], torch.Tensor]


class ConversionMethods:
    """Overrides `_apply` of `FSDPModule`, so that parameters are converted one unit at a time."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        converted = convert(units_of(self), fn)  # type: ignore[arg-type]
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(False)  # the parameters are already converted
        try:
            torch_private.apply_past_fsdp(self, _except(converted, fn), recurse)
            return self
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)


_Applied = Literal["same", "cast", "real"]
"""Effect of a function on a unit: none, a cast, or allocation on the unit's own device."""


def convert(units: Sequence[Unit], fn: Function) -> set[ShardSpec]:
    """Apply `fn` to the parameters of units. Return the specs of parameters that `fn` must not be applied to again."""
    # Keep the order of sharding, so that a unit that is real on one rank and on the meta device on another has
    # the same place in shared memory.
    in_order = sorted(units, key=lambda unit: unit.made)
    moved = [u for u in in_order if u.stand_ins is None and any(move(u, fn) for move in u.schedule.extensions.moves)]
    results = {unit: _applied(unit, fn) for unit in in_order if unit not in moved}
    on_meta = [unit for unit in results if results[unit] == "real"]
    to_cast = [unit for unit in results if results[unit] == "cast"]
    for unit in to_cast:
        _check_cast(unit)  # check all units before changing any
    for unit in to_cast:
        _cast(unit, fn)
    for unit in on_meta:
        MetaDevice.of(unit.schedule).make_real(unit, is_filled=False)
    made = [p for unit in on_meta for _, p in unit.entries]
    real = [unit for unit in units if unit.stand_ins is None]
    away = [b for unit in real for b in unit.buckets if unit in moved or b.plan.main_is_on_host]
    return {parameter.spec for parameter in (*made, *(p for bucket in away for p in bucket.sharded_parameters))}


def _applied(unit: Unit, fn: Function) -> _Applied:
    """Return what `fn` does to the parameters of a unit: nothing, a cast, or allocation on the unit's device."""
    # Parameters stored on the host compute on the device, so moving a model to the host has no effect.
    before = torch.device("meta") if unit.stand_ins is not None else unit.mesh.device
    applied: _Applied = "same"
    for dtype in dict.fromkeys(parameter.dtype for _, parameter in unit.entries):
        result = fn(torch.empty(0, dtype=dtype, device=before))
        if result.device == before:
            applied = "cast" if result.dtype != dtype else applied
            continue
        is_own = result.device == unit.mesh.device or unit.storage.is_home(result.device)
        if unit.stand_ins is None or not is_own or result.dtype != dtype:
            raise LifecycleError(
                f"{unit}: cannot convert sharded parameters from {dtype} on {before} to {result.dtype} on "
                f"{result.device}",
                hint="move the model before sharding it, or call to_empty() to move it from the meta device",
            )
        return "real"
    return applied


def _check_cast(unit: Unit) -> None:
    """Raise an error if a cast would miss existing gradients, optimizer state or hooks."""
    is_real = unit.stand_ins is None
    if is_real and (unit.schedule.optimizer_steps or any(p.grad is not None for _, p in unit.entries)):
        raise LifecycleError(
            f"rank {unit.mesh.rank}, {unit}: cannot cast sharded parameters that have gradients or optimizer state",
            hint="cast the model before the first step; for mixed precision use mp_policy",
        )
    originals = [(slot.parameter, parameter.name) for slot, parameter in unit.entries if is_real]
    own, after = torch_private.gradient_hooks, torch_private.accumulated_hooks  # `after` has the engine's own hook
    if hooked := [name for original, name in originals if own(original) or len(after(original) or ()) > 1]:
        raise LifecycleError(
            f"rank {unit.mesh.rank}, {unit}: cannot cast sharded parameters that had hooks before "
            f"fully_shard: {hooked}",
            hint="cast the model before fully_shard, or register the hooks after the cast",
        )
    kinds = [kind_of(slot.parameter) for slot in unit.slots] if not is_real else []
    kinds += [kind for bucket in unit.buckets for kind in bucket.kinds] if is_real else []
    why_not = next((kind.why_no_cast for kind in kinds if kind.why_no_cast), "")
    if why_not:
        raise LifecycleError(
            f"rank {unit.mesh.rank}, {unit}: cannot cast sharded parameters {why_not}",
            hint="cast the model before fully_shard; for mixed precision use mp_policy",
        )


def _cast(unit: Unit, fn: Function) -> None:
    """Cast the parameters of a unit to the dtype that `fn` returns. They stay on the same device."""
    is_real = unit.stand_ins is None
    if is_real:
        unit.reshard()  # stand-ins are made of this rank's intervals
        for slot in unit.slots:
            (torch_private.accumulated_hooks(slot.parameter) or {}).clear()  # the engine's hook, no longer needed
    meta_device = MetaDevice.of(unit.schedule)
    meta_device.put(unit, StandIns.cast(unit.entries, fn))
    if is_real:
        meta_device.make_real(unit, is_filled=unit not in meta_device.unfilled)


def _except(specs: set[ShardSpec], fn: Function) -> Function:
    """Return a function that leaves tensors with one of these specs unchanged and applies `fn` to all others."""
    return (lambda tensor: tensor if getattr(tensor, "spec", None) in specs else fn(tensor)) if specs else fn
