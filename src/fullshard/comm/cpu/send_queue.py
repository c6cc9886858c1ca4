"""Gradients between the ranks of a host: a rank says in its send queue where its own are, and all read them there.

All other exchanges go the same way; there the entry leads to a list of where each rank's part begins.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from fullshard.comm.base import Parts, Reduction, Watch, Work, cut, own_interval
from fullshard.comm.cpu.averages import average
from fullshard.comm.cpu.buffer_pool import BufferPool
from fullshard.comm.cpu.peers import Peers, host_memory_nbytes
from fullshard.core.sizes import LONG_NBYTES

_LINE = 8
"""Counters, of 8 bytes each, in a cache line."""
_QUEUE_NBYTES = 2**17
_ENTRY = 3
"""Numbers in one."""
_QUEUE_DEPTH = 2048
"""Gradients that may be under way; a rank waits for its peers before it posts more."""
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
"""Numbered alike on every rank."""


class _SendQueue:
    """The list, at the start of a rank's file, of the gradients that its peers may read.

    Line 0 counts the entries posted; line 1 + r counts those that rank r has read. An entry is (tag, where in the file,
    dtype).
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
        """Return (tag, offset, dtype) of the entry of that number."""
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
        self._under_way: deque[_Transfer] = deque()

    def post(self, full: torch.Tensor, tag: int) -> tuple[torch.Tensor, int]:
        """Let the peers read `full`, or a copy of it if they cannot reach it.

        Returns:
            The tensor that they read, which must not change until they have, and the number of the entry, the same on
            every rank.
        """
        full, offset = self._within_reach(full)
        self._peers.wait_until(lambda: self._own.posted - int(self._own.read.min()) < _QUEUE_DEPTH)
        number = self._own.posted
        self._own.post(tag, offset, full.dtype)
        return full, number

    def _within_reach(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return `tensor`, or a copy of it where peers can read, and its offset in that memory."""
        offset = self.pool.offset(tensor)
        if offset is None:
            tensor = self.pool.empty(tensor.numel(), tensor.dtype).copy_(tensor)
            offset = self.pool.offset(tensor) or 0  # one without elements is nowhere
        return tensor, offset

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
        watch: Watch | None = None,
        *,
        may_keep: bool = False,
        is_sent: bool = False,
    ) -> torch.Tensor:
        """Return the sum over the ranks of this host, in their order, of the interval of rank `position` of the group.

        Args:
            number: of the entry; all ranks of this host have posted it.
            full: the tensor that this rank posted.
            position: the rank whose interval is summed.
            dtype: of the sum; that of `full` or a wider one.
            divisor: the number by which the sum is divided.
            watch: see `Reduction`.
            may_keep: whether a long sum may take the place of this rank's own term, and keep `full` alive.
            is_sent: the sum is short-lived, and so is made in reused memory.
        """
        own = own_interval(full, position, self._peers.num_hosts * self._peers.size)
        if own.numel() == 0:
            return own.to(dtype)
        terms = []
        for source, (queue, memory) in enumerate(zip(self._queues, self._memories, strict=True)):
            _, offset, theirs = queue.entry(number)  # one rank may have accumulated gradients that another has not
            start = offset + position * own.numel() * theirs.itemsize
            there = source != self._peers.rank
            terms.append(torch.frombuffer(memory, dtype=theirs, count=own.numel(), offset=start) if there else own)
        # No other rank reads this interval, or the sum.
        nbytes = own.numel() * dtype.itemsize
        if nbytes < LONG_NBYTES and not is_sent:  # where activations were, which backward has freed
            into = torch.empty(own.numel(), dtype=dtype)
        else:
            into = own if may_keep and dtype == own.dtype else self.pool.empty(own.numel(), dtype)
        return average(terms, into, divisor, watch, first_rank=self._peers.group_rank(0))

    def mark_read(self, number: int, *, patiently: bool = False) -> None:
        """Say that this rank has read the entry of that number, and wait until the others have."""
        for queue in self._queues:
            queue.read[self._peers.rank] = number + 1
        # Its memory is handed out again as soon as every peer has read it; waiting bounds how much of it there is.
        self._peers.wait_until(lambda: int(self._own.read.min()) > number, patiently=patiently)

    def send(self, full: torch.Tensor, how: Reduction) -> Work:
        """Begin to average `full` over the ranks of this host."""
        full, number = self.post(full, how.tag)
        dtype, divisor, watch, rank = how.dtype, how.divisor, how.watch, self._peers.rank
        read = partial(self.sum_interval, number, full, rank, dtype, divisor, watch, may_keep=True)
        return self._begin(number, how.tag, full, read)

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, parts: Parts, tag: int) -> Work:
        """Begin to give every rank of this host its part of `leaving`, and to copy their parts for this one."""
        leaving, offset = self._within_reach(leaving)
        starts = np.cumsum([0, *parts.leaving[:-1]]) * leaving.itemsize + offset
        places = self.pool.empty(2 * len(starts), torch.int64)
        places.view(-1, 2).copy_(torch.from_numpy(np.stack([starts, parts.leaving], axis=1)))
        places, number = self.post(places, tag)
        return self._begin(number, tag, (leaving, places), partial(self.read_parts, number, arriving, parts))

    def _begin(self, number: int, tag: int, held: object, read: Callable[[], torch.Tensor]) -> Work:
        transfer = _Transfer(self, number, tag, held, read)
        self._under_way.append(transfer)
        return transfer

    def read_parts(self, number: int, arriving: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Copy the parts that all ranks of this host have for this one. They have posted the entry of that number.

        Raises:
            RuntimeError: a rank has something else than is expected of it.
        """
        pieces = cut(arriving, parts.arriving)
        for source, (queue, memory, piece) in enumerate(zip(self._queues, self._memories, pieces, strict=True)):
            _, places, _ = queue.entry(number)
            start, numel = np.frombuffer(memory, np.int64, 2, places + 16 * self._peers.rank).tolist()
            if numel != piece.numel():
                rank = self._peers.group_rank(source)
                raise RuntimeError(f"rank {rank} of the group has {numel} elements for this one, not {piece.numel()}")
            if numel:
                piece.copy_(torch.frombuffer(memory, dtype=arriving.dtype, count=numel, offset=start))
        return arriving

    def finish(self, wanted: _Transfer) -> None:
        """Complete all transfers up to this one, in the order in which all ranks sent."""
        while wanted in self._under_way:
            first = self._under_way[0]
            self.wait_for(first.number, first.tag)
            first.result = first.read()
            self.mark_read(first.number)
            self._under_way.popleft()
            del first.held, first.read  # which may hold the same memory


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer under way, in which all ranks of this host read from one another.

    Attributes:
        queues: of this rank.
        number, tag: of the entry; the number is the same on every rank.
        held: the tensors that the peers read.
        read: makes the result once all ranks of this host have posted.
        result: set once every peer has read, too.
    """

    queues: SendQueues
    number: int
    tag: int
    held: object
    read: Callable[[], torch.Tensor]
    result: torch.Tensor = field(init=False)

    def wait(self) -> torch.Tensor:
        """Wait for the peers' data, and return this rank's result."""
        self.queues.finish(self)
        return self.result
