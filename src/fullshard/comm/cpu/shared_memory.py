"""Collectives over shared memory, for ranks on one host that compute on its CPU.

Nothing is sent. Each rank writes where its peers read:

    all-gather        The unsharded bucket is one piece of memory that all ranks map and in which each owns its
                      interval. If ranks compute in the dtype of the main weights, that interval *is* the main weights,
                      and unsharding copies nothing at all; else each rank casts its own into it.
    reduce-scatter    Each rank collects its gradients in memory that the others can read, says where, and adds up its
                      own interval of everybody's, in rank order, so that the sum is always the same number. It casts
                      what it reads if the sum is to be in a wider dtype.

What remains is to know when. A rank counts how often it has offered and freed each bucket, and how many gradients it
has posted and read. Main weights change only when no peer can be reading them any more; see `wait_for_readers`.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from fullshard.comm.base import FullBuffer, ResizedBuffer, Work, own_interval
from fullshard.comm.cpu.buffer_pool import BufferPool
from fullshard.comm.cpu.gloo import GlooCollectives
from fullshard.comm.cpu.heap import TRIM_NBYTES, heap, is_at_peak
from fullshard.comm.cpu.pages import CpuPages
from fullshard.comm.cpu.peers import FILE_NBYTES, Peers, host_memory_nbytes
from fullshard.comm.packing import Packing
from fullshard.core.sizes import LONG_NBYTES

_PAGE_NBYTES = mmap.PAGESIZE
_BUFFERS_START = FILE_NBYTES // 4
"""In rank 0's file: counters and unsharded buckets begin here; before it, each rank's gradients."""
_LINE = 8
"""Counters, of 8 bytes each, in a cache line."""
_QUEUE_NBYTES = 2**17
_ENTRY = 3
"""Numbers in one."""
_QUEUE_DEPTH = 2048
"""Gradients that may be under way; a rank waits for its peers before it posts more."""
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
"""Numbered alike on every rank."""
MAX_BUFFERS = 2**16
"""Buckets of all models that ever use these collectives."""
_BLOCK_NBYTES = 256 * 1024
"""Of a sum that is made in one go: short enough that it is still in the cache when it is divided."""


class SharedMemoryCollectives(GlooCollectives):
    """Collectives of the ranks of one host, which send nothing, and so pack nothing.

    All-reduce, used along the replicate axis, stays with Gloo.
    """

    sends = False

    def __init__(self, group: dist.ProcessGroup, peers: Peers) -> None:
        super().__init__(group)
        # Mapped at once: a rank that has no room for it among its addresses raises OSError, and all keep to Gloo.
        self._buffers, self._queues = SharedBuckets(peers), SendQueues(peers)
        self.pages = SharedPages(self._buffers, self._queues)

    def full_buffer(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        holds_main: bool,
        packing: Packing | None = None,
    ) -> FullBuffer:
        """See `Collectives.full_buffer`. All ranks ask for the same ones in the same order."""
        if numel == 0:
            return ResizedBuffer(self, numel, dtype, device)
        place = self._buffers.place(numel * dtype.itemsize)
        if place is None:
            return ResizedBuffer(self, numel, dtype, device)
        return MappedBuffer(self._buffers, place, numel, dtype, holds_main=holds_main)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        *,
        tag: int,
        divisor: float = 1.0,
        packing: Packing | None = None,
        dtype: torch.dtype | None = None,
    ) -> Work:
        """See `Collectives.reduce_scatter`. A tensor that is not from `staging` is copied first."""
        return self._queues.send(full, tag, divisor, dtype or full.dtype)


class SharedPages(CpuPages):
    """Those that the ranks of a host read one another's gradients and weights in. See `HostPages`."""

    widens = True

    def __init__(self, buckets: SharedBuckets, queues: SendQueues) -> None:
        self._buckets, self._queues = buckets, queues

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Where peers read it, in memory that is used again."""
        full = self._queues.pool.empty(numel, dtype)
        if full.nbytes >= TRIM_NBYTES and is_at_peak(full.nbytes):  # an embedding's and head's, where logits were
            heap().trim()
            self._queues.pool.trim()
        return full

    def wait_for_readers(self) -> None:
        """Those of this host's ranks."""
        self._buckets.wait_for_readers()


