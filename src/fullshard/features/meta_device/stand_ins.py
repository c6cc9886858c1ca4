"""Units on the meta device, which have a layout but no memory until their parameters get values.

Until then, the modules hold stand-ins, which are DTensors with the global shape and the layout of the future
sharded parameters. When a model is cast, stand-ins replace its parameters for a moment, too.
"""

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.core.errors import LifecycleError
from fullshard.core.layout import Interval
from fullshard.engine.bucket_spec import BucketSpec, by_bucket
from fullshard.engine.extension import Extension
from fullshard.engine.kinds import kind_of
from fullshard.engine.parameter import mark_original
from fullshard.engine.schedule import Schedule
from fullshard.engine.shard_spec import ShardSpec
from fullshard.engine.sharded_tensor import ShardedTensor, shard_of
from fullshard.engine.unit import Unit
from fullshard.engine.unit_parameters import UnitParameters
from fullshard.features.meta_device import torch_private
from fullshard.wrap.partition import Slot


class StandIns:
    """The parameters that a unit's modules hold until the unit is allocated. They also supply its values."""

    def __init__(self, entries: Iterable[tuple[Slot, ShardedTensor]]) -> None:
        self.entries = list(entries)
        self._specs = {id(slot): stand_in.spec for slot, stand_in in self.entries}
        for slot, stand_in in self.entries:
            stand_in._is_param = True
            for module, attribute in slot.owners:
                module._parameters[attribute] = stand_in  # type: ignore[assignment]

    @classmethod
    def of(cls, unit: Unit) -> Self:
        """Create the stand-ins of a new unit on the meta device. Parameters that are already real keep their values."""
        entries = []
        for slots in by_bucket(unit.slots, unit.policy):
            spec = BucketSpec(slots, mesh=unit.mesh, policy=unit.policy, storage=unit.storage)
            entries += [(slot, _stand_in(slot.parameter, spec.shard_spec(index))) for index, slot in enumerate(slots)]
        for slot, stand_in in entries:
            mark_original(slot.parameter, stand_in)
        return cls(entries)

    @classmethod
    def cast(cls, entries: Iterable[tuple[Slot, ShardedTensor]], fn: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Create stand-ins for a unit's parameters from this rank's intervals, which `fn` casts to another dtype."""
        changed = []
        for slot, held in entries:
            local = fn(held.local.detach())
            slot.replaced += [slot.parameter, held]  # type: ignore[list-item]
            plain = torch.empty(held.spec.sharded_shape, dtype=local.dtype, device="meta")
            slot.parameter = nn.Parameter(kind_of(slot.parameter).like(slot.parameter, plain), held.requires_grad)
            changed.append((slot, ShardedTensor(local, held.spec, requires_grad=held.requires_grad)))
        return cls(changed)

    @property
    def names_on_meta(self) -> list[str]:
        """Return the names of the parameters that have no values yet."""
        return [stand_in.names[0] for slot, stand_in in self.entries if slot.held.is_meta]

    def error(self, unit: UnitParameters) -> LifecycleError:
        """Return the error to raise when a unit is used before its parameters have values."""
        return LifecycleError(
            "FSDP parameters should be materialized from meta device before training, but the following were still "
            f"on meta device: {self.names_on_meta} (rank {unit.mesh.rank}, {unit})",
            hint=(
                "call model.to_empty(device=...) and initialize the model, or call load_state_dict; "
                "fullshard.shard_model runs the model's own initialization one unit at a time"
            ),
        )

    def settle(self) -> None:
        """Adopt the modules' current parameters as the unit's originals. Refuse other shapes, dtypes or lost hooks."""
        for slot, stand_in in self.entries:
            held, original = slot.held, slot.parameter
            if (held.shape, held.dtype) != (original.shape, original.dtype):
                raise LifecycleError(
                    f"parameter {stand_in.name} was replaced while it was on the meta device: it now has shape "
                    f"{tuple(held.shape)} and {held.dtype}, but it was sharded as {tuple(original.shape)} and "
                    f"{original.dtype}",
                    hint="replace or cast it before fully_shard",
                )
            if any(map(torch_private.gradient_hooks, (original, stand_in, held))):
                raise LifecycleError(
                    f"a hook that was registered with register_hook on parameter {stand_in.name} while it was on the "
                    "meta device would never run, because autograd uses a tensor that is created once the parameter "
                    "has values",
                    hint="use register_post_accumulate_grad_hook",
                )
            slot.replaced += dict.fromkeys((original, stand_in, held))  # type: ignore[arg-type]
            slot.parameter = kind_of(original).outline(original, requires_grad=held.requires_grad)

    def read(self, slot: Slot, interval: Interval, out: torch.Tensor) -> None:
        """Fill `out` of shape (n,) with an interval of a parameter, or with NaN if the parameter has no values yet."""
        held, spec = slot.held.detach(), self._specs[id(slot)]
        held = held if isinstance(held, DTensor) else kind_of(held).plain(held)
        if held.is_meta:
            out.fill_(math.nan if out.is_floating_point() or out.is_complex() else 0)
        elif isinstance(held, ShardedTensor) and held.interval == interval:
            out.copy_(held.local)
        elif isinstance(held, DTensor) and spec.interval == interval and (own := shard_of(held, spec)) is not None:
            out.copy_(own)
        else:
            whole = held.full_tensor() if isinstance(held, DTensor) else held
            out.copy_(spec.to_sharded(whole).reshape(-1)[interval.start : interval.stop])


def _stand_in(parameter: nn.Parameter, spec: ShardSpec) -> ShardedTensor:
    if parameter.is_meta:
        local = torch.empty(spec.local_shape, dtype=parameter.dtype, device="meta")
    else:
        local = kind_of(parameter).stand_in(parameter, spec)
    return ShardedTensor(local, spec, requires_grad=parameter.requires_grad)


class MetaDevice(Extension):
    """Defers the allocation of units until their parameters have values. `unfilled` units have none yet."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self.stand_ins: dict[Unit, StandIns] = {}
        self.unfilled: dict[Unit, None] = {}

    def absorbed(self, earlier: Extension) -> None:
        """Take over the units of a model that has become part of this model."""
        part = cast("MetaDevice", earlier)
        self.stand_ins |= part.stand_ins
        self.unfilled |= part.unfilled

    def postpones(self, unit: Unit) -> bool:
        """Defer the unit if any of its parameters is on the meta device. Return whether it has been deferred."""
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
        """Make the modules of a unit hold these stand-ins until `make_real` allocates the unit."""
        unit.stand_ins = self.stand_ins[unit] = stand_ins

    def before_forward(self) -> None:
        """Allocate the deferred units, which must have values by now. Warn about memory that was never filled."""
        for unit in reversed(self.model.units) if self.stand_ins else ():  # errors name the first unit in the model
            self.make_real(unit)
        for unit in self.unfilled:
            _warn_of_empty(unit)
        self.unfilled.clear()

    def make_real(self, unit: Unit, *, is_filled: bool = True) -> None:
        """Allocate a unit and fill it with the values that its modules hold now. Do nothing if it is already allocated.

        If `is_filled`, missing values are an error. Otherwise, parameters without values are set to NaN and must be
        filled later.
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
            f"rank {unit.mesh.rank}, {unit}: to_empty() allocated parameters that were never filled: "
            f"{', '.join(empty)}",
            stacklevel=2,
        )


def _before_load(
    own: weakref.ref[Unit],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *_arguments: object,
) -> None:
    """Allocate the unit before a state dict is loaded that has a value for one of the module's parameters."""
    unit = own()
    if unit is None:
        return
    if metadata.get("assign_to_params_buffers") and any(kind_of(s.parameter).form(s.parameter) for s in unit.slots):
        return  # codes need all values, so wait until the modules hold them
    held = {attribute for slot in unit.slots for owner, attribute in slot.owners if owner is module}
    values = [state_dict.get(prefix + attribute) for attribute in held]
    if any(isinstance(value, torch.Tensor) and not value.is_meta for value in values):
        MetaDevice.of(unit.schedule).make_real(unit, is_filled=False)


def _after_load(own: weakref.ref[Unit], _module: nn.Module, _incompatible: object) -> None:
    """Allocate the unit after a load once all its parameters have values, so that later code cannot overwrite them."""
    if (unit := own()) is not None:
        meta_device = MetaDevice.of(unit.schedule)
        stand_ins = meta_device.stand_ins.get(unit)
        if stand_ins is not None and not stand_ins.names_on_meta:
            meta_device.make_real(unit)
