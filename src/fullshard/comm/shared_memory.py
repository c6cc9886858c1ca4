"""Collectives over shared memory, for ranks on one host that compute on its CPU.

Each rank owns *rings* in memory that its peers map too. A ring is a short row of slots: the owner copies a piece of a
tensor into a free slot and counts it as posted; a reader copies it out, or adds it up where it lies, and counts it as
consumed; a slot that every reader has consumed is free again. So a tensor of any size goes through a few MiB that are
mapped once, and stays in the processor's cache on the way.

    all-gather        one ring per rank, read by all its peers
    reduce-scatter    one ring per pair of ranks; the reader adds up all peers' pieces in rank order

Nothing blocks when a collective is issued: whatever cannot be copied yet is copied when this rank issues or waits the
next time. There is no thread and no lock, only counters that one rank writes and others read. That relies on stores
becoming visible in order, which x86-64 promises, so other processors keep to Gloo.

The memory has no name anywhere: it is gone with the processes, however they end.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from fullshard.comm.base import Work, own_interval
from fullshard.comm.torch_dist import GlooCollectives

logger = logging.getLogger(__name__)

SWITCH = "FULLSHARD_COMM"
"""Environment variable; `gloo` turns shared memory off."""

SLOT_NBYTES = 512 * 1024
"""Long enough that counting costs nothing, short enough that a slot is still in the cache when it is read."""
NUM_SLOTS = 16

_HEADER_NBYTES = 4096
_TAGS_OFFSET = 2048
_MAX_READERS = _TAGS_OFFSET // 64 - 1
_LINE = 8
"""Counters, of 8 bytes each, in a cache line of their own."""
_SPINS_BEFORE_SLEEP = 200
_SLEEP_SECONDS = 50e-6
_SECONDS_BETWEEN_CHECKS = 0.5


class Ring:
    """One rank's slots, as the owner or a reader sees them.

    Header, in lines of 64 bytes: line 0 counts the slots posted; line 1 + i the slots consumed by reader i. Then the
    tag of each slot's collective.
    """

    def __init__(self, memory: mmap.mmap, index: int, readers: int) -> None:
        start, nbytes = index * self.nbytes(), NUM_SLOTS * SLOT_NBYTES
        header = np.frombuffer(memory, dtype=np.int64, offset=start, count=_HEADER_NBYTES // 8)
        self._posted = header[:1]
        self._consumed = header[_LINE : _LINE * (1 + readers) : _LINE]
        self._tags = header[_TAGS_OFFSET // 8 :][:NUM_SLOTS]
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=start + _HEADER_NBYTES, count=nbytes)

    @staticmethod
    def nbytes() -> int:
        """Bytes of memory a ring takes."""
        return _HEADER_NBYTES + NUM_SLOTS * SLOT_NBYTES

    @property
    def has_room(self) -> bool:
        """Whether the owner may post."""
        return int(self._posted[0]) - int(self._consumed.min()) < NUM_SLOTS

    def post(self, piece: torch.Tensor, tag: int) -> None:
        """Owner: copy a piece (bytes, at most a slot) into the next slot."""
        index = int(self._posted[0]) % NUM_SLOTS
        self._slots.narrow(0, index * SLOT_NBYTES, piece.numel()).copy_(piece)
        self._tags[index] = tag
        self._posted[0] += 1

    def has_piece(self, reader: int) -> bool:
        """Whether there is something this reader has not consumed."""
        return int(self._posted[0]) > int(self._consumed[reader])

    def tag(self, reader: int) -> int:
        """Tag of the next piece."""
        return int(self._tags[int(self._consumed[reader]) % NUM_SLOTS])

    def piece(self, reader: int, nbytes: int) -> torch.Tensor:
        """The next piece, where it lies."""
        return self._slots.narrow(0, int(self._consumed[reader]) % NUM_SLOTS * SLOT_NBYTES, nbytes)

    def consume(self, reader: int) -> None:
        """Reader: done with the next piece."""
        self._consumed[reader] += 1


@dataclass(slots=True)
class Lane:
    """A ring this rank reads, and its number among the readers."""

    ring: Ring
    reader: int

    @property
    def has_piece(self) -> bool:
        """Whether something is there to read."""
        return self.ring.has_piece(self.reader)

    def next_piece(self, nbytes: int, tag: int, source: int) -> torch.Tensor:
        """The next piece of the collective `tag`.

        Raises:
            RuntimeError: the other rank is in another collective.
        """
        found = self.ring.tag(self.reader)
        if found != tag:
            raise RuntimeError(f"rank {source} of the group is in collective {found}, this rank in {tag}")
        return self.ring.piece(self.reader, nbytes)

    def consume(self) -> None:
        """Give the slot back."""
        self.ring.consume(self.reader)


def _pieces(nbytes: int) -> list[tuple[int, int]]:
    """(start, length) of each piece of `nbytes` bytes."""
    return [(start, min(SLOT_NBYTES, nbytes - start)) for start in range(0, nbytes, SLOT_NBYTES)]


class _Sending:
    """What is left to post of one tensor into one ring."""

    def __init__(self, ring: Ring, tensor: torch.Tensor, tag: int) -> None:
        self._ring, self._tag = ring, tag
        self._data = tensor.view(torch.uint8)
        self._left = deque(_pieces(self._data.numel()))

    def step(self) -> bool:
        """Post as much as there is room for; whether that was anything."""
        before = len(self._left)
        while self._left and self._ring.has_room:
            start, nbytes = self._left.popleft()
            self._ring.post(self._data.narrow(0, start, nbytes), self._tag)
        return len(self._left) < before

    @property
    def is_done(self) -> bool:
        """Whether everything is posted."""
        return not self._left


class _Receiving:
    """What is left to copy of one peer's interval."""

    def __init__(self, lane: Lane, source: int, into: torch.Tensor, tag: int) -> None:
        self._lane, self._source, self._tag = lane, source, tag
        self._data = into.view(torch.uint8)
        self._left = deque(_pieces(self._data.numel()))

    def step(self) -> bool:
        """Copy what is there; whether that was anything."""
        before = len(self._left)
        while self._left and self._lane.has_piece:
            start, nbytes = self._left[0]
            self._data.narrow(0, start, nbytes).copy_(self._lane.next_piece(nbytes, self._tag, self._source))
            self._lane.consume()
            self._left.popleft()
        return len(self._left) < before

    @property
    def is_done(self) -> bool:
        """Whether everything is copied."""
        return not self._left


