"""The processes of this host: how many it has room for, and that nothing a job started outlives its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from fullshard.config.hardware import usable_cpu_count as usable_cpu_count

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_SECONDS = 1.0
"""How long a killed process may take to be gone."""


def adopt_orphans() -> None:
    """Become the parent of every process below whose own parent ends, so that `end_descendants` finds it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(groups: Iterable[int]) -> None:
    """Kill whatever is left of a job whose workers were asked to end.

    Args:
        groups: the process groups of the workers, for systems where orphans are not adopted.
    """
    if sys.platform != "linux":
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        return
    deadline = time.monotonic() + _PATIENCE_SECONDS
    # One that is killed may have started another meanwhile; so until none is found.
    while (alive := _descendants(os.getpid())) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
        _reap()


def _descendants(ancestor: int) -> list[int]:
    """Processes below `ancestor` that are not zombies."""
    children: dict[int, list[int]] = {}
    alive = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(entry.name))
                if state not in "ZX":
                    alive.add(int(entry.name))
    found, todo = [], [ancestor]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return [process for process in found if process in alive]


def _reap() -> None:
    """Collect orphans that have ended. Workers are waited for elsewhere, before this is called."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
