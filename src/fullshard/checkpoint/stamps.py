"""The times at which checkpoints were saved, in an order that no change of a clock reverses.

Clocks are set back, and those of two hosts differ. So a save carries the time of day, or, where that is no later than
the time in a checkpoint that this process has seen (beside the new one, loaded, or saved by itself), the next number
after that. What was saved after another always has the larger stamp.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time

from fullshard.checkpoint.format import part_paths, read_manifest
from fullshard.checkpoint.objects import Location, entries_of
from fullshard.core.errors import CheckpointError

_LATEST = [0.0]
"""The largest stamp that this process has seen."""


def note_stamp(stamp: float) -> None:
    """Give every later save of this process a larger stamp than that of a checkpoint."""
    _LATEST[0] = max(_LATEST[0], stamp)


@functools.lru_cache(maxsize=1024)
def note_stamps_in(folder: Location) -> None:
    """Note the stamps of the checkpoints that are directly in a folder, the first time that this process asks."""
    for path in entries_of(folder) if folder.is_dir() else ():
        for place in (path, *part_paths(path)) if path.is_dir() else ():
            with contextlib.suppress(CheckpointError):  # no checkpoint, or a damaged one
                note_stamp(read_manifest(place).saved_at)


def next_stamp() -> float:
    """Return the stamp of a save."""
    note_stamp(max(time.time(), math.nextafter(_LATEST[0], math.inf)))
    return _LATEST[0]
