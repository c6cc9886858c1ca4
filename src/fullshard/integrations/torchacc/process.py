"""This process's place in the job."""

from __future__ import annotations

from fullshard.api.state import ProcessState, launched_device


def joined() -> ProcessState:
    """This process's place, the process group joined if a launcher started it and no call before this one did."""
    return ProcessState.start(device=launched_device())
