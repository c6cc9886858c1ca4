"""Say which ranks are missing when the job's process group is not there for long."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from fullshard.comm.mesh import LAUNCH_HINT

BY_HAND_SECONDS, LAUNCHED_SECONDS = 8.0, 60.0
"""Seconds before a line is printed: a launcher starts all ranks, and may take long on a busy host."""


@contextlib.contextmanager
def naming_the_missing() -> Iterator[None]:
    """Say on stderr, once, that this rank waits for others, if the block takes long."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ
    timer = threading.Timer(LAUNCHED_SECONDS if is_launched else BY_HAND_SECONDS, _say_who_is_missing)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_who_is_missing() -> None:
    said = {name: os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank, size = said["RANK"], said["WORLD_SIZE"]
    others = f"{int(size) - 1} others" if rank == "0" and size.isdecimal() else "rank 0 and the others"
    sys.stderr.write(
        f"fullshard: rank {rank} of {size} is waiting for {others} at {said['MASTER_ADDR']}:{said['MASTER_PORT']} "
        "(MASTER_ADDR, MASTER_PORT)\n"
        f"hint: {LAUNCH_HINT}\n"
    )
