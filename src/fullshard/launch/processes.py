"""Processes on this host: how many can run, and how to make sure that none of them outlives the launcher."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import psutil

from fullshard.config.hardware import usable_cpu_count
from fullshard.core.errors import ConfigError, plural

_MOST_PER_PROCESSOR = 64
_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_SECONDS = 1.0
"""Seconds that a killed process may take to disappear."""


def worker_variables(nproc: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that divides the cores among `nproc` processes, or no variables if `environ` has it."""
    threads = max(1, usable_cpu_count() // nproc)
    return {} if "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": str(threads)}


def check_count(nproc: int, said_by: str = "") -> None:
    """Raise `ConfigError` if `nproc` processes are too many for this host's processors, even for a quick trial."""
    processors = usable_cpu_count()
    if nproc > (most := _MOST_PER_PROCESSOR * processors):
        raise ConfigError(
            f"{said_by}{plural(nproc, 'process')} are too many for a host with {plural(processors, 'processor')}",
            hint=f"use at most {most}; running more than two per processor is slow and only useful for trials",
        )


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants, so that `end_descendants` finds them (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def below(pids: Iterable[int]) -> set[int]:
    """Return the processes among `pids` that are alive and, on Linux, descendants of this process."""
    if sys.platform == "linux":
        return set(pids) & set(descendants())
    return {pid for pid in pids if psutil.pid_exists(pid)}


def reap_orphans(spared: Collection[int]) -> None:
    """Reap adopted processes that have ended, so that they do not pile up. Leave those in `spared` to other code."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(ChildProcessError):  # there are no children
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in spared:
                return  # waitid returns this process again until the other code has reaped it
            os.waitpid(ended.si_pid, os.WNOHANG)


def end_descendants(groups: Iterable[int], *, spared: Collection[int] = ()) -> None:
    """Kill all processes of a job except those in `spared`. On systems other than Linux, kill its process groups."""
    if sys.platform != "linux":
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        return
    begin = time.monotonic()
    # A process may have started another before it was killed, so repeat until none is found.
    while (alive := [p for p in descendants() if p not in spared]) and time.monotonic() < begin + _PATIENCE_SECONDS:
        for process in alive:
            if _cleans_up(process) and time.monotonic() < begin + _PATIENCE_SECONDS / 2:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
        for process in alive:  # this process has adopted the orphans; the others have parents that reap them
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


def _cleans_up(pid: int) -> bool:
    """Return whether a process only cleans up leaked shared memory. Such a process ends when no process uses it."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"resource_tracker" in command or b"torch_shm_manager" in command
    return False


def descendants() -> list[int]:
    """Return this process's descendants that are not zombies."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it may have just ended
            if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                found.append(process.pid)
    return found
