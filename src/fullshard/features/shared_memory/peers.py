"""Memory that the ranks of a host share. Each rank creates one unnamed file, and all ranks open it.

When the last process that has a file open ends, however it ends, the operating system frees the file, so no file is
ever left behind. A file is much longer than the part that is used; untouched pages take no memory.

Ranks use counters to announce what they have written. Only one rank writes each counter. This requires that stores
become visible in order, which x86-64 guarantees.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.waiting import PROGRESS
from fullshard.config.switches import COMM
from fullshard.core.process import stat_of, this_machine

FILE_NBYTES = 2**46
"""Larger than the memory of any host, but small enough for every rank to map a part of each file."""
HOST_NBYTES = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE

Made = TypeVar("Made")

_MAP_NORESERVE = 0x4000
"""Linux' value on x86-64, which Python does not name before 3.13."""
_SPINS_BEFORE_SLEEP = 200
_SLEEP_SECONDS = 50e-6
_SECONDS_BETWEEN_CHECKS = 0.5


class Peers:
    """The ranks of a group on one host. `files` has a file descriptor for the file of each rank."""

    def __init__(self, offers: Sequence[_Offer], files: Sequence[int], group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.files, self._pids = files, [offer.pid for offer in offers]
        self._timeout_seconds = torch_private.timeout_of(group, torch.device("cpu")).total_seconds()

    def map(self, owner: int, start: int, nbytes: int, *, private: bool = False) -> mmap.mmap:
        """Map `nbytes` bytes of the file of rank `owner`, from byte `start`, a multiple of the page size.

        Writes to a `private` map are visible only to this rank. A page that this rank has not written to shows what
        other ranks have written. Raise `OSError` if the address space of this process has no room for the map.
        """
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
        return mmap.mmap(self.files[owner], nbytes, flags=flags, offset=start)

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done` returns true. Raise `RuntimeError` if another rank has ended, or at the timeout."""
        start = next_check = time.monotonic()
        looks = 0
        while not is_done():
            looks += 1
            if looks < _SPINS_BEFORE_SLEEP:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_SECONDS)
            if (now := time.monotonic()) < next_check:
                continue
            next_check = now + _SECONDS_BETWEEN_CHECKS
            for rank, pid in enumerate(self._pids):
                # A zombie has ended, too. A rank may have finished its part before it ended.
                if stat_of(pid)[0] in "ZX" and not is_done():
                    raise RuntimeError(f"rank {rank} of the group (process {pid}) has ended")
            if PROGRESS.given_up:
                raise RuntimeError(PROGRESS.given_up)
            if now - start > self._timeout_seconds:
                raise RuntimeError(f"no answer from another rank of the group for {self._timeout_seconds:g} s")


def connect(group: dist.ProcessGroup, make: Callable[[Peers], Made]) -> Made | str:
    """Let the ranks of a group open each other's files, and return the object that `make` creates from these `Peers`.

    `make` maps the memory that it needs, and raises `OSError` if it cannot. If any rank cannot share memory, return the
    reason on all ranks. This is a collective.
    """
    mine = _offer()
    offers = _told_by_all(mine, group)
    files: list[int] = []
    problem = ""
    try:
        _check(offers)
        for offer in offers:
            path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
            files.append(offer.descriptor or 0 if offer.pid == mine.pid else os.open(path, os.O_RDWR | os.O_CLOEXEC))
        peers = Peers(offers, files, group)
        made = make(peers)
    except OSError as error:
        problem = str(error)
    # Gather from failed ranks, too; otherwise, the others would wait or share memory without them.
    problem = next(filter(None, _told_by_all(problem, group)), "")
    if problem:
        _close({*files, *(() if mine.descriptor is None else (mine.descriptor,))})
        return problem
    weakref.finalize(peers, _close, set(files)).atexit = False
    return made


def _told_by_all(mine: Made, group: dist.ProcessGroup) -> list[Made]:
    told = [mine] * group.size()
    with torch_private.uncounted():
        dist.all_gather_object(told, mine, group=group)
    return told


def _check(offers: Sequence[_Offer]) -> None:
    """Raise `OSError` if a rank has no file to share, or if the ranks are on different hosts."""
    if problem := next((offer.problem for offer in offers if offer.problem), ""):
        raise OSError(problem)
    if any(offer.descriptor is None for offer in offers):
        raise OSError(f"a rank has {COMM.name}=gloo set, or runs on a system without shared memory support")
    if (hosts := len({offer.namespace for offer in offers})) > 1:
        raise OSError(f"they are on {hosts} hosts")


@dataclass(frozen=True, slots=True)
class _Offer:
    """What other ranks need to open a rank's file, in a PID namespace, or the `problem` why there is none."""

    namespace: str
    pid: int
    descriptor: int | None
    problem: str = ""


def _offer() -> _Offer:
    is_possible = hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()
    if platform.machine() not in ("x86_64", "AMD64") or not is_possible or COMM.read() == "gloo":
        return _Offer("", os.getpid(), None)
    try:
        descriptor = os.memfd_create("fullshard", os.MFD_CLOEXEC)
    except OSError as error:  # a sandbox without this system call
        return _Offer("", os.getpid(), None, f"a rank could not create a file in memory: {error}")
    try:
        os.ftruncate(descriptor, FILE_NBYTES)
    except OSError as error:
        os.close(descriptor)
        return _Offer("", os.getpid(), None, f"a rank has a limit on the size of files (ulimit -f): {error}")
    return _Offer(this_machine(), os.getpid(), descriptor)


def _close(files: set[int]) -> None:
    for file in files:
        os.close(file)