class _Summing:
    """What is left to add up of this rank's interval; in rank order, so that the sum is always the same number."""

    def __init__(self, lanes: dict[int, Lane], rank: int, own: torch.Tensor, tag: int) -> None:
        self._lanes, self._rank, self._own, self._tag = lanes, rank, own, tag
        self._left = deque(_pieces(own.numel() * own.itemsize))

    def step(self) -> bool:
        """Add up the pieces that every peer has posted; whether that was anything."""
        before = len(self._left)
        while self._left and all(lane.has_piece for lane in self._lanes.values()):
            start, nbytes = self._left[0]
            own = self._own.view(torch.uint8).narrow(0, start, nbytes).view(self._own.dtype)
            terms = {
                source: lane.next_piece(nbytes, self._tag, source).view(self._own.dtype)
                for source, lane in self._lanes.items()
            }
            if len(terms) == 1:
                own.add_(next(iter(terms.values())))  # the order of two makes no difference
            else:
                terms[self._rank] = own
                ordered = [terms[source] for source in sorted(terms)]
                total = ordered[0] + ordered[1]
                for term in ordered[2:]:
                    total.add_(term)
                own.copy_(total)
            for lane in self._lanes.values():
                lane.consume()
            self._left.popleft()
        return len(self._left) < before

    @property
    def is_done(self) -> bool:
        """Whether the sum is complete."""
        return not self._left


_Step = _Sending | _Receiving | _Summing


class Exchange:
    """A collective under way."""

    def __init__(self, owner: SharedMemoryCollectives, steps: dict[object, _Step], result: torch.Tensor) -> None:
        self.owner, self.steps, self.result = owner, steps, result

    @property
    def is_done(self) -> bool:
        """Whether this rank has given and taken everything."""
        return all(step.is_done for step in self.steps.values())

    def wait(self) -> torch.Tensor:
        """Go on until it is done."""
        self.owner.finish(self)
        return self.result


