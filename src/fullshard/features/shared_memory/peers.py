"""Memory between the ranks of a host: a file without a name per rank, which its neighbours on the host open too.

The kernel frees a file when the last process that has it open ends, however it ends, so nothing can be left behind. A
file is much longer than its written part; untouched pages take no memory.

Ranks announce what they have written by counters, each written by one rank only. That relies on stores
becoming visible in order, which x86-64 promises.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.waiting import PROGRESS
from fullshard.config.switches import COMM
from fullshard.core.process import this_machine

FILE_NBYTES = 2**46
"""More than a host has, and little enough for every rank to map some of each."""
HOST_NBYTES = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE

Made = TypeVar("Made")

_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10
"""Linux' values on x86-64, which Python does not name before 3.13, and not at all."""
_SPINS_BEFORE_SLEEP = 200
_SLEEP_SECONDS, _PATIENT_SLEEP_SECONDS = 50e-6, 200e-6
_SECONDS_BETWEEN_CHECKS = 0.5
_FAILURES_START = FILE_NBYTES - mmap.PAGESIZE
"""In rank 0's file: whether each rank has failed, a byte per rank."""


class Peers:
    """The ranks of this host that opened one another's files, and how many such hosts the group has.

    Every host has as many ranks, which follow one another in the group.

    Args:
        offers: of the ranks of this host.
        files: the descriptor of each one's file.
        group: all ranks.

    Attributes:
        rank, size: this rank's position on its host and how many there are.
        host, num_hosts: the position of this host and how many there are.
    """

    def __init__(self, offers: Sequence[_Offer], files: Sequence[int], group: dist.ProcessGroup) -> None:
        self.size = len(offers)
        self.host, self.rank = divmod(group.rank(), self.size)
        self.num_hosts = group.size() // self.size
        self.files, self._pids = files, [offer.pid for offer in offers]
        self._timeout_seconds = torch_private.timeout_of(group, torch.device("cpu")).total_seconds()
        self._failures = np.frombuffer(self.map(0, _FAILURES_START, mmap.PAGESIZE), dtype=np.uint8)

    def group_rank(self, rank: int, host: int | None = None) -> int:
        """Return the position in the group of rank `rank` of this or another host."""
        return (self.host if host is None else host) * self.size + rank

    def report_failure(self) -> None:
        """Tell the other ranks of this host that this one has failed and will send nothing more."""
        self._failures[self.rank] = 1

    def map(self, owner: int, start: int, nbytes: int, *, private: bool = False) -> mmap.mmap:
        """Map `nbytes` bytes from `start`, a whole page, of the file of rank `owner`.

        In a `private` map only this rank sees what it writes; a page that it has not written shows what others write.
        `OSError`: this process's addresses have no room for them.
        """
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
        return mmap.mmap(self.files[owner], nbytes, flags=flags, offset=start)

    def map_at(self, memory: mmap.mmap, start: int, nbytes: int, offset: int | None) -> None:
        """Replace whole pages of `memory` by private ones: those at `offset` in the file of rank 0; None: by zeros."""
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1, offset=start).data_ptr()
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
        file = self.files[0]
        if offset is None:
            flags, file, offset = flags | mmap.MAP_ANONYMOUS, -1, 0
        if _mmap()(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset) != address:
            raise RuntimeError(f"mapping {nbytes} bytes: {os.strerror(ctypes.get_errno())}")

    def wait_until(self, is_done: Callable[[], bool], *, patiently: bool = False) -> None:
        """Poll, and let other processes run meanwhile; `patiently`: less often, as this process has other things to do.

        Raises:
            RuntimeError: A rank has ended or failed, or the time-out is over.
        """
        start = next_check = time.monotonic()
        looks = 0
        while not is_done():
            looks += 1
            if looks < _SPINS_BEFORE_SLEEP and not patiently:
                os.sched_yield()
                continue
            time.sleep(_PATIENT_SLEEP_SECONDS if patiently else _SLEEP_SECONDS)
            if (now := time.monotonic()) < next_check:
                continue
            next_check = now + _SECONDS_BETWEEN_CHECKS
            for rank, pid in enumerate(self._pids):
                what = "ended" if _has_ended(pid) else "failed" if self._failures[rank] else ""
                if what and not is_done():  # it may have done all that was wanted before
                    raise RuntimeError(f"rank {self.group_rank(rank)} of the group (process {pid}) has {what}")
            if PROGRESS.given_up:
                raise RuntimeError(PROGRESS.given_up)
            if now - start > self._timeout_seconds:
                raise RuntimeError(f"no answer from another rank of the group for {self._timeout_seconds:g} s")


