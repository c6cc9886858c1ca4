"""Unshard a unit for modules that hold its parameters and are called past it (an encoder on its own), and for methods.

Within the unit's forward their hooks do nothing. Outside they unshard the whole unit, and with gradients it stays so
until the backward is over, because nothing announces that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.comm import torch_private
from fullshard.core.user_class import USER_CLASS
from fullshard.engine.call import uncompiled
from fullshard.engine.extension import Extension
from fullshard.engine.lookup import unit_of
from fullshard.engine.schedule import Schedule
from fullshard.engine.unit import Unit


class SubmoduleEntry(Extension):
    """Put the hooks on one model's modules."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._handles: list[RemovableHandle] = []

    def assembled(self) -> None:
        """Watch the modules of every unit, and the methods of its class."""
        for unit in self.model.units:
            for module in unit.modules:
                _enter_methods(next(cls for cls in type(module).__mro__ if USER_CLASS in vars(cls)))
            self._handles += _watch(unit, is_outermost=unit is self.model.units[-1])

    def absorbed(self, earlier: Extension) -> None:
        """Take away the hooks of a part, whose outermost unit was not the outermost after all."""
        for handle in cast("SubmoduleEntry", earlier)._handles:
            handle.remove()


def _watch(unit: Unit, *, is_outermost: bool) -> list[RemovableHandle]:
    """Unshard a unit when a module that holds parameters of it is called past the unit.

    In the outermost unit any: an encoder called on its own uses the embedding that the whole model owns. In others
    embeddings, which models look tokens up in (`get_input_embeddings()`) before they call the unit around them.
    """
    parts = {id(m): m for slot in unit.slots for m, _ in slot.owners if is_outermost or isinstance(m, nn.Embedding)}
    handles = []
    for part in parts.values():
        if any(part is module for module in unit.modules):
            continue
        before, after = _hooks_of(_WatchedPart(unit))
        handles.append(part.register_forward_pre_hook(before, prepend=True))
        handles.append(part.register_forward_hook(after, always_call=True))  # an exception must not leave it unsharded
    return handles


class _WatchedPart:
    """One of them."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.has_unsharded = unit, False  # whether it is called past the unit, and reshards it in the end

    def begin(self) -> None:
        """Begin a call of the part past the unit."""
        self.unit.take_requires_grad()
        self.unit.unshard()
        if torch.is_grad_enabled():
            self.unit.is_kept_for_backward = True  # nothing will announce its backward
        else:
            self.has_unsharded = True

    def end(self) -> None:
        """End a call of the part."""
        self.has_unsharded = False
        self.unit.reshard()


def _hooks_of(part: _WatchedPart) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the part's hooks. In the unit's forward they do nothing, and a graph of that goes on through them."""
    begin, end = uncompiled(part.begin), uncompiled(part.end)

    def before(module: nn.Module, args: Any) -> None:
        if part.unit.is_at_rest:
            begin()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if part.has_unsharded:
            end()

    torch_private.keep_compiler_out(before, is_in_graphs=True)
    torch_private.keep_compiler_out(after, is_in_graphs=True)
    return before, after


def _enter_methods(cls: type) -> None:
    """Wrap, in the class of a unit, the methods of the user's class that it was made of."""
    for name, member in vars(vars(cls)[USER_CLASS]).items():
        # torch checks whether some methods (`get_extra_state`) are those of nn.Module
        is_own = inspect.isfunction(member) and not name.startswith("_") and not hasattr(nn.Module, name)
        if is_own and getattr(vars(cls).get(name), "__wrapped__", None) is not member:
            setattr(cls, name, _entered(name, member))


def _entered(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the user's class to unshard within a forward or backward, where every rank calls it.

    Elsewhere one rank may be the only one to call it, and would wait for the others; if the method fails there, the
    error says so.
    """

    @functools.wraps(method)
    def entered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (unit := unit_of(self)) is None or not unit.is_at_rest:
            return method(self, *args, **kwargs)
        if unit.schedule.forward.is_under_way or torch_private.backward_under_way() != -1:
            return unit.run_method(self, functools.partial(method, self), *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if unit.is_at_rest:
                error.add_note(
                    f"fullshard: rank {unit.mesh.rank}, unit {unit.name!r}: {type(self).__name__}.{name} was called "
                    f"past forward, where parameters are sharded\n"
                    f"hint: call fullshard.register_fsdp_forward_method(module, {name!r}) after fully_shard"
                )
            raise

    return entered
