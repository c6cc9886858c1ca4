"""Memory between the ranks of a host: a file without a name per rank, which its neighbours on the host open too.

The kernel frees a file when the last process that has it open ends, however it ends, so nothing can be left behind. A
file is much longer than its written part; untouched pages take no memory.

Ranks announce what they have written by counters, each written by one rank only. That relies on stores
becoming visible in order, which x86-64 promises.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import platform
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.config.switches import COMM
from fullshard.core.place import PLACE, this_machine
from fullshard.core.route import Route

logger = logging.getLogger(__name__)

FILE_NBYTES = 2**46
"""More than a host has, and little enough for every rank to map some of each."""

Made = TypeVar("Made")

_MAP_NORESERVE = 0x4000
"""Linux' value on x86-64; Python does not name it before 3.13."""
_MAP_FIXED = 0x10
"""Linux' value on x86-64; Python does not name it."""
_SPINS_BEFORE_SLEEP = 200
_SLEEP_SECONDS = 50e-6
_PATIENT_SLEEP_SECONDS = 200e-6
_SECONDS_BETWEEN_CHECKS = 0.5
_FAILURES_START = FILE_NBYTES - mmap.PAGESIZE
"""In rank 0's file: whether each rank has failed, a byte per rank."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Peers:
    """The ranks of this host that opened one another's files, and how many such hosts the group has.

    Every host has as many ranks, which follow one another in the group.

    Attributes:
        rank, size: this rank's position on its host and how many there are.
        host, num_hosts: the position of this host and how many there are.
        pids: process of each rank of this host.
        files: file descriptor of each one's file.
        timeout_seconds: how long to wait for a rank that does not move.
    """

    rank: int
    size: int
    host: int
    num_hosts: int
    pids: Sequence[int]
    files: Sequence[int]
    timeout_seconds: float
    _failures: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        if self.size > mmap.PAGESIZE:
            raise OSError(f"{self.size} ranks on a host are more than are provided for")
        failures = np.frombuffer(self.map(0, _FAILURES_START, mmap.PAGESIZE), dtype=np.uint8)
        object.__setattr__(self, "_failures", failures)

    def group_rank(self, rank: int, host: int | None = None) -> int:
        """Return the position in the group of rank `rank` of this or another host."""
        return (self.host if host is None else host) * self.size + rank

    def report_failure(self) -> None:
        """Tell the other ranks of this host that this one has failed and will send nothing more."""
        self._failures[self.rank] = 1

    def map(self, owner: int, start: int, nbytes: int, *, private: bool = False) -> mmap.mmap:
        """Map `nbytes` bytes from `start`, a whole page, of the file of rank `owner`.

        In a `private` map only this rank sees what it writes; a page that it has not written shows what others write.

        Raises:
            OSError: This process's addresses have no room for them.
        """
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
        return mmap.mmap(self.files[owner], nbytes, flags=flags, offset=start)

    def map_at(self, memory: mmap.mmap, start: int, nbytes: int, offset: int | None) -> None:
        """Replace whole pages of `memory` by private ones: those at `offset` in the file of rank 0.

        None stands for new memory, which is zero.

        Raises:
            RuntimeError: The kernel refuses.
        """
        address = torch.frombuffer(memory, dtype=torch.uint8, count=1, offset=start).data_ptr()
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
        file = self.files[0]
        if offset is None:
            flags, file, offset = flags | mmap.MAP_ANONYMOUS, -1, 0
        if _mmap()(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset) != address:
            raise RuntimeError(f"mapping {nbytes} bytes: {os.strerror(ctypes.get_errno())}")

    def wait_until(self, is_done: Callable[[], bool], *, patiently: bool = False) -> None:
        """Poll, and let other processes run meanwhile.

        Args:
            is_done: the condition to wait for.
            patiently: poll less often, because this process has other things to do.

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
            for rank, pid in enumerate(self.pids):
                # It may have done all that was wanted before it ended.
                if _has_ended(pid) and not is_done():
                    raise RuntimeError(f"rank {self.group_rank(rank)} of the group (process {pid}) has ended")
                if self._failures[rank] and not is_done():
                    raise RuntimeError(f"rank {self.group_rank(rank)} of the group (process {pid}) has failed")
            if PLACE.given_up:
                raise RuntimeError(PLACE.given_up)
            if now - start > self.timeout_seconds:
                raise RuntimeError(f"no answer from another rank of the group for {self.timeout_seconds:g} s")


