"""How processes are started and how each learns which rank it is.

The names below are imported when they are first used: a launcher reads its flags before it loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("fullshard.launch.environment"), name)
