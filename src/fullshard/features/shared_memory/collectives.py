"""Collectives that use shared memory, for ranks that compute on the CPUs of one host.

The ranks do not send messages. Each rank writes to memory that the other ranks read:

    all-gather        The unsharded bucket is one block of memory that all ranks map, and each rank writes its own
                      interval. If the compute dtype is the dtype of the main weights, that interval *is* the main
                      weights, and unsharding copies nothing. Otherwise, each rank casts its main weights into it.
    exchange          Each rank publishes where its part for every other rank begins, and the others copy it.
    reduce-scatter    Each rank collects its gradients in memory that the others can read, and publishes their
                      location. It sums its own interval over all ranks in pairs (`comm.gloo.average`), so the result
                      is deterministic. If the sum uses a wider dtype, the values are cast as they are read.

The other code synchronizes the ranks. A rank counts how often it has offered and freed each bucket, and how many
gradients it has posted and read. Main weights change only when no other rank can still be reading them; see
`wait_for_readers`.
"""

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
from fullshard.comm.base import BufferSpec, FullBuffer, Reduction, SplitSizes, Work, WorkOf
from fullshard.comm.gloo import GlooCollectives
from fullshard.core.sizes import round_up
from fullshard.features.shared_memory.peers import FILE_NBYTES, HOST_NBYTES, Peers
from fullshard.features.shared_memory.send_queue import SendQueues

_BUFFERS_START = FILE_NBYTES // 4
"""Offset in rank 0's file of the counters and unsharded buckets; the gradients come before it."""
MAX_BUFFERS = 2**16
"""Maximum number of buckets over the lifetime of the collectives, for all models."""


class SharedMemoryCollectives(GlooCollectives):
    """Collectives for ranks on one host, which send nothing. All-reduce, for the replicate axis, still uses Gloo."""

    sends = False
    widens = True

    def __init__(self, group: dist.ProcessGroup, peers: Peers) -> None:
        super().__init__(group)
        # Map everything now: if a rank lacks address space, it raises OSError, and all ranks use Gloo.
        self._buffers, self._queues = SharedBuckets(peers), SendQueues(peers)

    def _buffer(self, spec: BufferSpec) -> FullBuffer:
        place = self._buffers.place(spec)
        return super()._buffer(spec) if place is None else MappedBuffer(self._buffers, place, spec)

    def _reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        # A tensor that is not from `staging` is copied first, also for `exchange`.
        torch_private.count_for_debugging("c10d._reduce_scatter_base_")
        return self._queues.reduce(full, how)

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, splits: SplitSizes, *, tag: int) -> Work:
        """Exchange parts between ranks. Each rank copies its parts directly from the memory of the other ranks."""
        torch_private.count_for_debugging("c10d.alltoall_base_")
        return self._queues.exchange(leaving, arriving, splits, tag)

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a tensor in memory that the other ranks can read. Its memory is reused after it is released."""
        return self._queues.pool.empty(numel, dtype)

    def wait_for_readers(self) -> None:
        """Wait until the other ranks have finished reading this rank's intervals of all buckets."""
        self._buffers.wait_for_readers()


