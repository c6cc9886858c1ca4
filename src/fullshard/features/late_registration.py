"""Raise an error when parameters or modules are added to a model after sharding.

No unit would own them, and their gradients would not be reduced. The model is searched at its next forward, and only if
torch hooks have counted a registration, or a script has written directly to `_parameters` or `_modules`.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import NoReturn

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fullshard.comm import torch_private
from fullshard.core.errors import LifecycleError
from fullshard.engine.extension import Extension
from fullshard.engine.parameter import are_same, sharded_parameter_of

_registered = [0]
"""How many times a parameter or module has been registered on a module of a sharded model."""


def _count(module: nn.Module, _name: str, _value: object) -> None:
    if torch_private.MANAGED in module.__dict__:
        _registered[0] += 1


@functools.cache
def _count_registrations() -> None:
    """Install hooks that count registrations in every module of the process. Called only when a model is sharded."""
    register_module_parameter_registration_hook(_count)
    register_module_module_registration_hook(_count)


class LateRegistration(Extension):
    """Detects parameters and modules that are added to a model after sharding."""

    def assembled(self) -> None:
        """Remember which parameters the model has and which modules hold them."""
        _count_registrations()
        self._units = units = self.model.units
        self._places = {(id(m), attribute) for unit in units for slot in unit.slots for m, attribute in slot.owners}
        parameters = [p for _, module in self._modules() for p in module._parameters.values() if p is not None]
        # Keep them alive, so that no other parameter can get the id of a deleted one.
        self._left_alone = {id(p): p for p in parameters if sharded_parameter_of(p) is None}
        self._seen = -1
        self._parameters: list[dict[str, nn.Parameter | None]] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self._known_count = 0
        self._known_children: list[nn.Module | None] = []

    def forward_begins(self) -> None:
        """Raise an error if parameters or modules have been added to the model since its last forward."""
        children = list(itertools.chain.from_iterable(map(dict.values, self._children)))
        count = sum(map(len, self._parameters))
        is_known = self._known_count == count and are_same(children, self._known_children)
        if is_known and self._seen == _registered[0]:
            return
        for path, module in self._modules():
            module.__dict__[torch_private.MANAGED] = True
            for attribute, parameter in module._parameters.items():
                is_known = (id(module), attribute) in self._places or id(parameter) in self._left_alone
                if parameter is not None and not is_known:
                    self._refuse(f"{path}.{attribute}" if path else attribute, parameter)
        self._seen = _registered[0]
        modules = [module for _, module in self._modules()]
        self._parameters, self._children = [m._parameters for m in modules], [m._modules for m in modules]
        self._known_count = sum(map(len, self._parameters))
        self._known_children = list(itertools.chain.from_iterable(map(dict.values, self._children)))

    def _refuse(self, path: str, parameter: nn.Parameter) -> NoReturn:
        sharded = sharded_parameter_of(parameter)
        if sharded is None:
            why = "it would not be sharded, and its gradient would not be reduced"
        elif sharded.bucket.owner in self._units:
            why = f"it is now tied to {sharded.name}, but the unit of that parameter does not update this attribute"
        else:
            why = "its unit was created after the unit of the model around it"
        raise LifecycleError(
            f"rank {self._units[-1].mesh.rank}: parameter {path} of shape {tuple(parameter.shape)} was added to the "
            f"model after it was sharded: {why}",
            hint="add modules, adapters and parameters, and tie or resize weights, before the model is sharded",
        )

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules of the model with their paths."""
        for outermost in self._units[-1:]:
            for root in outermost.modules:
                yield from root.named_modules()
