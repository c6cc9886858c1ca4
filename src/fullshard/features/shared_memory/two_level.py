"""Collectives of ranks on several hosts: shared memory inside a host, one connection per pair of ranks outside.

Ranks are named (host, local rank) here; every host has as many. Rank (h, l) talks over the network only to its
counterparts, the ranks (h', l), so that a byte crosses a link once per host and not once per rank:

    all-gather        Each rank sends its interval to its counterparts and receives theirs, straight into pages that all
                      ranks of its host map where these belong in their unsharded bucket.
    reduce-scatter    Each rank adds up, over the ranks of its host, the intervals of its counterparts and its own. It
                      sends the former, and adds what it receives to the latter, in the order of the hosts.

So two hosts of two ranks sum gradients as (a + b) + (c + d), as one host of four does; two hosts of three do not sum as
one of six.

A thread sees the messages through, so that they progress while the main one computes.
"""

from __future__ import annotations

import mmap
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.base import BufferSpec, Packing, Parts, Reduction, Watch, Work, WorkOf
from fullshard.comm.gloo import GlooCollectives, average, end_waits, receive, send
from fullshard.comm.waiting import PROGRESS
from fullshard.core.sizes import round_up
from fullshard.features.shared_memory.buffer_pool import BufferPool
from fullshard.features.shared_memory.collectives import (
    MAX_BUFFERS,
    MappedBuffer,
    SharedBuckets,
    SharedMemoryCollectives,
)
from fullshard.features.shared_memory.peers import FILE_NBYTES, HOST_NBYTES, Peers
from fullshard.features.shared_memory.progress_thread import ProgressThread
from fullshard.features.shared_memory.send_queue import SendQueues

_RECEIVE_START = FILE_NBYTES // 2
"""In rank 0's file: the pool for received data, after the buckets."""


class TwoLevelCollectives(SharedMemoryCollectives):
    """Collectives of ranks on several hosts, as many on each. All-reduce stays with Gloo."""

    sends = True

    def __init__(self, group: dist.ProcessGroup, peers: Peers) -> None:
        super().__init__(group, peers)
        self._gathers = _Channel(group, peers, 0)
        self._received = _ReceivePool(self._buffers)
        self._reductions = _Channel(group, peers, 1)

    def _mapped(self, place: tuple[int, int], spec: BufferSpec) -> MappedBuffer:
        # Main weights are exact, and the engine computes with unpacked values: they cannot be one.
        spec = replace(spec, holds_main=spec.holds_main and spec.packing is None)
        return TwoLevelBuffer(self._gathers, self._received, place, spec)

    def _reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        """Let this host's ranks read `full`; the thread does the rest. A tensor not from `staging` is copied."""
        if how.packing is None:
            torch_private.count_for_debugging("c10d._reduce_scatter_base_")
        full, number = self._queues.post(full, how.tag)
        summed = partial(_sum_over_hosts, self._reductions, self._queues, full, number, how)
        return WorkOf(self._reductions.progress.submit(summed).result)

    _reduce_packed = _reduce

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, parts: Parts, *, tag: int) -> Work:
        """Exchange from rank to rank: no part is for two ranks, so two levels would not save a host any sending."""
        # With tags that are none of a channel's.
        return GlooCollectives.exchange(self, leaving, arriving, parts, tag=2 * (MAX_BUFFERS + tag))

    def wait_for_readers(self) -> None:
        """Wait for this host's ranks, and for the thread: it sends main weights until it is done."""
        self._gathers.progress.finish()
        super().wait_for_readers()
        self._received.release_later(self._gathers.progress)


class _Channel:
    """Messages between this rank and its counterparts on the other hosts, and the thread that sees them through.

    Args:
        group: of all ranks.
        peers: those of this host.
        kind: 0 or 1; messages of two kinds are never confused, although they have the same tag.
    """

    def __init__(self, group: dist.ProcessGroup, peers: Peers, kind: int) -> None:
        self.peers = peers
        self.progress = ProgressThread(peers.report_failure, partial(_give_up, group))
        # The positions of the other hosts, the next one first.
        self.others = [(peers.host + step) % peers.num_hosts for step in range(1, peers.num_hosts)]
        self._group, self._kind = group, kind

    def counterpart(self, host: int) -> int:
        """Return the position in the group of the rank of another host that has this one's local rank."""
        return self.peers.group_rank(self.peers.rank, host)

    def send(self, tensor: torch.Tensor, host: int, tag: int) -> dist.Work:
        """Begin to send to the counterpart on a host."""
        return send(tensor, self._group, self.counterpart(host), 2 * tag + self._kind)

    def receive(self, tensor: torch.Tensor, host: int, tag: int) -> dist.Work:
        """Begin to receive from there."""
        return receive(tensor, self._group, self.counterpart(host), 2 * tag + self._kind)


def _give_up(group: dist.ProcessGroup) -> None:
    """Have everything fail that the threads of this process wait for, in shared memory or from other hosts."""
    PROGRESS.given_up = PROGRESS.given_up or "this process ends"
    end_waits(group)


