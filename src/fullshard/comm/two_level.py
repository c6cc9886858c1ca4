"""Collectives of ranks on several hosts: over shared memory inside a host, over one stream per pair of ranks outside.

Ranks are named (host, local rank) here; every host has as many. Rank (h, l) talks over the network only to its
counterparts, the ranks (h', l), so that a byte crosses a link once per host and not once per rank:

    all-gather        Each rank sends its interval to its counterparts and receives theirs, straight into the unsharded
                      bucket that all ranks of its host map.
    reduce-scatter    Each rank adds up, over the ranks of its host, the intervals of its counterparts and its own. It
                      sends the former, and adds what it receives to the latter, in the order of the hosts.

So two hosts of two ranks sum gradients as (a + b) + (c + d), always, where one host of four has ((a + b) + c) + d.

A thread sees the messages through, so that they progress while the main one computes.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fullshard.comm.base import FullBuffer, ResizedBuffer, Work
from fullshard.comm.courier import Courier
from fullshard.comm.host_memory import Peers
from fullshard.comm.packing import Packing
from fullshard.comm.shared_memory import Buffers, MappedBuffer, Post, SharedMemoryCollectives, average
from fullshard.comm.torch_dist import receive, send


class TwoLevelCollectives(SharedMemoryCollectives):
    """Collectives of ranks on several hosts, as many on each. All-reduce stays with Gloo."""

    sends = True

    def __init__(self, group: dist.ProcessGroup, peers: Peers) -> None:
        super().__init__(group, peers)
        self._gathers = _Streams(group, peers, 0)
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
        return LinkedBuffer(self._gathers, self._buffers, place, numel, dtype, holds_main=holds_main, packing=packing)

    def reduce_scatter(
        self, full: torch.Tensor, *, tag: int, divisor: float = 1.0, packing: Packing | None = None
    ) -> Work:
        """See `Collectives.reduce_scatter`. A tensor that is not from `staging` is copied first."""
        return self._reductions.begin(full, tag, divisor, packing)

    def settle(self) -> None:
        """See `Collectives.settle`."""
        self._gathers.courier.finish()  # until then main weights are being sent
        self._buffers.settle()
        self._gathers.courier.submit(self._gathers.release)


class _Streams:
    """Messages between this rank and its counterparts on the other hosts, and the thread that sees them through.

    Args:
        group: of all ranks.
        peers: those of this host.
        kind: 0 or 1; messages of two kinds are never confused, although they have the same tag.

    Attributes:
        courier: the thread.
        others: positions of the other hosts, the next one first.
        unread: received intervals that this rank has freed; the thread's alone.
    """

    def __init__(self, group: dist.ProcessGroup, peers: Peers, kind: int) -> None:
        self.peers = peers
        self.courier = Courier("fullshard communication", peers.report_failure)
        self.others = [(peers.host + step) % peers.num_hosts for step in range(1, peers.num_hosts)]
        self.unread: dict[LinkedBuffer, None] = {}
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

    def release(self) -> None:
        """Give memory back that no rank of this host reads any more."""
        for buffer in [buffer for buffer in self.unread if buffer.give_back()]:
            del self.unread[buffer]


# -- all-gather ---------------------------------------------------------------------------------------------------


class LinkedBuffer(MappedBuffer):
    """An unsharded bucket of which the intervals of other hosts' ranks are received. See `MappedBuffer`.

    They take memory from `gather` to `free`. What a rank offers to the others of its host is its own interval and those
    of its counterparts.
    """

    is_zeroed = True
    is_lasting = False

    def __init__(
        self,
        streams: _Streams,
        buffers: Buffers,
        place: tuple[int, int],
        numel: int,
        dtype: torch.dtype,
        *,
        holds_main: bool,
        packing: Packing | None,
    ) -> None:
        super().__init__(buffers, place, numel, dtype, holds_main=holds_main)
        self._streams, self._packing = streams, packing
        self._bringing: Future[None] | None = None
        memory, nbytes = memoryview(buffers.shared), self._interval.nbytes
        self._starts = [self._start + streams.counterpart(host) * nbytes for host in streams.others]
        self._received = [
            torch.frombuffer(memory[at : at + nbytes], dtype=torch.uint8).view(dtype) for at in self._starts
        ]

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False) -> Work:
        """Send this rank's interval, and receive those of its counterparts."""
        self._offers += 1
        own_main = None if self.main is not None else main
        packing = None if exactly else self._packing
        self._bringing = self._streams.courier.submit(partial(self._bring, own_main, self._offers, tag, packing))
        return _Arriving(self, self._offers)

    def free(self) -> None:
        """Say that this rank reads no more, and have the memory given back once nobody does."""
        if self._is_gathered:
            super().free()
            self._streams.courier.submit(self._note_freed)

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
        return self.full

    def give_back(self) -> bool:
        """Give the memory of the received intervals back, unless a rank of this host reads them."""
        if not self._buffers.is_free(self._number, self._offers):
            return False
        for start in self._starts:
            self._buffers.give_back(start, self._interval.nbytes)
        return True

    def _note_freed(self) -> None:
        self._streams.unread[self] = None
        self._streams.release()

    def _bring(self, main: torch.Tensor | None, number: int, tag: int, packing: Packing | None) -> None:
        """What the thread does for one gather. `main` is what to put into this rank's interval; None if it is there."""
        streams, peers = self._streams, self._buffers.peers
        peers.wait_until(lambda: self._buffers.is_free(self._number, number - 1), patiently=True)
        streams.unread.pop(self, None)
        places = self._received
        if packing is not None and main is not None:
            places = [torch.empty(packing.nbytes(main.numel()), dtype=torch.uint8) for _ in streams.others]
            own = torch.empty_like(places[0])
            packing.pack(main, own)
        else:
            own = self._interval
            if main is not None:
                with torch.no_grad():
                    own.copy_(main)
        arriving = [streams.receive(place, host, tag) for place, host in zip(places, streams.others, strict=True)]
        leaving = [streams.send(own, host, tag) for host in streams.others]
        if packing is not None:
            packing.unpack(own, self._interval)
        for work, place, received in zip(arriving, places, self._received, strict=True):
            work.wait()
            if packing is not None:
                packing.unpack(place, received)
        self._buffers.offered[peers.rank, self._number] = number
        for work in leaving:
            work.wait()


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    """An all-gather under way, the bucket's `number`th."""

    buffer: LinkedBuffer
    number: int

    def wait(self) -> torch.Tensor:
        """Wait for the other ranks' intervals."""
        return self.buffer.wait(self.number)


