"""Join the job's process group."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from fullshard.comm.waiting import PROGRESS
from fullshard.core.errors import ConfigError

TIMEOUT_SECONDS = 1800.0
"""The time-out of a process group if nobody asks for another: before the first step ends, ranks load and compile."""
HINT = "start every rank, for example with `fullshard launch script.py`; to run one process unset RANK and WORLD_SIZE"


def join_process_group(**options: Any) -> None:
    """Call torch's `init_process_group`, which waits for all ranks."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ConfigError(
            f"RANK = {os.environ.get('RANK')} and WORLD_SIZE = {os.environ.get('WORLD_SIZE')} are set, and "
            f"{' and '.join(missing)}, where the ranks meet, {'is' if len(missing) == 1 else 'are'} not",
            hint=HINT,
        )
    with PROGRESS.watcher.joining():
        dist.init_process_group(**options)
