"""Start a job's processes, and tell each process its rank.

The names below are imported on first use, because a launcher reads its flags before it loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard.core.imports import on_demand

if TYPE_CHECKING:
    from fullshard.launch.environment import (
        RankEnvironment,
        init_process_group_from_environment,
        rank_device,
        read_rank_environment,
        run_on_main,
    )

__all__ = [
    "RankEnvironment",
    "init_process_group_from_environment",
    "rank_device",
    "read_rank_environment",
    "run_on_main",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_demand(__name__, dict.fromkeys(__all__, "fullshard.launch.environment"))
