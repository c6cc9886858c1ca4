"""Accelerate's `skip_first_batches`, which would read a loader that was prepared here in an order of no epoch."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from fullshard.api.data import ShardedDataLoader, skip_first_batches
from fullshard.core.imports import after_import


def teach_to_skip(home: Any) -> None:
    """Teach `home.skip_first_batches` loaders that were prepared here; for any other it is Accelerate's."""
    theirs = home.skip_first_batches
    if getattr(theirs, "knows_fullshard", False):
        return

    @functools.wraps(theirs)
    def skip(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, ShardedDataLoader):
            return skip_first_batches(dataloader, num_batches)
        return theirs(dataloader, num_batches)

    skip.knows_fullshard = True  # type: ignore[attr-defined]
    home.skip_first_batches = skip


def _replace(module: ModuleType) -> None:
    for home in (module, sys.modules.get("accelerate.accelerator"), sys.modules.get("accelerate")):
        if hasattr(home, "skip_first_batches"):
            teach_to_skip(home)


def teach_accelerate_to_skip() -> None:
    """Teach Accelerate's function these loaders, as soon as a script imports it."""
    after_import("accelerate.data_loader", _replace)
