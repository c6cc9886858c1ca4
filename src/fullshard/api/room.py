"""Check before a run whether the disk has enough space for the run's checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from fullshard.api.planning import planned_optimizer
from fullshard.checkpoint.adapters import is_saved_as_adapters
from fullshard.checkpoint.objects import Location
from fullshard.core.errors import CheckpointError
from fullshard.core.sizes import format_nbytes
from fullshard.engine.precision import dtype_name
from fullshard.plan.optimizers import OPTIMIZERS


def checkpoint_nbytes(model: nn.Module, optimizer: Any) -> int:
    """Return the size of a checkpoint in bytes, or a lower bound if the size of the optimizer's state is unknown."""
    trained = [p for p in model.parameters() if p.requires_grad]
    saved = trained if is_saved_as_adapters(model) else list(model.parameters())
    kind = None if optimizer is None else planned_optimizer(getattr(optimizer, "optimizer", optimizer))
    row = OPTIMIZERS[kind or "none"]
    state = sum(p.numel() * row.state_nbytes(dtype_name(p.dtype)) for p in trained)
    return round(sum(p.numel() * p.element_size() for p in saved) + state)


def check_room(place: Location, nbytes: int, count: int, say: Callable[[str], None]) -> None:
    """Check whether `count` more checkpoints of `nbytes` bytes fit in a directory.

    The check compares their size with the free space that the file system reports. Quotas that it does not report, and
    limits of object stores, are noticed only at the first save. If not even one checkpoint fits, raise
    `CheckpointError`.
    """
    if not isinstance(place, Path) or count < 1:
        return
    usage = shutil.disk_usage(next(path for path in (place.absolute(), *place.absolute().parents) if path.exists()))
    if not usage.total or usage.free >= count * nbytes:
        return
    found = (
        f"{format_nbytes(usage.free)} are available in {place}, but a checkpoint of this run takes "
        f"{format_nbytes(nbytes)}"
    )
    if usage.free < nbytes:
        raise CheckpointError(found, hint="remove unneeded files, save elsewhere, or train without checkpoints")
    say(
        f"{found}: only {usage.free // nbytes} of the {count} checkpoints to keep will fit; keep fewer, or free up "
        "space"
    )
