"""Memory between the ranks of one host: a file without a name per rank, which its peers open too.

The kernel frees a file when the last process that has it open ends, however it ends, so nothing can be left behind. A
file is much longer than anything is written to it; what is not touched takes no memory.

Ranks tell one another of what they have written by counters, each written by one rank only. That relies on stores
becoming visible in order, which x86-64 promises.
"""

from __future__ import annotations

import logging
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

logger = logging.getLogger(__name__)

SWITCH = "FULLSHARD_COMM"
"""Environment variable; `gloo` turns shared memory off."""

FILE_NBYTES = 2**44
"""More than a host has, and little enough for every rank to map some of each."""

Made = TypeVar("Made")

_MAP_NORESERVE = 0x4000
"""Linux' value on x86-64; Python does not name it before 3.13."""
_SPINS_BEFORE_SLEEP = 200
_SLEEP_SECONDS = 50e-6
_SECONDS_BETWEEN_CHECKS = 0.5


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Peers:
    """The ranks of one host that opened one another's files.

    Attributes:
        rank, size: this rank's position and how many there are.
        pids: process of each.
        files: file descriptor of each one's file.
        timeout_seconds: how long to wait for one that does not move.
    """

    rank: int
    size: int
    pids: Sequence[int]
    files: Sequence[int]
    timeout_seconds: float

    def map(self, owner: int, start: int, nbytes: int, *, private: bool = False) -> mmap.mmap:
        """`nbytes` bytes from `start`, a whole page, of the file of rank `owner`.

        In a `private` one this rank alone sees what it writes; of a page it did not write it sees what the others do.

        Raises:
            OSError: there is no room for them among this process's addresses.
        """
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
        return mmap.mmap(self.files[owner], nbytes, flags=flags, offset=start)

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Look again and again, and let other processes run meanwhile.

        Raises:
            RuntimeError: a rank has ended, or nothing came within the time-out.
        """
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
            for rank, pid in enumerate(self.pids):
                if _has_ended(pid) and not is_done():  # what it did before it ended may be all that was wanted
                    raise RuntimeError(f"rank {rank} of the group (process {pid}) has ended")
            if now - start > self.timeout_seconds:
                raise RuntimeError(f"no answer from another rank of the group for {self.timeout_seconds:g} s")


def connect(group: dist.ProcessGroup, make: Callable[[Peers], Made]) -> Made | None:
    """What `make` makes of the ranks of `group`, or None if any of them cannot or shall not share memory. A collective.

    `make` maps what it needs, and raises `OSError` if it cannot.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine, own_file = _offer()
    offers: list[_Offer | None] = [None] * size
    dist.all_gather_object(offers, mine, group=group)
    files: list[int] = []
    made = problem = None
    try:
        for source, offer in enumerate(offers):
            files.append(own_file if source == rank and own_file is not None else _open(offer, mine))
        peers = Peers(
            rank=rank,
            size=size,
            pids=[offer.pid for offer in offers if offer is not None],
            files=files,
            timeout_seconds=group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        )
        made = make(peers)
    except OSError as error:
        problem = str(error)
    problems: list[str | None] = [None] * size
    dist.all_gather_object(problems, problem, group=group)
    if any(problems):
        logger.debug("no shared memory between the ranks: %s", next(p for p in problems if p))
        _close({file for file in (*files, own_file) if file is not None})
        return None
    weakref.finalize(peers, _close, set(files)).atexit = False
    return made


def host_memory_nbytes() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def is_possible() -> bool:
    """Whether this process could share memory at all, and nobody has turned it off."""
    is_ordered = platform.machine() in ("x86_64", "AMD64")
    is_wanted = os.environ.get(SWITCH, "auto") != "gloo"
    return is_ordered and is_wanted and hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


@dataclass(frozen=True, slots=True)
class _Offer:
    """Where peers find a rank's file.

    Attributes:
        namespace: of process numbers; equal if and only if the ranks see one another's processes.
        pid: process.
        descriptor: its descriptor of the file; None if it has none to offer.
    """

    namespace: str
    pid: int
    descriptor: int | None


def _offer() -> tuple[_Offer, int | None]:
    if not is_possible():
        return _Offer("", os.getpid(), None), None
    descriptor = os.memfd_create("fullshard", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, FILE_NBYTES)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _Offer(f"{boot} {Path('/proc/self/ns/pid').readlink()}", os.getpid(), descriptor), descriptor


def _open(offer: _Offer | None, mine: _Offer) -> int:
    if offer is None or offer.descriptor is None:
        raise OSError("a rank offers none")
    if offer.namespace != mine.namespace:
        raise OSError("the ranks are on several hosts")
    return os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)


def _close(files: set[int]) -> None:
    for file in files:
        os.close(file)


def _has_ended(pid: int) -> bool:
    """Whether there is no such process, or only what its parent has not noticed yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"
