"""Timestamps for checkpoints that always increase, even if clocks are set back.

Clocks can be set back, and the clocks of two hosts differ. The timestamp of a save is therefore the time of day, unless
this process has seen a timestamp that is equal or later. In that case, it is the next larger number. The process sees
the timestamps of checkpoints in the same directory and of those that it has loaded or saved. In this way, a later save
always has a larger timestamp.
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
"""The largest timestamp that this process has seen."""


def note_stamp(stamp: float) -> None:
    """Ensure that all later saves of this process get timestamps larger than `stamp`."""
    _LATEST[0] = max(_LATEST[0], stamp)


@functools.lru_cache(maxsize=1024)
def note_stamps_in(folder: Location) -> None:
    """Call `note_stamp` for all checkpoints directly in a folder, once per folder and process."""
    for path in entries_of(folder) if folder.is_dir() else ():
        for place in (path, *part_paths(path)) if path.is_dir() else ():
            with contextlib.suppress(CheckpointError):  # not a checkpoint, or a damaged one
                note_stamp(read_manifest(place).saved_at)


def next_stamp() -> float:
    """Return the timestamp for a new save."""
    note_stamp(max(time.time(), math.nextafter(_LATEST[0], math.inf)))
    return _LATEST[0]
