"""Units on the meta device: they have a layout, but no memory until their parameters get values.

Modules hold stand-ins in the meantime, of global shape and laid out as the sharded parameters will be. A unit is made
real by `model.to_empty(device=)`, by `load_state_dict`, or, if its modules hold real parameters by then, at the first
forward. A model that is cast goes the same way, in one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.core.errors import LifecycleError
from fullshard.core.layout import Interval
from fullshard.engine.bucket_spec import BucketSpec, by_bucket
from fullshard.engine.kinds import kind_of
from fullshard.engine.parameter import mark_original
from fullshard.engine.shard_spec import ShardSpec
from fullshard.engine.sharded_tensor import ShardedTensor, part_of
from fullshard.engine.unit import Unit
from fullshard.engine.unit_parameters import UnitParameters
from fullshard.features.meta_device import torch_private
from fullshard.wrap.partition import Slot


class StandIns:
    """The parameters that the modules of a unit hold while it has no buckets, and their final values."""

    def __init__(self, entries: Iterable[tuple[Slot, ShardedTensor]]) -> None:
        self.entries = list(entries)
        self._specs = {id(slot): stand_in.spec for slot, stand_in in self.entries}
        for slot, stand_in in self.entries:
            stand_in._is_param = True
            for module, attribute in slot.owners:
                module._parameters[attribute] = stand_in  # type: ignore[assignment]

    @classmethod
    def of(cls, unit: Unit) -> StandIns:
        """Make the stand-ins of a new unit, on the meta device. Parameters of it that are real keep their values."""
        entries = []
        for slots in by_bucket(unit.slots, unit.policy):
            spec = BucketSpec(slots, mesh=unit.mesh, policy=unit.policy, storage=unit.storage)
            entries += [(slot, _stand_in(slot.parameter, spec.shard_spec(index))) for index, slot in enumerate(slots)]
        for slot, stand_in in entries:
            mark_original(slot.parameter, stand_in)
        return cls(entries)

    @classmethod
    def cast(
        cls, entries: Iterable[tuple[Slot, ShardedTensor]], fn: Callable[[torch.Tensor], torch.Tensor]
    ) -> StandIns:
        """Make the stand-ins of a unit whose parameters get the dtype that `fn` makes of this rank's intervals."""
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
        return [stand_in.names[0] for slot, stand_in in self.entries if _held(slot).is_meta]

    def error(self, unit: UnitParameters) -> LifecycleError:
        """Return the error for a unit that is used before its parameters have values."""
        return LifecycleError(
            "FSDP parameters should be materialized from meta device before training, but the following were still on "
            f"meta device: {self.names_on_meta} (rank {unit.mesh.rank}, unit {unit.name!r})",
            hint="call model.to_empty(device=...) and initialise it, or load_state_dict; fullshard.shard_model runs "
            "the model's own initialisation, a unit at a time",
        )

    def settle(self) -> None:
        """Take over the parameters that the modules hold now."""
        for slot, stand_in in self.entries:
            held, original = _held(slot), slot.parameter
            if (held.shape, held.dtype) != (original.shape, original.dtype):
                raise LifecycleError(
                    f"parameter {stand_in.name} was replaced while it was on the meta device by one of shape "
                    f"{tuple(held.shape)} and {held.dtype}: got sharded as {tuple(original.shape)} and "
                    f"{original.dtype}",
                    hint="replace or cast it before fully_shard",
                )
            if any(map(torch_private.gradient_hooks, (original, stand_in, held))):
                raise LifecycleError(
                    f"register_hook on parameter {stand_in.name} while it was on the meta device never fires: what "
                    "autograd sees is made once the parameter has values",
                    hint="use register_post_accumulate_grad_hook",
                )
            slot.replaced += dict.fromkeys((original, stand_in, held))  # type: ignore[arg-type]
            slot.parameter = nn.Parameter(kind_of(original).outline(original), held.requires_grad)

    def read(self, slot: Slot, interval: Interval, out: torch.Tensor) -> None:
        """Fill `out`, shape (n,), with these elements of a parameter: NaN where it has no values yet."""
        held, spec = _held(slot).detach(), self._specs[id(slot)]
        held = held if isinstance(held, DTensor) else kind_of(held).plain(held)
        if held.is_meta:
            out.fill_(math.nan if out.is_floating_point() or out.is_complex() else 0)
        elif isinstance(held, ShardedTensor) and held.interval == interval:
            out.copy_(held.local)
        elif isinstance(held, DTensor) and spec.interval == interval and (own := part_of(held, spec)) is not None:
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


def _held(slot: Slot) -> torch.Tensor:
    module, attribute = slot.owners[0]
    held = module._parameters[attribute]
    assert held is not None  # noqa: S101 -- it was a parameter before
    return held