class SharedBuckets:
    """The unsharded buckets, which are in rank 0's file, and the counters that synchronize access to them.

    Attributes:
        offered, freed: how often each rank has offered and freed each bucket, shape (ranks, buckets). Each rank writes
            only its own row.
        shared, own: mappings of the buckets. All ranks see writes to `shared`; only this rank sees its writes to `own`.
        placed: number of buckets that have a place, which is also the number of the next bucket.
        pending: offers for gathers that are delayed because another rank is still reading the memory they would
            overwrite.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        header = 2 * peers.size * MAX_BUFFERS * 8
        nbytes = header + 2 * HOST_NBYTES  # places are never reused
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
        """Allocate memory for a bucket. Return (bucket number, first byte), or None if it is empty or does not fit."""
        number, start, nbytes = self.placed, self._end, spec.numel * spec.dtype.itemsize
        if not nbytes or number == MAX_BUFFERS or start + nbytes > len(self.shared):
            return None
        self.placed += 1
        self._end += round_up(nbytes, mmap.PAGESIZE)
        return number, start

    def wait_for_readers(self) -> None:
        """Wait until the other ranks have freed this rank's buckets, except buckets that this rank no longer uses.

        If another rank deleted a model while it was unsharded, the buckets are freed only when Python's garbage
        collector runs there. Until then, that rank may itself be waiting for this rank.
        """
        freed = self.freed[:, : self.placed]
        own = np.where(self._ended[: self.placed], 0, freed[self.peers.rank])
        self.peers.wait_until(lambda: bool((freed >= own).all()))

    def is_unread(self, number: int) -> bool:
        """Return whether every rank has freed a bucket as often as this rank has offered it, so nobody reads it."""
        return bool((self.freed[:, number] >= self.offered[self.peers.rank, number]).all())

    def end(self, number: int) -> None:
        """Record that this rank has no tensors left in a bucket, so that others do not wait for it to free them."""
        if os.getpid() == self._pid:  # a forked process also has the tensor, but must not do this
            self.freed[self.peers.rank, number] = self.offered[self.peers.rank, number]
            self._ended[number] = True

    def release_pages(self, number: int, start: int, nbytes: int) -> None:
        """Release the complete pages in a byte range of a bucket to the system, unless other ranks may read them."""
        first, last = round_up(start, mmap.PAGESIZE), (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and self.is_unread(number) and os.getpid() == self._pid:
            self.shared.madvise(mmap.MADV_REMOVE, first, last - first)


class MappedBuffer(FullBuffer):
    """An unsharded bucket in memory that all ranks map.

    `full` is a private mapping of this memory: if this rank writes to a page, it gets its own copy of the page. Freeing
    the buffer discards these copies, so in-place changes to unsharded parameters stay local to this rank, as in any
    other buffer. Freeing also unmaps the pages without changes. All ranks share one copy of these pages, but the system
    counts mapped pages as resident memory of every process.
    """

    is_persistent = True

    def __init__(self, buffers: SharedBuckets, place: tuple[int, int], spec: BufferSpec) -> None:
        self._buffers = buffers
        self._number, self._start = place
        self.shared_number = self._number
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
        # Bound to the memory, not to this object, because a tensor may outlive it.
        weakref.finalize(shown, buffers.end, self._number).atexit = False
        weakref.finalize(interval, buffers.release_pages, self._number, begin, nbytes).atexit = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of the unsharded bucket, or 0 while it is freed and its memory counts as main weights."""
        return self.full.nbytes if self._is_gathered else 0

    @property
    def _is_gathered(self) -> bool:
        return self._offers > int(self._buffers.freed[self._buffers.peers.rank, self._number])

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Let the other ranks read this rank's interval, and return work that waits for the intervals of all ranks."""
        torch_private.count_for_debugging("c10d._allgather_base_")
        is_there = self.main is not None or (is_unchanged and self._offers > 0)
        self._offers += 1
        offer = partial(self.offer, None if is_there else main, self._offers)
        if not offer():
            self._buffers.pending.append(offer)
        return WorkOf(partial(self.wait, self._offers))

    def free(self, *, keeps_memory: bool = False) -> None:
        """Unmap the pages of this buffer, and record that this rank has finished reading."""
        if self._is_gathered:
            self._buffers.own.madvise(mmap.MADV_DONTNEED, self._start, self.full.nbytes)
            self._buffers.freed[self._buffers.peers.rank, self._number] = self._offers

    def wait_for_readers(self) -> None:
        """Wait until the other ranks have read the main weights. Do nothing if they read a copy of them."""
        if self.main is not None:
            self._buffers.peers.wait_until(lambda: self._buffers.is_unread(self._number))

    def offer(self, main: torch.Tensor | None, number: int) -> bool:
        """Let the other ranks read this rank's interval for gather `number`, and copy `main` into it first if given.

        Return False, and do nothing, if `main` has to be copied while another rank may still read the previous values.
        """
        if main is not None:
            if not (self._buffers.freed[:, self._number] >= number - 1).all():
                return False
            with torch.no_grad():
                self._interval.copy_(main)
        self._buffers.offered[self._buffers.peers.rank, self._number] = number
        return True

    def wait(self, number: int) -> torch.Tensor:
        """Wait until all ranks have offered their intervals for gather `number`, and return the complete bucket."""
        offered, pending = self._buffers.offered[:, self._number], self._buffers.pending

        def is_whole() -> bool:
            for offer in [offer for offer in pending if offer()]:
                pending.remove(offer)
            return bool((offered >= number).all())

        self._buffers.peers.wait_until(is_whole)
        return self.full
