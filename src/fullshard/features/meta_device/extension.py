"""Let units on the meta device wait for the values of their parameters."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any, cast

import torch
from torch import nn

from fullshard.comm import torch_private
from fullshard.engine.extension import Extension
from fullshard.engine.schedule import Schedule
from fullshard.engine.unit import Unit
from fullshard.features.meta_device.stand_ins import StandIns


class MetaDevice(Extension):
    """The units of one model that have no values, or had none when they were made.

    Attributes:
        stand_ins: what modules hold for each unit that has no buckets.
        unfilled: units that have memory since the last forward, but were given no values for it.
    """

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self.stand_ins: dict[Unit, StandIns] = {}
        self.unfilled: dict[Unit, None] = {}

    def absorbed(self, earlier: Extension) -> None:
        """Take over the units of a part."""
        part = cast("MetaDevice", earlier)
        self.stand_ins |= part.stand_ins
        self.unfilled |= part.unfilled

    def postpones(self, unit: Unit) -> bool:
        """Have a unit wait if any of its parameters is on the meta device."""
        if not any(slot.parameter.is_meta for slot in unit.slots):
            return False
        self.put(unit, StandIns.of(unit))
        own = weakref.ref(unit)
        for holder in dict.fromkeys(module for slot in unit.slots for module, _ in slot.owners):
            holder.register_load_state_dict_pre_hook(functools.partial(_before_load, own))
        for module in unit.modules:
            module.register_load_state_dict_post_hook(functools.partial(_after_load, own))
        return True

    def put(self, unit: Unit, stand_ins: StandIns) -> None:
        """Have the modules of a unit hold these until `make_real`."""
        unit.stand_ins = self.stand_ins[unit] = stand_ins

    def before_forward(self) -> None:
        """Make the units real whose modules hold values by now, and warn of those that have memory without values."""
        for unit in reversed(self.model.units) if self.stand_ins else ():  # an error names the first in the model
            self.make_real(unit)
        for unit in self.unfilled:
            _warn_of_empty(unit)
        self.unfilled.clear()

    def make_real(self, unit: Unit, *, is_filled: bool = True) -> None:
        """Give a unit its buckets, with the values that its modules hold by now.

        Args:
            unit: the unit. Nothing happens if it has buckets.
            is_filled: whether there must be values; if not, parameters without any are NaN, to be filled later.
        """
        stand_ins = self.stand_ins.get(unit)
        if stand_ins is None:
            return
        if is_filled and stand_ins.names_on_meta:
            raise stand_ins.error(unit)
        stand_ins.settle()
        unit.allocate(stand_ins)
        del self.stand_ins[unit]
        if not is_filled:
            self.unfilled[unit] = None
        names = {id(slot): stand_in.names for slot, stand_in in stand_ins.entries}
        for slot, sharded in unit.entries:
            sharded.spec.name.names = names[id(slot)]
        self.model.know_buckets()


def _warn_of_empty(unit: Unit) -> None:
    plain = [p for _, p in unit.entries if not torch_private.has_own_dispatch(type(p.local))]
    empty = [p.name for p in plain if p.local.numel() and bool(p.local.isnan().all())]
    if empty:
        warnings.warn(
            f"rank {unit.mesh.rank}, unit {unit.name!r}: to_empty() and then nobody has filled {', '.join(empty)}",
            stacklevel=2,
        )


def _before_load(
    own: weakref.ref[Unit], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_arguments: object
) -> None:
    """Give a unit its buckets if the state dict has a value for one of the module's parameters."""
    unit = own()
    if unit is None:
        return
    held = {attribute for slot in unit.slots for owner, attribute in slot.owners if owner is module}
    values = [state_dict.get(prefix + attribute) for attribute in held]
    if any(isinstance(value, torch.Tensor) and not value.is_meta for value in values):
        MetaDevice.of(unit.schedule).make_real(unit, is_filled=False)


def _after_load(own: weakref.ref[Unit], _module: nn.Module, _incompatible: object) -> None:
    """Make a unit real once all its parameters have values, so that later code keeps them."""
    if (unit := own()) is not None:
        meta_device = MetaDevice.of(unit.schedule)
        stand_ins = meta_device.stand_ins.get(unit)
        if stand_ins is not None and not stand_ins.names_on_meta:
            meta_device.make_real(unit)
