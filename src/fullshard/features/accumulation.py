"""Context managers that disable or enable gradient reduction."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import cast

from torch import nn

from fullshard.engine.lookup import units_of


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Disable gradient reduction inside the block. The first backward after it reduces the accumulated gradients.

    This saves communication during gradient accumulation, but each rank needs memory for the unsharded gradients of the
    whole model. Without it, the gradients of every micro-batch are reduced and added to the sharded gradients, which is
    usually the better choice.
    """
    with _reducing(model, reduces=False):
        yield


@contextlib.contextmanager
def with_sync(model: nn.Module) -> Iterator[None]:
    """Enable gradient reduction inside the block, even inside `no_sync`. Accumulated gradients are reduced, too."""
    with _reducing(model, reduces=True):
        yield


@contextlib.contextmanager
def _reducing(model: nn.Module, *, reduces: bool) -> Iterator[None]:
    """Enable or disable gradient reduction. Unreduced gradients stay unsharded until a later backward."""
    units = units_of(model)
    before = [unit.reduce_gradients for unit in units]
    for unit in units:
        unit.reduce_gradients = reduces
    try:
        yield
    finally:
        for unit, value in zip(units, before, strict=True):
            unit.reduce_gradients = value


class AccumulationMethods:
    """Gradient accumulation methods of `FSDPModule`."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Skip gradient reduction inside the block, as in FSDP1 and DDP.

        The first backward after the block reduces the accumulated sum.
        """
        return no_sync(cast("nn.Module", self))
