"""Collectives over shared memory, for ranks on one host that compute on its CPU.

Nothing is sent. Each rank writes where its peers read:

    all-gather        The unsharded bucket is one piece of memory that all ranks map and in which each owns its
                      interval. If ranks compute in the dtype of the main weights, that interval *is* the main weights,
                      and unsharding copies nothing at all; else each rank casts its own into it.
    exchange          Each rank says where its part for each of the others begins; they copy it from there.
    reduce-scatter    Each rank collects its gradients in memory that the others can read, says where, and adds up its
                      own interval of all ranks', in pairs (`comm.gloo.average`), always the same number. It casts
                      what it reads if the sum is to be in a wider dtype.

What remains is to know when. A rank counts how often it has offered and freed each bucket, and how many gradients it
has posted and read. Main weights change only when no peer can be reading them any more; see `wait_for_readers`.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.base import BufferSpec, FullBuffer, Parts, Reduction, Work, WorkOf
from fullshard.comm.gloo import GlooCollectives
from fullshard.core.sizes import round_up
from fullshard.features.shared_memory.peers import FILE_NBYTES, HOST_NBYTES, Peers
from fullshard.features.shared_memory.send_queue import SendQueues

_BUFFERS_START = FILE_NBYTES // 4
"""In rank 0's file: counters and unsharded buckets begin here; before it, each rank's gradients."""
MAX_BUFFERS = 2**16
"""Buckets of all models that ever use these collectives."""


class SharedMemoryCollectives(GlooCollectives):
    """Collectives of the ranks of one host, which send nothing, and so pack nothing.

    All-reduce, used along the replicate axis, stays with Gloo.
    """

    sends = False
    widens = True

    def __init__(self, group: dist.ProcessGroup, peers: Peers) -> None:
        super().__init__(group)
        # Mapped at once: a rank that has no room for it among its addresses raises OSError, and all keep to Gloo.
        self._buffers, self._queues = SharedBuckets(peers), SendQueues(peers)

    def _buffer(self, spec: BufferSpec) -> FullBuffer:
        place = self._buffers.place(spec)
        return super()._buffer(spec) if place is None else MappedBuffer(self._buffers, place, spec)

    def _reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        # A tensor that is not from `staging` is copied first, and so for `exchange`.
        torch_private.count_for_debugging("c10d._reduce_scatter_base_")
        return self._queues.reduce(full, how)

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, parts: Parts, *, tag: int) -> Work:
        """Exchange with one copy, out of the peers' memory."""
        torch_private.count_for_debugging("c10d.alltoall_base_")
        return self._queues.exchange(leaving, arriving, parts, tag)

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return reused memory in which the peers can read the tensor."""
        return self._queues.pool.empty(numel, dtype)

    def wait_for_readers(self) -> None:
        """Wait until the others have read."""
        self._buffers.wait_for_readers()


class SharedBuckets:
    """The unsharded buckets, all in rank 0's file, and counts of how often each rank has offered and freed each.

    Attributes:
        offered, freed: shape (ranks, buckets); each row is written by its rank.
        shared, own: the buckets, as all ranks see them, and so that only this rank sees what it writes there.
        placed: how many buckets have a place, and the number of the next one.
        pending: offers for gathers that this rank could not make yet, because a peer reads what it would overwrite.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        header = 2 * peers.size * MAX_BUFFERS * 8
        nbytes = header + 2 * HOST_NBYTES  # no place is used twice
        self.shared = peers.map(0, _BUFFERS_START, nbytes)
        self.own = peers.map(0, _BUFFERS_START, nbytes, private=True)
        counts = np.frombuffer(self.shared, dtype=np.int64, count=header // 8)
        self.offered, self.freed = counts.reshape(2, peers.size, MAX_BUFFERS)
        self.pending: deque[Callable[[], bool]] = deque()
        self._end = header
        self.placed = 0
        self._ended = np.zeros(MAX_BUFFERS, dtype=bool)
        self._pid = os.getpid()

    def place(self, spec: BufferSpec) -> tuple[int, int] | None:
        """Return (number, first byte) for a new bucket; None if it has no elements, or there is no room for it."""
        number, start, nbytes = self.placed, self._end, spec.numel * spec.dtype.itemsize
        if not nbytes or number == MAX_BUFFERS or start + nbytes > len(self.shared):
            return None
        self.placed += 1
        self._end += round_up(nbytes, mmap.PAGESIZE)
        return number, start

    def wait_for_readers(self) -> None:
        """Wait until every rank has freed this rank's buckets, except those that this rank has itself dropped.

        A peer that dropped a model while that was whole frees it only once its collector runs: it may wait for us.
        """
        freed = self.freed[:, : self.placed]
        own = np.where(self._ended[: self.placed], 0, freed[self.peers.rank])
        self.peers.wait_until(lambda: bool((freed >= own).all()))

    def is_unread(self, number: int) -> bool:
        """Return whether every rank has freed a bucket as often as this rank has offered it, so that no rank reads."""
        return bool((self.freed[:, number] >= self.offered[self.peers.rank, number]).all())

    def end(self, number: int) -> None:
        """Note that no tensor of this rank shows a bucket any more: no rank waits for this one to free it then."""
        if os.getpid() == self._pid:  # not a forked process, which has the tensor, too
            self.freed[self.peers.rank, number] = self.offered[self.peers.rank, number]
            self._ended[number] = True

    def release_pages(self, number: int, start: int, nbytes: int) -> None:
        """Give the whole pages among those bytes of a bucket back to the system, unless a peer may be reading them."""
        first, last = round_up(start, mmap.PAGESIZE), (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and self.is_unread(number) and os.getpid() == self._pid:
            self.shared.madvise(mmap.MADV_REMOVE, first, last - first)


class MappedBuffer(FullBuffer):
    """An unsharded bucket in memory that all ranks map.

    `full` is a private mapping of it: a page that this rank writes becomes a copy. Freeing throws the copies away, so
    that in-place changes to unsharded parameters stay this rank's own, as in any other memory. Freeing unmaps the other
    pages too: they exist once for all ranks, but the kernel counts mapped pages as resident, on each rank.
    """

    is_persistent = True

    def __init__(self, buffers: SharedBuckets, place: tuple[int, int], spec: BufferSpec) -> None:
        self._buffers = buffers
        self._number, self._start = place
        self.place = self._number
        peers, dtype = buffers.peers, spec.dtype
        whole = slice(self._start, self._start + spec.numel * dtype.itemsize)
        shown = memoryview(buffers.own)[whole]
        self.full = torch.frombuffer(shown, dtype=torch.uint8).view(dtype)
        nbytes = self.full.nbytes // peers.size
        begin = self._start + peers.rank * nbytes
        interval = memoryview(buffers.shared)[begin : begin + nbytes]
        self._interval = torch.frombuffer(interval, dtype=torch.uint8).view(dtype)
        self.main = self._interval if spec.holds_main else None
        self._offers = 0
        # With the memory and not with this object: a tensor may outlive it.
        weakref.finalize(shown, buffers.end, self._number).atexit = False
        weakref.finalize(interval, buffers.release_pages, self._number, begin, nbytes).atexit = False

    @property
    def nbytes(self) -> int:
        """Return 0 while it is freed: the memory then belongs to all ranks' main weights, or to their copies."""
        return self.full.nbytes if self._is_gathered else 0

    @property
    def _is_gathered(self) -> bool:
        return self._offers > int(self._buffers.freed[self._buffers.peers.rank, self._number])

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Offer this rank's interval, which others see as it was put there until it is put there again."""
        torch_private.count_for_debugging("c10d._allgather_base_")
        is_there = self.main is not None or (is_unchanged and self._offers > 0)
        self._offers += 1
        offer = partial(self.offer, None if is_there else main, self._offers)
        if not offer():
            self._buffers.pending.append(offer)
        return WorkOf(partial(self.wait, self._offers))

    def free(self, *, keeps_memory: bool = False) -> None:
        """Drop this rank's view of the pages, and tell the others that it has finished reading."""
        if self._is_gathered:
            self._buffers.own.madvise(mmap.MADV_DONTNEED, self._start, self.full.nbytes)
            self._buffers.freed[self._buffers.peers.rank, self._number] = self._offers

    def wait_for_readers(self) -> None:
        """See `FullBuffer`. Copies of main weights are not written before the next gather, which waits."""
        if self.main is not None:
            self._buffers.peers.wait_until(lambda: self._buffers.is_unread(self._number))

    def offer(self, main: torch.Tensor | None, number: int) -> bool:
        """Offer this rank's interval, a copy of `main` if given, unless a peer may read what would be overwritten."""
        if main is not None:
            if not (self._buffers.freed[:, self._number] >= number - 1).all():
                return False
            with torch.no_grad():
                self._interval.copy_(main)
        self._buffers.offered[self._buffers.peers.rank, self._number] = number
        return True

    def wait(self, number: int) -> torch.Tensor:
        """Wait until all ranks have offered their intervals for the gather of that number."""
        offered, pending = self._buffers.offered[:, self._number], self._buffers.pending

        def is_whole() -> bool:
            for offer in [offer for offer in pending if offer()]:
                pending.remove(offer)
            return bool((offered >= number).all())

        self._buffers.peers.wait_until(is_whole)
        return self.full
