"""Let torch's element-wise optimizers update plain tensors, which avoids a dispatch per parameter and operation.

The optimizer sees plain tensors only in its update loop, which writes to the memory of the sharded tensors. Its
parameter groups, every `.grad` and the state of each parameter still consist of sharded tensors.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import optim

from fullshard.comm import torch_private
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.sharded_tensor import ShardedTensor

ELEMENT_WISE = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
"""Optimizers that update elements independently and collect their tensors in `_init_group`. Subclasses may differ."""


def use_plain_tensors(optimizer: optim.Optimizer) -> None:
    """Make an optimizer update plain tensors from now on, if it is one of torch's element-wise optimizers."""
    if type(optimizer) in ELEMENT_WISE and torch_private.INIT_GROUP not in vars(optimizer):
        setattr(optimizer, torch_private.INIT_GROUP, _InitGroup(optimizer))


def take_state(optimizer: optim.Optimizer) -> None:
    """Copy state that the optimizer sets after its update loop, as SGD does, from plain tensors to parameters."""
    init_group = vars(optimizer).get(torch_private.INIT_GROUP)
    if isinstance(init_group, _InitGroup):
        init_group.take_state()


class _InitGroup:
    """Replaces `Optimizer._init_group`, which lists the tensors, gradients and state of a parameter group."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._listed: list[tuple[ShardedParameter, torch.Tensor]] = []

    def __call__(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None  # noqa: S101 -- it is calling
        state, tensors, listed = optimizer.state, list(group["params"]), []
        for index, parameter in enumerate(tensors):
            if isinstance(parameter, ShardedParameter) and not parameter.spec.is_by_rows:
                gradient = parameter.local_grad
                if gradient is not None:
                    tensors[index] = plain = parameter.local
                    plain.grad = gradient
                    if entry := state.get(parameter):
                        state[plain] = as_local(entry)
                    listed.append((parameter, plain))
        self._listed += listed
        try:
            init_group = getattr(type(optimizer), torch_private.INIT_GROUP)
            return init_group(optimizer, {**group, "params": tensors}, *lists)
        finally:  # immediately: the optimizer has its lists, and other code must find parameters in `state`
            for _, plain in listed:
                plain.grad = None
            self._take_state_of(listed)

    def take_state(self) -> None:
        """Move the state that was stored under plain tensors in this step to the parameters."""
        listed, self._listed = self._listed, []
        self._take_state_of(listed)

    def _take_state_of(self, listed: list[tuple[ShardedParameter, torch.Tensor]]) -> None:
        optimizer = self._optimizer()
        state = {} if optimizer is None else optimizer.state
        for parameter, plain in listed:
            for key, value in state.pop(plain, {}).items():
                entry = state[parameter]
                before = entry.get(key)
                if value is not (before.local if isinstance(before, ShardedTensor) else before):
                    is_per_element = isinstance(value, torch.Tensor) and value.dim()
                    entry[key] = ShardedTensor(value, parameter.spec) if is_per_element else value


def as_local(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with each sharded tensor replaced by this rank's interval, which is a plain tensor."""
    return {key: value.local if isinstance(value, ShardedTensor) else value for key, value in state.items()}
