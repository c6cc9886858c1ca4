"""Hooks that notify a unit when autograd has produced the gradients of its parameters.

Each original parameter has a hook that runs when autograd has added up the gradients from all uses of the parameter,
and collects the sum. Hooks hold no strong references: autograd stores them where Python's garbage collector cannot find
them, so a strong reference would leak the model.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from fullshard.comm import torch_private
from fullshard.engine.bucket import Bucket
from fullshard.engine.call import locate

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit


class GradientHooks:
    """The gradient hooks of one unit."""

    def __init__(self) -> None:
        self._hooks: list[OrderedDict[int, object]] = []  # all hooks of each parameter
        self._own: list[int] = []  # the engine's hook among them

    def watch(self, unit: Unit, bucket: Bucket) -> None:
        """Register hooks that run when autograd has accumulated the gradients of `bucket`."""
        for index, slot in enumerate(bucket.slots):
            dtype = slot.parameter.dtype
            if slot.parameter.is_leaf and (dtype.is_floating_point or dtype.is_complex):
                # A hook can only be registered on a tensor that requires grad at that moment.
                requires_grad = slot.parameter.requires_grad
                slot.parameter.requires_grad_(True)
                own = slot.parameter.register_post_accumulate_grad_hook(_accumulated(unit, bucket, index))
                slot.parameter.requires_grad_(requires_grad)
                self._hooks.append(torch_private.accumulated_hooks(slot.parameter) or OrderedDict())
                self._own.append(own.id)

    def stay_last(self) -> None:
        """Make the engine's hooks run last. Hooks that were registered during forward may change gradients."""
        if sum(map(len, self._hooks)) <= len(self._hooks):  # there are no others
            return
        for hooks, own in zip(self._hooks, self._own, strict=True):
            if next(reversed(hooks), own) != own:
                hooks[own] = hooks.pop(own)  # C code that reads the hooks ignores `move_to_end`


def _accumulated(unit: Unit, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
    """Return the post-accumulate hook of one original parameter."""
    collects = weakref.ref(bucket.gradient.unsharded)
    # The unit and the bucket live at least as long as the parameter.
    owner, held = cast("Callable[[], Unit]", weakref.ref(unit)), cast(Callable[[], Bucket], weakref.ref(bucket))

    def hook(parameter: torch.Tensor) -> None:
        unsharded = collects()
        if unsharded is None:
            return
        try:
            if not unsharded.fired:
                owner().begin_backward()
            if unsharded.collect(index, parameter):
                owner().gradients_complete(held())
        except BaseException as error:
            locate(error, owner(), "gradient")
            raise

    torch_private.keep_compiler_out(hook)
    return hook