# -- all-gather ---------------------------------------------------------------------------------------------------


class SharedBuckets:
    """Where the unsharded buckets are, all in rank 0's file, and how often each rank has offered and freed each.

    Attributes:
        offered, freed: shape (ranks, buckets); each row is written by its rank.
        shared: the buckets, as all ranks see them.
        own: the same, but what this rank writes there is seen by itself alone.
        pending: gathers that this rank could not offer yet, because a peer reads what it would write over.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        header = 2 * peers.size * MAX_BUFFERS * 8
        nbytes = header + 2 * host_memory_nbytes()  # no place is used twice
        self.shared = peers.map(0, _BUFFERS_START, nbytes)
        self.own = peers.map(0, _BUFFERS_START, nbytes, private=True)
        counts = np.frombuffer(self.shared, dtype=np.int64, count=header // 8)
        self.offered, self.freed = counts.reshape(2, peers.size, MAX_BUFFERS)
        self.pending: deque[_Gather] = deque()
        self._end = header
        self._number = 0

    def place(self, nbytes: int) -> tuple[int, int] | None:
        """(number, first byte) for a new bucket of `nbytes` bytes; None if there is no room for it."""
        number, start = self._number, self._end
        if number == MAX_BUFFERS or start + nbytes > len(self.shared):
            return None
        self._number += 1
        self._end += -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
        return number, start

    def wait_for_readers(self) -> None:
        """Wait until every rank has freed what this rank has."""
        freed = self.freed[:, : self._number]
        own = freed[self.peers.rank]
        self.peers.wait_until(lambda: bool((freed >= own).all()))

    def is_unread(self, number: int) -> bool:
        """Whether no rank reads what this rank has offered of a bucket."""
        return bool((self.freed[:, number] >= self.offered[self.peers.rank, number]).all())

    def is_free(self, number: int, gathers: int) -> bool:
        """Whether every rank has freed a bucket after its first `gathers` gathers, so that nobody reads it."""
        return bool((self.freed[:, number] >= gathers).all())

    def end(self, number: int) -> None:
        """This rank has no tensor any more that shows a bucket."""
        self.freed[self.peers.rank, number] = self.offered[self.peers.rank, number]

    def release_pages(self, start: int, nbytes: int) -> None:
        """Give the whole pages among those bytes back to the system. For every rank they are zero then."""
        first, last = -(-start // _PAGE_NBYTES) * _PAGE_NBYTES, (start + nbytes) // _PAGE_NBYTES * _PAGE_NBYTES
        if last > first:
            self.shared.madvise(mmap.MADV_REMOVE, first, last - first)

    def offer_pending(self) -> None:
        """Offer what can be offered by now."""
        for gather in [gather for gather in self.pending if gather.offer_if_free()]:
            self.pending.remove(gather)


class MappedBuffer:
    """An unsharded bucket in memory that all ranks map. See `FullBuffer`.

    `full` is a private mapping of it: of a page that this rank writes it gets a copy. Freeing throws those away, so
    that in-place changes to unsharded parameters stay this rank's own, as in any other memory. It unmaps the other
    pages too: they are there once for all ranks, but the kernel counts what is mapped as resident, on each rank.
    """

    is_zeroed = False
    is_persistent = True

    def __init__(
        self, buffers: SharedBuckets, place: tuple[int, int], numel: int, dtype: torch.dtype, *, holds_main: bool
    ) -> None:
        self._buffers = buffers
        self._number, self._start = place
        peers, whole = buffers.peers, slice(self._start, self._start + numel * dtype.itemsize)
        shown = memoryview(buffers.own)[whole]
        self.full = torch.frombuffer(shown, dtype=torch.uint8).view(dtype)
        nbytes = self.full.nbytes // (peers.num_hosts * peers.size)
        begin = self._start + peers.group_rank(peers.rank) * nbytes
        interval = memoryview(buffers.shared)[begin : begin + nbytes]
        self._interval = torch.frombuffer(interval, dtype=torch.uint8).view(dtype)
        self.main = self._interval if holds_main else None
        self._offers = 0
        # With the memory and not with this object: a tensor may outlive it.
        weakref.finalize(shown, _end, buffers, self._number, os.getpid()).atexit = False
        weakref.finalize(interval, _release_pages, buffers, self._number, begin, nbytes, os.getpid()).atexit = False

    @property
    def nbytes(self) -> int:
        """Nothing while it is freed: the memory is that of all ranks' main weights, or of their copies."""
        return self.full.nbytes if self._is_gathered else 0

    @property
    def _is_gathered(self) -> bool:
        return self._offers > int(self._buffers.freed[self._buffers.peers.rank, self._number])

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Offer this rank's interval, which others see as it was put there until it is put there again."""
        is_there = self.main is not None or (is_unchanged and self._offers > 0)
        self._offers += 1
        gather = _Gather(self, self._offers, None if is_there else main)
        if not gather.offer_if_free():
            self._buffers.pending.append(gather)
        return gather

    def free(self) -> None:
        """Drop this rank's view of the pages, and say that it reads no more."""
        if self._is_gathered:
            self._buffers.own.madvise(mmap.MADV_DONTNEED, self._start, self.full.nbytes)
            self._buffers.freed[self._buffers.peers.rank, self._number] = self._offers

    def wait_for_readers(self) -> None:
        """See `FullBuffer`. Copies of main weights are not written before the next gather, which waits."""
        if self.main is not None:
            self._buffers.peers.wait_until(lambda: self._buffers.is_unread(self._number))

    def offer(self, main: torch.Tensor | None, number: int) -> bool:
        """Offer this rank's interval for the gather of that number, unless a peer may read what would be overwritten.

        `main` is what to put there; None if it is there.
        """
        if main is not None:
            if not self._buffers.is_free(self._number, number - 1):
                return False
            with torch.no_grad():
                self._interval.copy_(main)
        self._buffers.offered[self._buffers.peers.rank, self._number] = number
        return True

    def wait(self, number: int) -> torch.Tensor:
        """Wait until all ranks have offered their intervals for the gather of that number."""
        offered = self._buffers.offered[:, self._number]

        def is_whole() -> bool:
            self._buffers.offer_pending()
            return bool((offered >= number).all())

        self._buffers.peers.wait_until(is_whole)
        return self.full


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """An all-gather under way, the bucket's `number`th."""

    buffer: MappedBuffer
    number: int
    main: torch.Tensor | None

    def offer_if_free(self) -> bool:
        """See `MappedBuffer.offer`."""
        return self.buffer.offer(self.main, self.number)

    def wait(self) -> torch.Tensor:
        """Wait for the peers' intervals."""
        return self.buffer.wait(self.number)


