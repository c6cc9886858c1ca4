"""How processes are started and how each learns which rank it is."""

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