def connect(group: dist.ProcessGroup, make: Callable[[Peers], Made]) -> Made | str:
    """Return the object that `make` makes of a group's ranks, or the reason why they share no memory. A collective.

    `make` maps the memory that it needs, and raises `OSError` if it cannot.
    """
    mine = _offer()
    offers = _told_by_all(mine, group)
    files: list[int] = []
    problem = ""
    try:
        per_host = _ranks_per_host(offers)
        first = group.rank() // per_host * per_host
        neighbours = offers[first : first + per_host]
        for offer in neighbours:
            path = f"/proc/{offer.pid}/fd/{offer.descriptor}"
            files.append(offer.descriptor or 0 if offer.pid == mine.pid else os.open(path, os.O_RDWR | os.O_CLOEXEC))
        peers = Peers(neighbours, files, group)
        made = make(peers)
    except OSError as error:
        problem = str(error)
    # Also from a rank that cannot: the others would wait for it, and share memory without it.
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


def _ranks_per_host(offers: Sequence[_Offer]) -> int:
    """Return the number of ranks on each host.

    Raises:
        OSError: The ranks are not laid out so that memory is worth sharing.
    """
    if problem := next((offer.problem for offer in offers if offer.problem), ""):
        raise OSError(problem)
    if any(offer.descriptor is None for offer in offers):
        raise OSError(f"a rank has {COMM.name}=gloo, or a system without it")
    hosts = [(name, len(list(run))) for name, run in groupby(offers, key=lambda offer: offer.namespace)]
    names, counts = {name for name, _ in hosts}, {count for _, count in hosts}
    if len(names) < len(hosts):
        raise OSError("the ranks of a host do not follow one another")
    if len(counts) > 1:
        raise OSError(f"the hosts have different numbers of ranks: {[count for _, count in hosts]}")
    if counts == {1}:
        raise OSError("every rank is on a host of its own")
    return counts.pop()


@dataclass(frozen=True, slots=True)
class _Offer:
    """A rank's offer to its peers: where they find its file.

    Attributes:
        namespace: of process numbers; equal if and only if the ranks see one another's processes.
        pid, descriptor: the rank's process, and its descriptor of the file; None if it has no file to offer.
        problem: the reason why it has none, if it should have one.
    """

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
    except OSError as error:  # a sandbox that has no such call
        return _Offer("", os.getpid(), None, f"a rank has no file in memory: {error}")
    try:
        os.ftruncate(descriptor, FILE_NBYTES)
    except OSError as error:
        os.close(descriptor)
        return _Offer("", os.getpid(), None, f"a rank's files must be small (ulimit -f): {error}")
    return _Offer(this_machine(), os.getpid(), descriptor)


def _close(files: set[int]) -> None:
    for file in files:
        os.close(file)


@functools.cache
def _mmap() -> Callable[[int, int, int, int, int, int], int | None]:
    """Return the C library's `mmap`, which takes an address; Python's takes none."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    return cast(Callable[[int, int, int, int, int, int], int | None], function)


def _has_ended(pid: int) -> bool:
    """Return whether a process does not exist, or has ended and its parent has not noticed yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"
