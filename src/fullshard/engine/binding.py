"""Switch the parameters that modules hold: original ones while the unit is unsharded, sharded ones at rest.

The binding writes to `module._parameters`. Other code may write there too, without a hook, so the binding checks the
parameters before it replaces them. The version counter shows whether a forward modified an original in place.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import LifecycleError
from fullshard.engine.parameter import ShardedParameter
from fullshard.wrap.partition import Slot


class Binding:
    """The places in a unit's modules where its parameters are stored, and the parameters to put there."""

    def __init__(self, entries: Sequence[tuple[Slot, ShardedParameter]]) -> None:
        places: list[tuple[dict[str, Any], str, nn.Parameter, ShardedParameter]] = [
            (module._parameters, attribute, slot.parameter, sharded)
            for slot, sharded in entries
            for module, attribute in slot.owners
        ]
        self._holders = [place[0] for place in places]
        self._attributes = [place[1] for place in places]
        self._unsharded = [place[2] for place in places]
        self._sharded = [place[3] for place in places]
        self._bound: Sequence[torch.Tensor] = self._unsharded

    def bind(self, *, unsharded: bool) -> None:
        """Put the original parameters into the modules if `unsharded` is set; otherwise put the sharded ones there."""
        self._bound = self._unsharded if unsharded else self._sharded
        list(map(dict.__setitem__, self._holders, self._attributes, self._bound))  # for each place, without a loop

    def check(self) -> None:
        """Raise an error if a module holds a parameter that was not put there by the engine."""
        if all(map(operator.is_, map(dict.get, self._holders, self._attributes), self._bound)):
            return
        places = zip(self._holders, self._attributes, self._unsharded, self._sharded, strict=True)
        for parameters, attribute, original, sharded in places:
            current = parameters.get(attribute)
            if current is not sharded and current is not original:
                raise LifecycleError(
                    f"parameter {sharded.name} was replaced by a {type(current).__name__} after it was sharded",
                    hint=(
                        "change the parameter in place under unsharded(model, writeback=True), or replace it before "
                        "sharding; use `with unsharded(model)` for torch.func.functional_call with other tensors"
                    ),
                )


_version = operator.attrgetter("_version")


class Originals:
    """The original parameters of a bucket, which are views of `full`, and their version counters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self._known = self.versions()

    def versions(self) -> list[int]:
        """Return the version counter of each parameter, which counts its in-place changes."""
        return list(map(_version, self.parameters))

    def take_changes(self) -> list[int]:
        """Return the indices of the parameters that have been changed in place since the last call of this method."""
        versions = self.versions()
        if versions == self._known:
            return []
        changed = [i for i, (a, b) in enumerate(zip(versions, self._known, strict=True)) if a != b]
        self._known = versions
        return changed
