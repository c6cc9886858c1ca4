"""The process's place in the job."""

from __future__ import annotations

from fullshard.api.state import ProcessState, launched_device


def joined() -> ProcessState:
    """Return this process's place; join the process group if a launcher started it and no earlier call has joined."""
    return ProcessState.start(device=launched_device())
