"""Timestamps for checkpoints that always increase, even if clocks are set back or differ between hosts.

The timestamp of a save is the time of day or, if this process has seen an equal or later timestamp (in checkpoints in
the same directory, or that it has loaded or saved), the next larger number.
"""

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
