"""Move the parameters of a unit and the buffers of its modules to the device where the unit computes."""

from collections.abc import Iterable

import torch
from torch import nn

from fullshard.engine.kinds import kind_of, to_device
from fullshard.wrap.partition import UnitPlan


def own_modules(plan: UnitPlan, stop_at: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that hold the unit's parameters, or buffers that its inner units `stop_at` do not hold."""
    inner = {id(module) for unit in stop_at for module in unit.modules()} - {id(m) for m in plan.modules}
    owners = {id(module) for slot in plan.slots for module, _ in slot.owners}
    return [
        m for root in plan.modules for m in root.modules() if id(m) in owners or (m._buffers and id(m) not in inner)
    ]


@torch.no_grad()
def move_to_device(
    plan: UnitPlan, modules: Iterable[nn.Module], *, device: torch.device, buffer_dtype: torch.dtype | None
) -> None:
    """Move the parameters and buffers of a unit to the device, unless they are on the meta device.

    Afterwards, the slots refer to the parameters that the modules hold now. `modules` are the plan's `own_modules`.
    """
    for slot in plan.slots:
        current = slot.held
        if current.device != device and not current.is_meta:
            current = kind_of(current).moved(current, device)
        if current is not slot.parameter:
            slot.replaced.append(slot.parameter)
            slot.parameter = current
        for owner, name in slot.owners:
            owner._parameters[name] = current
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and not kind_of(buffer).is_exact:
                to_dtype = buffer_dtype if buffer.is_floating_point() else None
                module._buffers[name] = buffer.to(device=device, dtype=to_dtype)
        to_device(module, device)