class SharedMemoryCollectives(GlooCollectives):
    """Collectives of the ranks of one host. Get one from `connect`, which says whether it is possible.

    All-reduce, used along the replicate axis, stays with Gloo.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        gather: Ring,
        scatter: dict[int, Ring],
        gathered: dict[int, Lane],
        scattered: dict[int, Lane],
        pids: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        super().__init__(group)
        self._gather, self._scatter, self._gathered, self._scattered = gather, scatter, gathered, scattered
        self._pids, self._timeout_seconds = pids, timeout_seconds
        self._under_way: deque[Exchange] = deque()

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Work:
        """Post this rank's interval once, and copy every peer's."""
        steps: dict[object, _Step] = {"send": _Sending(self._gather, own_interval(full, self.rank, self.size), tag)}
        for source, lane in self._gathered.items():
            steps[lane.ring] = _Receiving(lane, source, own_interval(full, source, self.size), tag)
        return self._begin(Exchange(self, steps, full))

    def reduce_scatter(self, full: torch.Tensor, *, tag: int) -> Work:
        """Post every peer its interval, and add up theirs for this one."""
        steps: dict[object, _Step] = {
            ring: _Sending(ring, own_interval(full, to, self.size), tag) for to, ring in self._scatter.items()
        }
        own = own_interval(full, self.rank, self.size)
        steps["sum"] = _Summing(self._scattered, self.rank, own, tag)
        return self._begin(Exchange(self, steps, own))

    def _begin(self, exchange: Exchange) -> Exchange:
        self._under_way.append(exchange)
        # Only give here: what is taken may be wrong, and that is for the one who waits to hear.
        self._progress(_Sending)
        return exchange

    def _progress(self, kind: type[_Sending] | type[object] = object) -> bool:
        """Copy what can be copied now, oldest first; whether that was anything."""
        busy: set[object] = set()  # rings are first come, first served
        moved = False
        for exchange in self._under_way:
            for key, step in exchange.steps.items():
                if not step.is_done and key not in busy and isinstance(step, kind):
                    moved |= step.step()
                    if not step.is_done:
                        busy.add(key)
        while self._under_way and self._under_way[0].is_done:
            self._under_way.popleft()
        return moved

    def finish(self, exchange: Exchange) -> None:
        """Go on until `exchange` is done.

        Raises:
            RuntimeError: a peer has ended, or does not come within the group's time-out.
        """
        idle, deadline = 0, time.monotonic() + self._timeout_seconds
        next_check = time.monotonic() + _SECONDS_BETWEEN_CHECKS
        while not exchange.is_done:
            if self._progress():
                idle, deadline = 0, time.monotonic() + self._timeout_seconds
                continue
            idle += 1
            if idle < _SPINS_BEFORE_SLEEP:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_SECONDS)
            if (now := time.monotonic()) > next_check:
                next_check = now + _SECONDS_BETWEEN_CHECKS
                self._check_peers()
                if now > deadline:
                    raise RuntimeError(f"no rank of the group moved for {self._timeout_seconds:g} s")

    def _check_peers(self) -> None:
        for rank, pid in enumerate(self._pids):
            if _has_ended(pid):
                raise RuntimeError(f"rank {rank} of the group (process {pid}) has ended")


def connect(group: dist.ProcessGroup) -> SharedMemoryCollectives | None:
    """Shared memory between all ranks of `group`, or None if they cannot or shall not have it. A collective."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = _offer(size)
    offers: list[_Offer | None] = [None] * size
    dist.all_gather_object(offers, mine.offer, group=group)
    try:
        rings = [_accept(owner, offer, mine.offer, size) for owner, offer in enumerate(offers)]
        problem = None
    except OSError as error:
        rings, problem = [], str(error)
    problems: list[str | None] = [None] * size
    dist.all_gather_object(problems, problem, group=group)
    for descriptor in mine.descriptors:  # everybody has mapped it, or never will
        os.close(descriptor)
    if any(problems):
        logger.debug("no shared memory between the ranks: %s", next(p for p in problems if p))
        return None
    pids = [offer.pid for offer in offers if offer is not None]
    peers = [peer for peer in range(size) if peer != rank]
    return SharedMemoryCollectives(
        group,
        gather=rings[rank].gather,
        scatter={peer: rings[rank].scatter[peer] for peer in peers},
        gathered={peer: Lane(rings[peer].gather, _reader_number(rank, peer)) for peer in peers},
        scattered={peer: Lane(rings[peer].scatter[rank], 0) for peer in peers},
        pids=pids,
        timeout_seconds=group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
    )


def is_possible() -> bool:
    """Whether this process could share memory at all, and nobody has turned it off."""
    is_ordered = platform.machine() in ("x86_64", "AMD64")
    is_wanted = os.environ.get(SWITCH, "auto") != "gloo"
    return is_ordered and is_wanted and hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


def _has_ended(pid: int) -> bool:
    """Whether there is no such process, or only what its parent has not noticed yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def _reader_number(reader: int, owner: int) -> int:
    """Readers of a ring are numbered in rank order, the owner left out."""
    return reader - (reader > owner)


@dataclass(frozen=True, slots=True)
class _Offer:
    """Where peers find a rank's memory.

    Attributes:
        namespace: of process numbers; equal if and only if the ranks see one another's processes.
        pid: process.
        descriptor: its file descriptor of the memory; None if it has none to offer.
    """

    namespace: str
    pid: int
    descriptor: int | None


@dataclass(frozen=True, slots=True)
class _Mine:
    offer: _Offer
    descriptors: list[int]


@dataclass(frozen=True, slots=True)
class _Rings:
    """All rings of one rank: the one it gathers with, and one per reader to scatter with."""

    gather: Ring
    scatter: dict[int, Ring]


def _offer(size: int) -> _Mine:
    if not is_possible():
        return _Mine(_Offer("", os.getpid(), None), [])
    descriptor = os.memfd_create("fullshard", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size * Ring.nbytes())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return _Mine(_Offer(f"{boot} {Path('/proc/self/ns/pid').readlink()}", os.getpid(), descriptor), [descriptor])


def _accept(owner: int, offer: _Offer | None, mine: _Offer, size: int) -> _Rings:
    """Map the memory of rank `owner`, which may be this one.

    Raises:
        OSError: it is on another host, or not to be had.
    """
    if offer is None or offer.descriptor is None or size - 1 > _MAX_READERS:
        raise OSError("a rank offers none")
    if offer.namespace != mine.namespace:
        raise OSError("the ranks are on several hosts")
    with Path(f"/proc/{offer.pid}/fd/{offer.descriptor}").open("r+b") as file:
        memory = mmap.mmap(file.fileno(), size * Ring.nbytes())
    # One ring per reader to scatter with; in the owner's own place, the one to gather with.
    return _Rings(
        gather=Ring(memory, owner, size - 1),
        scatter={reader: Ring(memory, reader, 1) for reader in range(size) if reader != owner},
    )
