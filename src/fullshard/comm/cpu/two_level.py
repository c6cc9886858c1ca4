"""Collectives of ranks on several hosts: over shared memory inside a host, over one stream per pair of ranks outside.

Ranks are named (host, local rank) here; every host has as many. Rank (h, l) talks over the network only to its
counterparts, the ranks (h', l), so that a byte crosses a link once per host and not once per rank:

    all-gather        Each rank sends its interval to its counterparts and receives theirs, straight into pages that all
                      ranks of its host map where these belong in their unsharded bucket.
    reduce-scatter    Each rank adds up, over the ranks of its host, the intervals of its counterparts and its own. It
                      sends the former, and adds what it receives to the latter, in the order of the hosts.

So two hosts of two ranks sum gradients as (a + b) + (c + d), always, where one host of four has ((a + b) + c) + d.

A thread sees the messages through, so that they progress while the main one computes.
"""

from __future__ import annotations

import mmap
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fullshard.comm.base import FullBuffer, ResizedBuffer, Work
from fullshard.comm.cpu.buffer_pool import Arena
from fullshard.comm.cpu.peers import FILE_NBYTES, Peers, host_memory_nbytes
from fullshard.comm.cpu.progress_thread import Courier
from fullshard.comm.cpu.shared_memory import MAX_BUFFERS, Buffers, MappedBuffer, Post, SharedMemoryCollectives, average
from fullshard.comm.packing import Packing
from fullshard.comm.torch_dist import receive, send
from fullshard.core.sizes import round_up

_PAGE_NBYTES = mmap.PAGESIZE
_LOANS_START = FILE_NBYTES // 2
"""In rank 0's file: after the buckets, what it lends, and to which."""


class TwoLevelCollectives(SharedMemoryCollectives):
    """Collectives of ranks on several hosts, as many on each. All-reduce stays with Gloo."""

    sends = True

    def __init__(self, group: dist.ProcessGroup, peers: Peers) -> None:
        super().__init__(group, peers)
        self._gathers = _Streams(group, peers, 0)
        self._loans = _Loans(self._buffers)
        self._reductions = _Reductions(_Streams(group, peers, 1), self._post)

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
        place = self._buffers.place(numel * dtype.itemsize) if numel else None
        if place is None:
            return ResizedBuffer(self, numel, dtype, device, packing)
        # Main weights are exact, and what is computed with is what unpacking gives: they cannot be one.
        holds_main = holds_main and packing is None
        return LinkedBuffer(
            self._gathers, self._loans, self._buffers, place, numel, dtype, holds_main=holds_main, packing=packing
        )

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
        return self._reductions.begin(full, tag, divisor, packing, dtype or full.dtype)

    def settle(self) -> None:
        """See `Collectives.settle`."""
        self._gathers.courier.finish()  # until then main weights are being sent
        self._buffers.settle()
        self._loans.end_soon(self._gathers.courier)


class _Streams:
    """Messages between this rank and its counterparts on the other hosts, and the thread that sees them through.

    Args:
        group: of all ranks.
        peers: those of this host.
        kind: 0 or 1; messages of two kinds are never confused, although they have the same tag.

    Attributes:
        courier: the thread.
        others: positions of the other hosts, the next one first.
    """

    def __init__(self, group: dist.ProcessGroup, peers: Peers, kind: int) -> None:
        self.peers = peers
        self.courier = Courier("fullshard communication", peers.report_failure)
        self.others = [(peers.host + step) % peers.num_hosts for step in range(1, peers.num_hosts)]
        self._group, self._kind = group, kind

    def counterpart(self, host: int) -> int:
        """Position in the group of the rank of another host that has this one's local rank."""
        return self.peers.group_rank(self.peers.rank, host)

    def send(self, tensor: torch.Tensor, host: int, tag: int) -> dist.Work:
        """Begin to send to the counterpart on a host."""
        return send(tensor, self._group, self.counterpart(host), 2 * tag + self._kind)

    def receive(self, tensor: torch.Tensor, host: int, tag: int) -> dist.Work:
        """Begin to receive from there."""
        return receive(tensor, self._group, self.counterpart(host), 2 * tag + self._kind)


