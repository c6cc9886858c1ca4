"""Context managers in which gradients stay unreduced, or do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import cast

from torch import nn

from fullshard.engine.lookup import units_of


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep gradients unsharded and unreduced inside; the first backward after it reduces their sum.

    Saves communication during accumulation and costs a whole model's gradients of memory per rank. Without it every
    micro-batch is reduced into the sharded gradient, which is usually what is wanted.
    """
    with _reducing(model, reduces=False):
        yield


@contextlib.contextmanager
def with_sync(model: nn.Module) -> Iterator[None]:
    """Reduce gradients inside, even within a `no_sync`; gradients kept unreduced are reduced along with them."""
    with _reducing(model, reduces=True):
        yield


@contextlib.contextmanager
def _reducing(model: nn.Module, *, reduces: bool) -> Iterator[None]:
    """Have backward inside reduce gradients, or keep them unsharded until a later one does."""
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
    """Methods of `FSDPModule`."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Reduce no gradients in a backward inside; the first one after it reduces their sum. As in FSDP1 and DDP."""
        return no_sync(cast("nn.Module", self))
