"""Which unit owns which parameter.

A parameter belongs to the innermost unit module around it. A tied parameter (one object under several names) belongs
to the innermost unit around *all* its places, so that it is whole wherever it is used.
"""

from __future__ import annotations

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
    """One parameter and every place of the module tree that refers to it.

    Attributes:
        owners: `(module, attribute)` of each place, definition order.
        replaced: earlier objects of this parameter, which the user may still hold (those on the meta device).
        compute_dtype: the dtype in which forward computes with it, if it has one of its own.
        by_rows: each rank is to have rows of it, which torch is shown as `Shard(0)`.
        data_axes: if it is a DTensor: the axes of its mesh for data, along which forward sees it replicated.
    """

    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    replaced: list[nn.Parameter] = field(default_factory=list)
    compute_dtype: torch.dtype | None = None
    by_rows: bool = False
    data_axes: frozenset[int] = frozenset()

    @property
    def statistics_dtype(self) -> torch.dtype | None:
        """Dtype of the running statistics beside it (a batch norm's), which want it in theirs; None without any."""
        buffers = (module._buffers.get("running_mean") for module, _ in self.owners)
        return next((buffer.dtype for buffer in buffers if buffer is not None), None)

    def make_real(self, real: torch.Tensor) -> None:
        """Put a parameter without memory in place of one on the meta device, which cannot be given any."""
        meta = self.parameter
        self.parameter = nn.Parameter(real, requires_grad=meta.requires_grad)
        self.replaced.append(meta)
        for module, attribute in self.owners:
            module._parameters[attribute] = self.parameter


class Values(Protocol):
    """Gives parameters without values theirs."""

    def read(self, slot: Slot, interval: Interval, out: torch.Tensor) -> None:
        """Fill `out` (1-D, any dtype and device) with elements `interval` of what this rank has to shard, flattened."""


@dataclass(slots=True)
class UnitPlan:
    """The parameters one unit will own, in definition order; it has several modules if they are unsharded together."""

    modules: list[nn.Module]
    slots: list[Slot] = field(default_factory=list)


def partition(
    modules: Sequence[nn.Module],
    unit_modules: Iterable[nn.Module] = (),
    *,
    ignored: Iterable[nn.Parameter] = (),
    stop_at: Iterable[nn.Module] = (),
) -> list[UnitPlan]:
    """Assign every parameter below `modules` to a unit: one plan each, inner units first, the outermost last.

    `modules` together are the outermost unit; `unit_modules` below them are units of their own. `stop_at` are subtrees
    that are not entered (units made earlier).
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
        # A module that is shared by two units is seen once under each, and once only.
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
    """Return the error for a gradient dtype that differs from the stored one."""
    return WrapError(
        f"{name}: grad_dtype = {wanted} conflicts with the stored {stored}, which a sharded gradient has, too",
        hint="store it in the dtype of its gradient, and compute in another by MixedPrecisionPolicy(param_dtype=...)",
    )


def names_in(roots: Sequence[nn.Module], wanted: Container[int]) -> str:
    """Name the parameters whose ids are `wanted`, for a message: three of them, and how many more."""
    names = [name for root in roots for name, parameter in root.named_parameters() if id(parameter) in wanted]
    return first_of(names, 3)


def _common(one: list[UnitPlan], other: list[UnitPlan]) -> list[UnitPlan]:
    """Return the common beginning of two chains of nested units."""
    return [a for a, _ in takewhile(lambda pair: pair[0] is pair[1], zip(one, other, strict=False))]