# -- all-gather ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """Received intervals that follow one another: bytes `start` to `end` of the memory where buckets are.

    Every page that they have a part of is borrowed, the whole ones are shown from there.

    Attributes:
        at: of the first such page, in what the bucket borrows.
    """

    start: int
    end: int
    at: int

    @property
    def whole_start(self) -> int:
        """First byte of the first whole page."""
        return round_up(self.start, _PAGE_NBYTES)

    @property
    def whole_end(self) -> int:
        """The byte after the last whole page."""
        return max(self.whole_start, self.end // _PAGE_NBYTES * _PAGE_NBYTES)

    @property
    def shift(self) -> int:
        """From a byte of the run to where it is in what the bucket borrows."""
        return self.at - self.start // _PAGE_NBYTES * _PAGE_NBYTES

    @property
    def nbytes(self) -> int:
        """How much to borrow: every page the run has a part of."""
        return round_up(self.end + self.shift, _PAGE_NBYTES) - self.at if self.start < self.end else 0


class LinkedBuffer(MappedBuffer):
    """An unsharded bucket of which the intervals of other hosts' ranks are received. See `MappedBuffer`.

    Received ones are in borrowed memory, from `gather` to `free`, and `full` shows them where they belong. What a rank
    offers to the others of its host is its own interval and those of its counterparts.
    """

    is_zeroed = True
    is_lasting = False

    def __init__(
        self,
        streams: _Streams,
        loans: _Loans,
        buffers: Buffers,
        place: tuple[int, int],
        numel: int,
        dtype: torch.dtype,
        *,
        holds_main: bool,
        packing: Packing | None,
    ) -> None:
        super().__init__(buffers, place, numel, dtype, holds_main=holds_main)
        self._streams, self._loans, self._packing = streams, loans, packing
        self._bringing: Future[None] | None = None
        peers, nbytes = streams.peers, self._interval.nbytes
        own, after = (self._start + peers.group_rank(0, host) * nbytes for host in (peers.host, peers.host + 1))
        earlier = _Run(self._start, own, 0)
        self._runs = [earlier, _Run(after, self._start + self.full.nbytes, earlier.nbytes)]
        self._shown = 0
        self._hide()

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Send this rank's interval, and receive those of its counterparts."""
        self._offers += 1
        own_main = None if self.main is not None else main
        packing = None if exactly else self._packing
        self._bringing = self._streams.courier.submit(partial(self._bring, own_main, self._offers, tag, packing))
        return _Arriving(self, self._offers)

    def free(self) -> None:
        """See `MappedBuffer.free`. What was received reads as zeros then."""
        if self._is_gathered:
            self._hide()
            super().free()
            self._loans.end_soon(self._streams.courier)

    def settle(self) -> None:
        """See `FullBuffer.settle`. Until the thread has done with the last gather, main weights are being sent."""
        if self.main is not None and self._bringing is not None:
            self._bringing.result()
            self._bringing = None
        super().settle()

    def wait(self, number: int) -> torch.Tensor:
        """Wait until all ranks of this host have what they bring to the gather of that number."""
        offered = self._buffers.offered[:, self._number]

        def is_whole() -> bool:
            self._streams.courier.check()
            return bool((offered >= number).all())

        self._buffers.peers.wait_until(is_whole, patiently=True)
        if self._is_gathered and self._shown < number:
            self._shown, place = number, self._loans.place(self._number)
            for run in self._runs:
                self._map(run, _LOANS_START + place + run.whole_start + run.shift)
        return self.full

    def _hide(self) -> None:
        """Show zeros, which take no memory, where received intervals were."""
        for run in self._runs:
            self._map(run, None)

    def _map(self, run: _Run, offset: int | None) -> None:
        """See `Peers.map_at`."""
        if (nbytes := run.whole_end - run.whole_start) > 0:
            self._buffers.peers.map_at(self._buffers.own, run.whole_start, nbytes, offset)

    def _bring(self, main: torch.Tensor | None, number: int, tag: int, packing: Packing | None) -> None:
        """What the thread does for one gather. `main` is what to put into this rank's interval; None if it is there."""
        streams, peers = self._streams, self._buffers.peers
        peers.wait_until(lambda: bool(self._loans.ended([self._number])[0] >= number - 1), patiently=True)
        place = self._loans.borrow(self._number, number, sum(run.nbytes for run in self._runs))
        received = [self._receive_into(host, place) for host in streams.others]
        messages = received
        if packing is not None and main is not None:
            messages = [torch.empty(packing.nbytes(main.numel()), dtype=torch.uint8) for _ in streams.others]
            own = torch.empty_like(messages[0])
            packing.pack(main, own)
        else:
            own = self._interval
            if main is not None:
                with torch.no_grad():
                    own.copy_(main)
        arriving = [streams.receive(message, host, tag) for message, host in zip(messages, streams.others, strict=True)]
        leaving = [streams.send(own, host, tag) for host in streams.others]
        if packing is not None:
            packing.unpack(own, self._interval)
        for work, message, interval in zip(arriving, messages, received, strict=True):
            work.wait()
            if packing is not None:
                packing.unpack(message, interval)
        for host in streams.others:
            self._copy_edges(host, place)
        self._buffers.offered[peers.rank, self._number] = number
        for work in leaving:
            work.wait()

    def _location(self, host: int) -> tuple[_Run, int]:
        """(the run that the interval of the counterpart on a host is in, its first byte)."""
        run = self._runs[host > self._streams.peers.host]
        return run, self._start + self._streams.counterpart(host) * self._interval.nbytes

    def _receive_into(self, host: int, place: int) -> torch.Tensor:
        """The interval of the counterpart on a host, in what is borrowed."""
        run, start = self._location(host)
        at, nbytes = place + start + run.shift, self._interval.nbytes
        return torch.frombuffer(self._loans.memory, dtype=torch.uint8, count=nbytes, offset=at).view(self.full.dtype)

    def _copy_edges(self, host: int, place: int) -> None:
        """Of a received interval, copy what is on pages that are not shown from what is borrowed."""
        run, start = self._location(host)
        end, by = start + self._interval.nbytes, place + run.shift
        for first, last in ((start, min(end, run.whole_start)), (max(start, run.whole_end), end)):
            if first < last:
                self._buffers.shared[first:last] = self._loans.memory[first + by : last + by]


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    """An all-gather under way, the bucket's `number`th."""

    buffer: LinkedBuffer
    number: int

    def wait(self) -> torch.Tensor:
        """Wait for the other ranks' intervals."""
        return self.buffer.wait(self.number)