def _end(buffers: SharedBuckets, number: int, pid: int) -> None:
    """Nobody waits for this rank to free a bucket that ended while it was whole."""
    if os.getpid() == pid:
        buffers.end(number)


def _release_pages(buffers: SharedBuckets, number: int, start: int, nbytes: int, pid: int) -> None:
    """Give the pages of this rank's interval of a bucket back to the system, unless a peer may be reading them."""
    if os.getpid() == pid and buffers.is_unread(number):  # not in a forked process, which has the object too
        buffers.release_pages(start, nbytes)


# -- reduce-scatter -----------------------------------------------------------------------------------------------


class _SendQueue:
    """Where a rank says which of its gradients may be read; at the start of its file.

    Line 0 counts the entries posted, line 1 + r those rank r has read. An entry is (tag, where in the file, dtype).
    """

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        numbers = np.frombuffer(memory, dtype=np.int64, count=_QUEUE_NBYTES // 8)
        self._posted = numbers[:1]
        self.read = numbers[_LINE : _LINE * (1 + size) : _LINE]
        self._entries = numbers[-_ENTRY * _QUEUE_DEPTH :].reshape(_QUEUE_DEPTH, _ENTRY)

    @property
    def posted(self) -> int:
        """Entries so far."""
        return int(self._posted[0])

    def post(self, tag: int, offset: int, dtype: torch.dtype) -> None:
        """Add one. There must be room."""
        self._entries[self.posted % _QUEUE_DEPTH] = (tag, offset, _DTYPES.index(dtype))
        self._posted[0] += 1

    def entry(self, number: int) -> tuple[int, int, torch.dtype]:
        """(tag, offset, dtype) of the entry of that number."""
        tag, offset, dtype = self._entries[number % _QUEUE_DEPTH].tolist()
        return tag, offset, _DTYPES[dtype]


class SendQueues:
    """Gradients on their way between the ranks.

    Attributes:
        pool: memory that peers can read.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        if _LINE * (1 + peers.size) * 8 > _QUEUE_NBYTES - _ENTRY * 8 * _QUEUE_DEPTH:
            raise OSError(f"no queue for {peers.size} ranks")
        nbytes = _QUEUE_NBYTES + 2 * host_memory_nbytes() // peers.size  # ranks are alike, so each has its part
        self._memories = [peers.map(owner, 0, nbytes) for owner in range(peers.size)]
        self._queues = [_SendQueue(memory, peers.size) for memory in self._memories]
        self._own = self._queues[peers.rank]
        self.pool = BufferPool(self._memories[peers.rank], _QUEUE_NBYTES)
        self._under_way: deque[_ReduceScatter] = deque()

    def post(self, full: torch.Tensor, tag: int) -> tuple[torch.Tensor, int]:
        """Let the peers read `full`, or a copy of it if they cannot reach it.

        Returns:
            What they read, which must not change until they have, and the number of the entry, the same on every rank.
        """
        offset = self.pool.offset(full)
        if offset is None:
            full = self.pool.empty(full.numel(), full.dtype).copy_(full)
            offset = self.pool.offset(full) or 0
        self._peers.wait_until(lambda: self._own.posted - int(self._own.read.min()) < _QUEUE_DEPTH)
        number = self._own.posted
        self._own.post(tag, offset, full.dtype)
        return full, number

    def wait_for(self, number: int, tag: int, *, patiently: bool = False) -> None:
        """Wait until all ranks of this host have posted the entry of that number.

        Raises:
            RuntimeError: a rank is in another collective, or has ended.
        """
        self._peers.wait_until(lambda: all(queue.posted > number for queue in self._queues), patiently=patiently)
        for source, queue in enumerate(self._queues):
            other, _, _ = queue.entry(number)
            if other != tag:
                rank = self._peers.group_rank(source)
                raise RuntimeError(f"rank {rank} of the group is in collective {other}, this rank in {tag}")

    def sum_interval(
        self,
        number: int,
        full: torch.Tensor,
        position: int,
        dtype: torch.dtype,
        divisor: float = 1.0,
        *,
        may_keep: bool = False,
        is_sent: bool = False,
    ) -> torch.Tensor:
        """The sum over the ranks of this host, in their order, of the interval of rank `position` of the group.

        Args:
            number: of the entry; all ranks of this host have posted it.
            full: what this rank posted.
            position: whose interval.
            dtype: what the sum is made in; that of `full` or a wider one.
            divisor: what the sum is divided by.
            may_keep: whether a long sum may take the place of this rank's own term, and keep `full` alive.
            is_sent: it is gone soon, and so is made in memory that is used again.
        """
        own = own_interval(full, position, self._peers.num_hosts * self._peers.size)
        if own.numel() == 0:
            return own.to(dtype)
        terms = []
        for source, (queue, memory) in enumerate(zip(self._queues, self._memories, strict=True)):
            _, offset, theirs = queue.entry(number)  # one rank may have accumulated what another has not
            start = offset + position * own.numel() * theirs.itemsize
            there = source != self._peers.rank
            terms.append(torch.frombuffer(memory, dtype=theirs, count=own.numel(), offset=start) if there else own)
        # Nobody else reads this interval, or the sum.
        nbytes = own.numel() * dtype.itemsize
        if nbytes < LONG_NBYTES and not is_sent:  # where activations were, which backward has freed
            into = torch.empty(own.numel(), dtype=dtype)
            heap().note(nbytes)
        else:
            into = own if may_keep and dtype == own.dtype else self.pool.empty(own.numel(), dtype)
        return average(terms, into, divisor)

    def mark_read(self, number: int, *, patiently: bool = False) -> None:
        """Say that this rank has read the entry of that number, and wait until the others have."""
        for queue in self._queues:
            queue.read[self._peers.rank] = number + 1
        # Its memory is handed out again as soon as every peer has read it; waiting bounds how much of it there is.
        self._peers.wait_until(lambda: int(self._own.read.min()) > number, patiently=patiently)

    def send(self, full: torch.Tensor, tag: int, divisor: float, dtype: torch.dtype) -> _ReduceScatter:
        """Begin to average `full` over the ranks of this host, in `dtype`."""
        reduction = _ReduceScatter(self, *self.post(full, tag), tag, divisor, dtype)
        self._under_way.append(reduction)
        return reduction

    def finish(self, reduction: _ReduceScatter) -> None:
        """Make the averages up to this one, in the order in which all ranks sent."""
        while not reduction.is_done:
            first = self._under_way[0]
            assert first.full is not None  # noqa: S101 -- it is not done
            self.wait_for(first.number, first.tag)
            first.result = self.sum_interval(
                first.number, first.full, self._peers.rank, first.dtype, first.divisor, may_keep=True
            )
            self.mark_read(first.number)
            first.full = None
            self._under_way.popleft()


class _ReduceScatter:
    """A reduce-scatter under way.

    Attributes:
        number: of the entry, the same on every rank.
        full: this rank's gradients; None once every rank has read them.
        result: this rank's interval of the average.
    """

    __slots__ = ("_queues", "divisor", "dtype", "full", "number", "result", "tag")

    def __init__(
        self, queues: SendQueues, full: torch.Tensor, number: int, tag: int, divisor: float, dtype: torch.dtype
    ) -> None:
        self._queues, self.number, self.tag, self.divisor, self.dtype = queues, number, tag, divisor, dtype
        self.full: torch.Tensor | None = full
        self.result: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        """Whether the result is there."""
        return self.result is not None

    def wait(self) -> torch.Tensor:
        """Wait for the peers' gradients, and average."""
        self._queues.finish(self)
        assert self.result is not None  # noqa: S101 -- finished
        return self.result


@torch.no_grad()
def average(terms: list[torch.Tensor], into: torch.Tensor, divisor: float) -> torch.Tensor:
    """The sum of `terms`, added up in their order, over `divisor`; in the dtype of `into`, which may be one of them."""
    length = _BLOCK_NBYTES // into.itemsize
    is_cast = any(term.dtype != into.dtype for term in terms)
    is_apart = is_cast or len(terms) > 2  # `into` may be a term that is still to be read
    room, cast = (into.new_empty(min(length, into.numel()) if wanted else 0) for wanted in (is_apart, is_cast))
    for start in range(0, into.numel(), length):
        block = into[start : start + length]
        first, second, *others = (term[start : start + length] for term in terms)
        total = room[: block.numel()] if is_apart else block
        if is_cast:
            total.copy_(first)
            others = [second, *others]
        else:
            torch.add(first, second, out=total)
        for other in others:
            total.add_(other if other.dtype == into.dtype else cast[: other.numel()].copy_(other))
        if divisor != 1:
            total.div_(divisor)
        if is_apart:
            block.copy_(total)
    return into