class _ReceivedRange:
    """Received intervals that follow one another: bytes `start` to `end` of the memory where buckets are.

    Every page that they have a part of is acquired, and is at `at` in the bucket's acquired memory.

    Attributes:
        whole_start, whole_end: first byte of the first whole page, and the byte after the last; `full` shows these.
        shift: the distance from a byte of the range to its place in the bucket's acquired memory.
        nbytes: bytes to acquire.
    """

    def __init__(self, start: int, end: int, at: int) -> None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.whole_start = round_up(start, mmap.PAGESIZE)
        self.whole_end = max(self.whole_start, end // mmap.PAGESIZE * mmap.PAGESIZE)
        self.shift = at - first
        self.nbytes = round_up(end, mmap.PAGESIZE) - first if start < end else 0


class TwoLevelBuffer(MappedBuffer):
    """An unsharded bucket that receives the intervals of other hosts' ranks. See `MappedBuffer`.

    Received intervals are in memory of a pool, from `gather` to `free`, and `full` shows them where they belong. A rank
    offers its own interval and those of its counterparts to the others of its host.
    """

    is_zeroed = True
    is_persistent = False

    def __init__(self, channel: _Channel, received: _ReceivePool, place: tuple[int, int], spec: BufferSpec) -> None:
        super().__init__(received.buffers, place, spec)
        self._channel, self._received, self._packing = channel, received, spec.packing
        self._bringing: Future[None] | None = None
        peers, nbytes = channel.peers, self._interval.nbytes
        own, after = (self._start + peers.group_rank(0, host) * nbytes for host in (peers.host, peers.host + 1))
        earlier = _ReceivedRange(self._start, own, 0)
        self._ranges = [earlier, _ReceivedRange(after, self._start + self.full.nbytes, earlier.nbytes)]
        self._shown = 0
        self._show(None)

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Send this rank's interval, and receive those of its counterparts."""
        torch_private.count_for_debugging("c10d._allgather_base_")
        self._offers += 1
        own_main = None if self.main is not None else main
        packing = None if exactly else self._packing
        self._bringing = self._channel.progress.submit(partial(self._bring, own_main, self._offers, tag, packing))
        return WorkOf(partial(self.wait, self._offers))

    def free(self, *, keeps_memory: bool = False) -> None:
        """See `MappedBuffer.free`. Received data read as zeros then."""
        if self._is_gathered:
            self._show(None)  # first: once this is known to be freed, the memory may be another bucket's
            super().free()
            self._received.release_later(self._channel.progress)

    def wait_for_readers(self) -> None:
        """See `FullBuffer`. Until the thread has done with the last gather, main weights are being sent."""
        if self.main is not None and self._bringing is not None:
            self._bringing.result()
            self._bringing = None
        super().wait_for_readers()

    def wait(self, number: int, *, patiently: bool = True) -> torch.Tensor:
        """Wait until all ranks of this host have their data of the gather of that number, and show them."""
        super().wait(number, patiently=patiently)
        if self._is_gathered and self._shown < number:
            self._shown = number
            self._show(int(self._received.places[self._number]))
        return self.full

    def _look(self) -> None:
        self._channel.progress.check()

    def _show(self, place: int | None) -> None:
        """Show what was received at `place` of the pool where it belongs; None: zeros, which take no memory."""
        for span in self._ranges:
            offset = None if place is None else _RECEIVE_START + place + span.whole_start + span.shift
            if (nbytes := span.whole_end - span.whole_start) > 0:
                self._buffers.peers.map_at(self._buffers.own, span.whole_start, nbytes, offset)

    def _bring(self, main: torch.Tensor | None, number: int, tag: int, packing: Packing | None) -> None:
        """Gather one bucket, in the thread. `main` is copied into this rank's interval; None if it is there."""
        channel, peers = self._channel, self._buffers.peers
        # A rank of this host may still look up where the last gather of this bucket was received.
        peers.wait_until(lambda: bool(self._received.ended([self._number])[0] >= number - 1), patiently=True)
        place = self._received.acquire(self._number, number, sum(span.nbytes for span in self._ranges))
        received = [self._receive_into(host, place) for host in channel.others]
        own, messages = self._interval, received
        if packing is not None and main is not None:
            own, *messages = torch.empty(len(received) + 1, packing.nbytes(main.numel()), dtype=torch.uint8)
            packing.pack(main, own)
        elif main is not None:
            with torch.no_grad():
                own.copy_(main)
        arriving = [channel.receive(message, host, tag) for message, host in zip(messages, channel.others, strict=True)]
        leaving = [channel.send(own, host, tag) for host in channel.others]
        if packing is not None:
            packing.unpack(own, self._interval)
        for work, message, interval in zip(arriving, messages, received, strict=True):
            work.wait()
            if packing is not None:
                packing.unpack(message, interval)
        for host in channel.others:
            self._copy_edges(host, place)
        self._buffers.offered[peers.rank, self._number] = number  # after the last byte: a reader of it reads them all
        for work in leaving:  # only a rank that is to change main weights waits for that
            work.wait()

    def _receive_into(self, host: int, place: int) -> torch.Tensor:
        """Return the interval of the counterpart on a host, in memory of the pool."""
        nbytes = self._interval.nbytes
        at = self._start + self._channel.counterpart(host) * nbytes + place + self._range(host).shift
        return torch.frombuffer(self._received.memory, dtype=torch.uint8, count=nbytes, offset=at).view(self.full.dtype)

    def _range(self, host: int) -> _ReceivedRange:
        return self._ranges[host > self._channel.peers.host]

    def _copy_edges(self, host: int, place: int) -> None:
        """Copy those parts of a received interval that are on pages which are not mapped from the pool."""
        span, nbytes = self._range(host), self._interval.nbytes
        start = self._start + self._channel.counterpart(host) * nbytes
        end, by = start + nbytes, place + span.shift
        for first, last in ((start, min(end, span.whole_start)), (max(start, span.whole_end), end)):
            if first < last:
                self._buffers.shared[first:last] = self._received.memory[first + by : last + by]


class _ReceivePool:
    """Memory for received intervals, which the first rank of the host hands to one bucket after the other.

    The kernel takes longer to make and clear a page than a gather takes for all else with it, so pages are used again.
    The pool keeps no more than two buckets' worth for that.

    Attributes:
        memory: contains all acquired places, for all ranks of the host.
        places: by bucket, the offset at which it received last.
    """

    def __init__(self, buffers: SharedBuckets) -> None:
        self.buffers, self._is_owner = buffers, buffers.peers.rank == 0
        header = 2 * MAX_BUFFERS * 8
        self.memory = buffers.peers.map(0, _RECEIVE_START, header + 2 * HOST_NBYTES)
        self._pool = BufferPool(self.memory, header)
        table = np.frombuffer(self.memory, dtype=np.int64, count=header // 8)
        self._gathers, self.places = table.reshape(2, MAX_BUFFERS)
        self._acquired: dict[int, torch.Tensor] = {}
        self._largest = 0

    def acquire(self, bucket: int, gather: int, nbytes: int) -> int:
        """Return the offset at which a bucket may receive in the gather of that number, until that gather is over."""
        if self._is_owner:
            self.release()
            acquired = self._acquired[bucket] = self._pool.empty(nbytes, torch.uint8)
            place = self._pool.offset(acquired)
            assert place is not None  # noqa: S101 -- it is from there
            self.places[bucket], self._gathers[bucket] = place, gather  # the number last: others look for it
            self._largest = max(self._largest, nbytes)
        else:
            self.buffers.peers.wait_until(lambda: bool(self._gathers[bucket] >= gather), patiently=True)
        return int(self.places[bucket])

    def ended(self, buckets: list[int]) -> npt.NDArray[np.int64]:
        """Return how many gathers of each bucket are over: every rank of the host has the data, and none reads now."""
        offered, freed = self.buffers.offered[:, buckets], self.buffers.freed[:, buckets]
        least: npt.NDArray[np.int64] = np.minimum(offered, freed).min(axis=0)
        return least

    def release(self) -> None:
        """Take back the places of gathers that are over. Only the thread calls it."""
        buckets = list(self._acquired)
        for bucket, is_over in zip(buckets, self.ended(buckets) >= self._gathers[buckets], strict=True):
            if is_over:
                del self._acquired[bucket]
        self._pool.trim(more_than=2 * self._largest)

    def release_later(self, progress: ProgressThread) -> None:
        """Have the thread take back the places of gathers that are over."""
        if self._is_owner:
            progress.submit(self.release)


def _sum_over_hosts(
    channel: _Channel, queues: SendQueues, full: torch.Tensor, number: int, how: Reduction
) -> torch.Tensor:
    """Do the thread's part of one reduce-scatter: send on to the other hosts what this host's ranks have posted."""
    own_host = channel.peers.host
    tag, packing, watch = how.tag, how.packing, how.watch
    queues.wait_for(number, tag, patiently=True)
    arriving, leaving = {}, []
    for host in channel.others:
        theirs = queues.sum_interval(number, full, channel.counterpart(host), how, is_sent=True)
        message = theirs
        if packing is not None:
            message = queues.pool.empty(packing.nbytes(theirs.numel()), torch.uint8)
            packing.pack(theirs, message)
        place = queues.pool.empty(message.numel(), message.dtype)
        arriving[host] = (channel.receive(place, host, tag), place, theirs)
        leaving.append((channel.send(message, host, tag), message))
    total = queues.sum_interval(number, full, channel.counterpart(own_host), how)
    queues.mark_read(number, patiently=True)  # the rest of the work is in this rank's own memory
    sums = {own_host: total}
    for host, (work, place, theirs) in arriving.items():
        work.wait()
        sums[host] = place
        if packing is not None:
            packing.unpack(place, theirs)  # which was packed, and is not needed any more
            sums[host] = theirs
    # Each host's ranks have already watched the terms that they gave to a sum over hosts.
    without_terms: Watch | None = None if watch is None else lambda part, terms: watch(part, {})
    average([sums[host] for host in range(channel.peers.num_hosts)], total, how.divisor, without_terms)
    for work, _ in leaving:  # at last: until then the messages, which the pool has back after this, are being read
        work.wait()
    return total
