"""The assignment of parameters to units.

A parameter belongs to the innermost unit that contains it. A tied parameter (one object under several names) belongs to
the innermost unit that contains *all* places where it occurs, so that it is unsharded wherever it is used.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import torch
from torch import nn

from fullshard.core.errors import WrapError, first_of
from fullshard.core.layout import Interval


@dataclass(slots=True)
class Slot:
    """One parameter and every place in the module tree where it occurs."""

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)  # `(module, attribute)` for each place
    # Earlier objects of this parameter, which the user may still hold (such as those on the meta device).
    replaced: list[nn.Parameter] = field(default_factory=list)
    compute_dtype: torch.dtype | None = None  # the dtype of the parameter in forward, if it differs from the unit's
    by_rows: bool = False  # whether each rank gets complete rows of the parameter, which torch sees as `Shard(0)`
    # The data axes of the parameter's mesh if it is a DTensor. In forward, it is replicated along them.
    data_axes: frozenset[int] = frozenset()

    @property
    def held(self) -> nn.Parameter:
        """Return the parameter that the modules hold now, which may have replaced `parameter`."""
        module, attribute = self.owners[0]
        parameter = module._parameters[attribute]
        assert parameter is not None  # noqa: S101 -- it was a parameter before
        return parameter

    @property
    def statistics_dtype(self) -> torch.dtype | None:
        """Return the dtype of the running statistics if the parameter is in a batch norm, or None if it is not.

        Forward must compute with the parameter in this dtype.
        """
        buffers = (module._buffers.get("running_mean") for module, _ in self.owners)
        return next((buffer.dtype for buffer in buffers if buffer is not None), None)

    def make_real(self, real: torch.Tensor) -> None:
        """Replace a parameter on the meta device, which cannot be given memory, by one with the memory of `real`."""
        meta = self.parameter
        self.parameter = nn.Parameter(real, requires_grad=meta.requires_grad)
        self.replaced.append(meta)
        for module, attribute in self.owners:
            module._parameters[attribute] = self.parameter


class Values(Protocol):
    """Supplies values for parameters that have no memory, such as those on the meta device."""

    def read(self, slot: Slot, interval: Interval, out: torch.Tensor) -> None:
        """Fill `out` (1-D, any dtype and device) with the elements in `interval` of this rank's flattened part."""


@dataclass(slots=True)
class UnitPlan:
    """The parameters that one unit will own, in definition order. A plan has several modules if they form one unit."""

    modules: list[nn.Module]
    slots: list[Slot] = field(default_factory=list)


def partition(
    modules: Sequence[nn.Module],
    unit_modules: Iterable[nn.Module] = (),
    *,
    ignored: Iterable[nn.Parameter] = (),
    stop_at: Iterable[nn.Module] = (),
) -> list[UnitPlan]:
    """Assign every parameter inside `modules` to a unit. Return one plan per unit, inner units first.

    `modules` together form the outermost unit. Each of `unit_modules` inside them is a separate unit. Subtrees in
    `stop_at` are skipped, because they are units already.
    """
    root = UnitPlan(list(modules))
    plans = {id(module): UnitPlan([module]) for module in unit_modules if all(module is not m for m in modules)}
    skip, left_alone = {id(m) for m in stop_at}, {id(p) for p in ignored}
    slots: dict[int, Slot] = {}
    chains: dict[int, list[UnitPlan]] = {}
    finished: list[UnitPlan] = []
    visited: set[tuple[int, int]] = set()

    def visit(module: nn.Module, chain: list[UnitPlan]) -> None:
        if id(module) in skip:
            return
        plan = plans.get(id(module))
        if plan is not None:
            chain = [*chain, plan]
        # Visit a module shared by two units exactly once under each.
        if (id(module), id(chain[-1])) in visited:
            return
        visited.add((id(module), id(chain[-1])))
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in left_alone:
                continue
            slot = slots.setdefault(id(parameter), Slot(parameter))
            if not any(owner is module and name == attribute for owner, name in slot.owners):
                slot.owners.append((module, attribute))
            chains[id(parameter)] = _common(chains.get(id(parameter), chain), chain)
        for child in module.children():
            visit(child, chain)
        if plan is not None and all(plan is not other for other in finished):
            finished.append(plan)

    for module in modules:
        visit(module, [root])
    finished.append(root)
    for key, slot in slots.items():
        chains[key][-1].slots.append(slot)
    return finished


def other_gradient_dtype(name: str, stored: torch.dtype, wanted: object) -> WrapError:
    """Return the error for a parameter whose `grad_dtype` differs from its own dtype."""
    return WrapError(
        f"{name}: grad_dtype = {wanted} conflicts with the stored dtype {stored}, which a sharded gradient must have",
        hint="store the parameter in that dtype, and compute in another with MixedPrecisionPolicy(param_dtype=...)",
    )


def names_in(roots: Sequence[nn.Module], wanted: Container[int]) -> str:
    """Return up to three names of parameters with ids in `wanted`, and how many more there are, as a string."""
    names = [name for root in roots for name, parameter in root.named_parameters() if id(parameter) in wanted]
    return first_of(names, 3)


def _common(one: list[UnitPlan], other: list[UnitPlan]) -> list[UnitPlan]:
    """Return the leading units that two chains of nested units have in common."""
    return [a for a, _ in takewhile(lambda pair: pair[0] is pair[1], zip(one, other, strict=False))]
