"""Unshard a unit when one of its modules or methods is called directly instead of the unit's forward.

An example is an encoder that is called on its own. Hooks on the modules then unshard the complete unit. While the
unit's own forward is running, the hooks do nothing. If gradients are enabled, the unit stays unsharded until backward
has ended, because the engine cannot tell when backward has finished with this module.
"""

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
    """Adds the hooks on the modules of one model, and removes them."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._handles: list[RemovableHandle] = []

    def assembled(self) -> None:
        """Add hooks to the modules of every unit, and wrap the methods of the unit's class."""
        for unit in self.model.units:
            for module in unit.modules:
                _enter_methods(next(cls for cls in type(module).__mro__ if USER_CLASS in vars(cls)))
            self._handles += _watch(unit, is_outermost=unit is self.model.units[-1])

    def absorbed(self, earlier: Extension) -> None:
        """Remove the hooks of a model that became part of this one, because its root is not the outermost unit now."""
        for handle in cast("SubmoduleEntry", earlier)._handles:
            handle.remove()


def _watch(unit: Unit, *, is_outermost: bool) -> list[RemovableHandle]:
    """Add hooks that unshard the unit when a module in it is called directly. Inner units hook only embeddings."""
    parts = {id(m): m for slot in unit.slots for m, _ in slot.owners if is_outermost or isinstance(m, nn.Embedding)}
    handles = []
    for part in parts.values():
        if any(part is module for module in unit.modules):
            continue
        before, after = _hooks_of(_WatchedPart(unit))
        handles.append(part.register_forward_pre_hook(before, prepend=True))
        handles.append(part.register_forward_hook(after, always_call=True))  # reshard even after an exception
    return handles


class _WatchedPart:
    """A module with hooks that detect direct calls."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.has_unsharded = unit, False  # set during a direct call that must reshard

    def begin(self) -> None:
        """Unshard the unit for a direct call of the module."""
        self.unit.take_requires_grad()
        self.unit.unshard()
        if torch.is_grad_enabled():
            self.unit.is_kept_for_backward = True  # no event will mark its backward
        else:
            self.has_unsharded = True

    def end(self) -> None:
        """Reshard the unit after a direct call of the module."""
        self.has_unsharded = False
        self.unit.reshard()


def _hooks_of(part: _WatchedPart) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hooks of a module. They do nothing during the unit's forward, so that it can be compiled."""
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
    """Wrap the methods that the class of a unit inherits from the user's class."""
    for name, member in vars(vars(cls)[USER_CLASS]).items():
        # torch checks whether some methods (`get_extra_state`) are those of nn.Module
        is_own = inspect.isfunction(member) and not name.startswith("_") and not hasattr(nn.Module, name)
        if is_own and getattr(vars(cls).get(name), "__wrapped__", None) is not member:
            setattr(cls, name, _entered(name, member))


def _entered(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the user's class so that it unshards the unit if it is called within a forward or backward.

    Outside of these, one rank might call the method alone and would wait for the others forever.
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
                    f"fullshard: rank {unit.mesh.rank}, {unit}: {type(self).__name__}.{name} was called "
                    f"outside of forward, where parameters are sharded\n"
                    f"hint: call fullshard.register_fsdp_forward_method(module, {name!r}) after fully_shard"
                )
            raise

    return entered