# -- reduce-scatter -----------------------------------------------------------------------------------------------


class _Reductions:
    """Gradients on their way: first to the ranks of this host, then to the counterparts on the others."""

    def __init__(self, streams: _Streams, post: Post) -> None:
        self._streams, self._post = streams, post

    def begin(self, full: torch.Tensor, tag: int, divisor: float, packing: Packing | None) -> Work:
        """Let the ranks of this host read `full`, and have the rest done by the thread."""
        full, number = self._post.post(full, tag)
        return _Summing(self._streams.courier.submit(partial(self._reduce, full, number, tag, divisor, packing)))

    def _reduce(
        self, full: torch.Tensor, number: int, tag: int, divisor: float, packing: Packing | None
    ) -> torch.Tensor:
        """What the thread does for one reduce-scatter."""
        streams, post, own_host = self._streams, self._post, self._streams.peers.host
        post.wait_for(number, tag, patiently=True)
        arriving, leaving = {}, []
        for host in streams.others:
            theirs = post.add_up(number, full, streams.counterpart(host))
            message = theirs
            if packing is not None:
                message = post.arena.empty(packing.nbytes(theirs.numel()), torch.uint8)
                packing.pack(theirs, message)
            place = post.arena.empty(message.numel(), message.dtype)
            arriving[host] = (streams.receive(place, host, tag), place)
            leaving.append((streams.send(message, host, tag), message))
        sums = {own_host: post.add_up(number, full, streams.counterpart(own_host))}
        post.mark_read(number, patiently=True)
        for host, (work, place) in arriving.items():
            work.wait()
            sums[host] = place
            if packing is not None:
                sums[host] = post.arena.empty(theirs.numel(), theirs.dtype)
                packing.unpack(place, sums[host])
        total = post.arena.empty(theirs.numel(), theirs.dtype)
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