def connect(group: dist.ProcessGroup, make: Callable[[Peers], Made]) -> tuple[Made | None, str]:
    """Return the object that `make` makes of the ranks of `group`. A collective.

    `make` maps the memory that it needs, and raises `OSError` if it cannot.

    Returns:
        The object and "", or None and the reason if any of the ranks cannot or must not share memory.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine, own_file = _offer()
    offers: list[_Offer] = [mine] * size
    with torch_private.uncounted():
        dist.all_gather_object(offers, mine, group=group)
    files: list[int] = []
    made = problem = None
    try:
        per_host = _ranks_per_host(offers)
        host, local_rank = divmod(rank, per_host)
        neighbours = offers[host * per_host : (host + 1) * per_host]
        for source, offer in enumerate(neighbours):
            files.append(own_file if source == local_rank and own_file is not None else _open(offer))
        peers = Peers(
            rank=local_rank,
            size=per_host,
            host=host,
            num_hosts=size // per_host,
            pids=[offer.pid for offer in neighbours],
            files=files,
            timeout_seconds=torch_private.timeout_of(group, torch.device("cpu")).total_seconds(),
        )
        made = make(peers)
    except OSError as error:
        problem = str(error)
    # Also from a rank that cannot: the others would wait for it, and share memory without it.
    problems: list[str | None] = [None] * size
    with torch_private.uncounted():
        dist.all_gather_object(problems, problem, group=group)
    if any(problems):
        reason = next(p for p in problems if p)
        logger.debug("no shared memory between the ranks: %s", reason)
        _close({file for file in (*files, own_file) if file is not None})
        return None, reason
    weakref.finalize(peers, _close, set(files)).atexit = False
    return made, ""


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
    [per_host] = counts
    if Route.of(len(offers), on_cpu=True, per_host=per_host) is Route.POINT_TO_POINT:
        raise OSError("every rank is on a host of its own")
    return per_host


def host_memory_nbytes() -> int:
    """Return the bytes of memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_possible() -> bool:
    """Return whether this process could share memory at all, and sharing is not turned off."""
    is_ordered = platform.machine() in ("x86_64", "AMD64")
    is_wanted = COMM.read() != "gloo"
    return is_ordered and is_wanted and hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


@dataclass(frozen=True, slots=True)
class _Offer:
    """A rank's offer to its peers: where they find its file.

    Attributes:
        namespace: of process numbers; equal if and only if the ranks see one another's processes.
        pid: the rank's process.
        descriptor: the process's descriptor of the file; None if it has no file to offer.
        problem: the reason why it has none, if it should have one.
    """

    namespace: str
    pid: int
    descriptor: int | None
    problem: str = ""


def _offer() -> tuple[_Offer, int | None]:
    if not is_possible():
        return _Offer("", os.getpid(), None), None
    try:
        descriptor = os.memfd_create("fullshard", os.MFD_CLOEXEC)
    except OSError as error:  # a sandbox that has no such call
        return _Offer("", os.getpid(), None, f"a rank has no file in memory: {error}"), None
    try:
        os.ftruncate(descriptor, FILE_NBYTES)
    except OSError as error:
        os.close(descriptor)
        return _Offer("", os.getpid(), None, f"a rank's files must be small (ulimit -f): {error}"), None
    return _Offer(this_machine(), os.getpid(), descriptor), descriptor


def _open(offer: _Offer) -> int:
    return os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)


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
