"""Join the job's process group, and name the missing ranks if that takes long."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch.distributed as dist

from fullshard.core.errors import ConfigError

TIMEOUT_SECONDS = 1800.0
"""The time-out of a process group if nobody asks for another: before the first step ends, ranks load and compile."""
BY_HAND_SECONDS, LAUNCHED_SECONDS = 8.0, 60.0
"""Seconds before a line is printed: a launcher starts all ranks, and may take long on a busy host."""

_HINT = "start every rank, for example with `fullshard launch script.py`; to run one process unset RANK and WORLD_SIZE"


def join_process_group(**options: Any) -> None:
    """Call torch's `init_process_group`; a rank that waits for others says so on stderr, once.

    Raises:
        ConfigError: the environment names a rank, and not where the ranks meet.
    """
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ConfigError(
            f"RANK = {os.environ.get('RANK')} and WORLD_SIZE = {os.environ.get('WORLD_SIZE')} are set, and "
            f"{' and '.join(missing)}, where the ranks meet, {'is' if len(missing) == 1 else 'are'} not",
            hint=_HINT,
        )
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ
    timer = threading.Timer(LAUNCHED_SECONDS if is_launched else BY_HAND_SECONDS, _say_who_is_missing)
    timer.daemon = True
    timer.start()
    try:
        dist.init_process_group(**options)
    finally:
        timer.cancel()


def _say_who_is_missing() -> None:
    said = {name: os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank, size = said["RANK"], said["WORLD_SIZE"]
    others = f"{int(size) - 1} others" if rank == "0" and size.isdecimal() else "rank 0 and the others"
    sys.stderr.write(
        f"fullshard: rank {rank} of {size} is waiting for {others} at {said['MASTER_ADDR']}:{said['MASTER_PORT']} "
        "(MASTER_ADDR, MASTER_PORT)\n"
        f"hint: {_HINT}\n"
    )