class _Loans:
    """Memory for received intervals, lent by the first rank of the host to one bucket after the other.

    Making a page, and clearing it, takes the kernel longer than all else that is done to it in a gather, so pages are
    used again. More than two buckets' worth is not kept for that.

    Attributes:
        memory: what is borrowed is in there, for all ranks of the host.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers, self._is_lender = buffers, buffers.peers.rank == 0
        header = 2 * MAX_BUFFERS * 8
        self.memory = buffers.peers.map(0, _LOANS_START, header + 2 * host_memory_nbytes())
        self._arena = Arena(self.memory, header)
        table = np.frombuffer(self.memory, dtype=np.int64, count=header // 8)
        self._gathers, self._places = table.reshape(2, MAX_BUFFERS)
        self._lent: dict[int, torch.Tensor] = {}
        self._largest = 0

    def borrow(self, bucket: int, gather: int, nbytes: int) -> int:
        """Where in the memory a bucket has what it borrows for the gather of that number, until that is over."""
        if self._is_lender:
            self.end()
            lent = self._lent[bucket] = self._arena.empty(nbytes, torch.uint8)
            place = self._arena.offset(lent)
            assert place is not None  # noqa: S101 -- it is from there
            self._places[bucket], self._gathers[bucket] = place, gather  # the number last: others look for it
            self._largest = max(self._largest, nbytes)
        else:
            self._buffers.peers.wait_until(lambda: bool(self._gathers[bucket] >= gather), patiently=True)
        return self.place(bucket)

    def place(self, bucket: int) -> int:
        """Where a bucket has what it borrowed last."""
        return int(self._places[bucket])

    def ended(self, buckets: list[int]) -> npt.NDArray[np.int64]:
        """How many gathers of each are over: every rank of the host has what it brings, and none reads any more."""
        offered, freed = self._buffers.offered[:, buckets], self._buffers.freed[:, buckets]
        least: npt.NDArray[np.int64] = np.minimum(offered, freed).min(axis=0)
        return least

    def end(self) -> None:
        """Take back what is over. The thread's alone."""
        buckets = list(self._lent)
        for bucket, is_over in zip(buckets, self.ended(buckets) >= self._gathers[buckets], strict=True):
            if is_over:
                del self._lent[bucket]
        if self._arena.free_nbytes > 2 * self._largest:
            self._arena.give_back()

    def end_soon(self, courier: Courier) -> None:
        """Have the thread take back what is over."""
        if self._is_lender:
            courier.submit(self.end)


