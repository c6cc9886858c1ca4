"""This process's place in the job."""

from __future__ import annotations

from fullshard.api.state import ProcessState
from fullshard.config.handover import launched
from fullshard.config.resolve import resolve


def joined() -> ProcessState:
    """This process's place, the process group joined if a launcher started it and no call before this one did."""
    return ProcessState.start(device=resolve([launched()]).config.launch.device)
