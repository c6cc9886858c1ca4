"""Views of parameters that forward stores in module attributes, such as `self.cache = self.q[:3]`.

The views are valid again in the next forward, because unsharding refills the same memory. Until then they must not be
read. Therefore, an object that raises an error replaces each view while the unit is sharded. Attributes that are lists,
tuples or dicts are searched; other objects are not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, cast

import torch
from torch import nn

from fullshard.comm import torch_private
from fullshard.core.errors import LifecycleError
from fullshard.engine.extension import Extension
from fullshard.engine.precision import map_tensors
from fullshard.engine.schedule import Schedule
from fullshard.engine.unit import Unit
from fullshard.engine.unit_parameters import UnitParameters

_EVERY_MODULES = frozenset(vars(nn.Module()))


class KeptViews(Extension):
    """Tracks, for one model, the views of parameters that forward has stored in module attributes."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._views: dict[UnitParameters, _Views] = {}

    def absorbed(self, earlier: Extension) -> None:
        """Take over the views of a model that has become part of this model."""
        self._views |= cast("KeptViews", earlier)._views

    def unit_ran(self, unit: Unit) -> None:
        """Find the views that the unit's forward has stored in module attributes."""
        views = self._views.get(unit)
        if views is None:
            views = self._views[unit] = _Views(unit)
        views.look()

    def unsharded(self, unit: UnitParameters) -> None:
        """Restore the unit's views, which are valid again."""
        if (views := self._views.get(unit)) is not None:
            views.show()

    def resharded(self, unit: UnitParameters) -> None:
        """Replace each view with an object that raises an error when used."""
        if (views := self._views.get(unit)) is not None:
            views.hide()


class _Views:
    """The views of one unit's parameters that are stored in module attributes."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._looked: set[tuple[bool, bool]] = set()
        self._places: dict[tuple[int, str], tuple[dict[str, Any], str, str]] = {}
        self._hidden: list[tuple[dict[str, Any], str, Any, Any]] = []

    def look(self) -> None:
        """Search the modules for views of parameters, once per combination of training mode and gradient mode."""
        kind = self._unit.modules[0].training, torch.is_grad_enabled()
        if kind not in self._looked:
            self._looked.add(kind)
            for holder, attribute, path in _attributes(self._unit.modules):
                if any(map(self._is_kept, _tensors_in(holder[attribute]))):
                    self._places[id(holder), attribute] = holder, attribute, path

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        # An LSTM keeps a list of the parameters themselves.
        return not isinstance(tensor, (nn.Parameter, _Freed)) and self._unit.has_view(tensor)

    def hide(self) -> None:
        """Replace each view with an object that raises an error, because the memory of the parameters will be freed."""
        for holder, attribute, path in self._places.values():
            freed = _Freed.of(
                f"{self._unit}: {path} is a view of one of its parameters, and their memory has been freed"
            )
            value = holder.get(attribute)
            hidden = map_tensors(functools.partial(self._freed, freed), value)
            if hidden is not value:
                holder[attribute] = hidden
                self._hidden.append((holder, attribute, value, hidden))

    def _freed(self, freed: _Freed, tensor: torch.Tensor) -> torch.Tensor:
        return freed if self._is_kept(tensor) else tensor

    def show(self) -> None:
        """Restore the views, except for attributes that the script has assigned in the meantime."""
        while self._hidden:
            holder, attribute, value, hidden = self._hidden.pop()
            if holder.get(attribute) is hidden:
                holder[attribute] = value


def _attributes(modules: Iterable[nn.Module]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield the dict, key and path of each module attribute that is set by the user's code, including buffers."""
    for module in modules:
        for name, inner in module.named_modules():
            place = f"{name or type(module).__name__}."
            yield from ((vars(inner), key, place + key) for key in vars(inner) if key not in _EVERY_MODULES)
            yield from ((inner._buffers, key, place + key) for key in inner._buffers)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return [each for each in values if isinstance(each, torch.Tensor)]


class _Freed(torch.Tensor):
    """A tensor without memory that takes the place of a view while the unit is sharded."""

    _why: str

    @classmethod
    def of(cls, why: str) -> _Freed:
        """Return a tensor that raises an error with the message `why` when it is used."""
        self: _Freed = torch_private.made_as(cls, torch.empty(0), requires_grad=False)
        self._why = why
        return self

    @classmethod
    def __torch_function__(cls, _func: object, _types: object, args: Any = (), kwargs: Any = None) -> NoReturn:
        values = [*args, *(kwargs or {}).values()]
        found = next(each for value in values for each in _tensors_in(value) if isinstance(each, cls))
        raise LifecycleError(
            found._why, hint="use it only in forward, keep a copy (.clone()), or return it, because outputs are copied"
        )