# -- reduce-scatter -----------------------------------------------------------------------------------------------


class _Reductions:
    """Gradients on their way: first to the ranks of this host, then to the counterparts on the others."""

    def __init__(self, streams: _Streams, post: Post) -> None:
        self._streams, self._post = streams, post

    def begin(self, full: torch.Tensor, tag: int, divisor: float, packing: Packing | None, dtype: torch.dtype) -> Work:
        """Let the ranks of this host read `full`, and have the rest done by the thread."""
        full, number = self._post.post(full, tag)
        reduce = partial(self._reduce, full, number, tag, divisor, packing, dtype)
        return _Summing(self._streams.courier.submit(reduce))

    def _reduce(
        self, full: torch.Tensor, number: int, tag: int, divisor: float, packing: Packing | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """What the thread does for one reduce-scatter."""
        streams, post, own_host = self._streams, self._post, self._streams.peers.host
        post.wait_for(number, tag, patiently=True)
        arriving, leaving = {}, []
        for host in streams.others:
            theirs = post.add_up(number, full, streams.counterpart(host), dtype, is_sent=True)
            message = theirs
            if packing is not None:
                message = post.arena.empty(packing.nbytes(theirs.numel()), torch.uint8)
                packing.pack(theirs, message)
            place = post.arena.empty(message.numel(), message.dtype)
            arriving[host] = (streams.receive(place, host, tag), place, theirs)
            leaving.append((streams.send(message, host, tag), message))
        total = post.add_up(number, full, streams.counterpart(own_host), dtype)
        post.mark_read(number, patiently=True)
        sums = {own_host: total}
        for host, (work, place, theirs) in arriving.items():
            work.wait()
            sums[host] = place
            if packing is not None:
                packing.unpack(place, theirs)  # which was packed, and is not needed any more
                sums[host] = theirs
        average([sums[host] for host in range(streams.peers.num_hosts)], total, divisor)
        for work, _ in leaving:
            work.wait()
        return total


@dataclass(frozen=True, slots=True, eq=False)
class _Summing:
    """A reduce-scatter under way."""

    total: Future[torch.Tensor]

    def wait(self) -> torch.Tensor:
        """Wait for the sum of this rank's interval."""
        return self.total.result()
