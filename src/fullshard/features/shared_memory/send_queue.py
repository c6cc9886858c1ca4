"""Queues with which the ranks of a host tell each other where to read gradients in shared memory.

Exchanges of other tensors use the same queues. Their entries give the location of a list of the parts for each rank.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Lock

import numpy as np
import torch

from fullshard.comm.base import Reduction, SplitSizes, Work, WorkOf, own_interval
from fullshard.comm.gloo import average
from fullshard.core.sizes import LONG_NBYTES, round_up
from fullshard.features.shared_memory.peers import HOST_NBYTES, Peers


class BufferPool:
    """An allocator of tensors in shared memory from byte `start` on. The memory of released tensors is reused."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._top = start
        self._free: dict[int, int] = {}
        self._lock = Lock()
        # Tensors can be released at any time in any thread; appending to a deque is safe there.
        self._returned: deque[tuple[int, int]] = deque()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor of shape (numel,)."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = round_up(numel * dtype.itemsize, mmap.PAGESIZE)
        with self._lock:
            start = self._take(nbytes)
        piece = memoryview(self._memory)[start : start + numel * dtype.itemsize]
        # The tensor's storage holds this object, so both are released together.
        weakref.finalize(piece, self._returned.append, (start, nbytes)).atexit = False
        return torch.frombuffer(piece, dtype=torch.uint8).view(dtype)

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Return the offset of a tensor's data in the shared memory, or None if the data are elsewhere."""
        offset = tensor.data_ptr() - self._address
        return offset if 0 <= offset < self._top else None

    def _take(self, nbytes: int) -> int:
        self._collect_returned()
        # Use the first of the smallest blocks that are large enough.
        found = min(((size, start) for start, size in self._free.items() if size >= nbytes), default=None)
        if found is not None:
            size, start = found
            del self._free[start]
            if size > nbytes:
                self._free[start + nbytes] = size - nbytes
            return start
        start = next((start for start, size in self._free.items() if start + size == self._top), self._top)
        if start + nbytes > len(self._memory):
            raise MemoryError(
                f"{nbytes} bytes do not fit into the {len(self._memory)} bytes of memory that the ranks of a host share"
            )
        self._free.pop(start, None)
        self._top = start + nbytes
        return start

    def _collect_returned(self) -> None:
        """Free the memory of released tensors, and merge it with adjacent free blocks."""
        while self._returned:
            start, nbytes = self._returned.popleft()
            before = next((first for first, size in self._free.items() if first + size == start), start)
            nbytes += self._free.pop(start + nbytes, 0)
            self._free[before] = self._free.get(before, 0) + nbytes


_LINE = 8
"""Number of 8-byte counters in a cache line."""
_QUEUE_NBYTES = 2**17
_QUEUE_DEPTH = 2048
"""Maximum number of gradients in flight; a rank waits for its peers before it posts more."""
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
"""The dtypes in the same order on every rank."""


class SendQueues:
    """Queues in which each rank publishes the locations of its gradients.

    A rank's file begins with its queue. This consists of a cache line with the number of entries that the rank has
    posted, one cache line per rank with the number of entries which that rank has read, and the entries themselves:
    (tag, offset in the file, dtype).

    Attributes:
        pool: allocator of memory that the other ranks can read.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        if _LINE * (1 + peers.size) * 8 > _QUEUE_NBYTES - 24 * _QUEUE_DEPTH:
            raise OSError(f"the shared memory has no room for a queue of {peers.size} ranks")
        nbytes = _QUEUE_NBYTES + 2 * HOST_NBYTES // peers.size  # divided equally among the ranks
        self._memories = [peers.map(owner, 0, nbytes) for owner in range(peers.size)]
        queues = [np.frombuffer(memory, np.int64, _QUEUE_NBYTES // 8) for memory in self._memories]
        self._posted = [numbers[:1] for numbers in queues]
        self._read = [numbers[_LINE : _LINE * (1 + peers.size) : _LINE] for numbers in queues]
        self._entries = [numbers[-3 * _QUEUE_DEPTH :].reshape(_QUEUE_DEPTH, 3) for numbers in queues]
        self.pool = BufferPool(self._memories[peers.rank], _QUEUE_NBYTES)
        self._under_way: deque[tuple[int, int, object, Callable[[], torch.Tensor], list[torch.Tensor]]] = deque()

    def post(self, full: torch.Tensor, tag: int) -> tuple[torch.Tensor, int]:
        """Publish `full` so that the other ranks can read it. Copy it first if it is not in shared memory.

        Returns:
            The tensor that the other ranks read, which must not change until they have finished, and the number of the
            entry, which is the same on every rank.
        """
        full, offset = self._within_reach(full)
        posted, read = self._posted[self._peers.rank], self._read[self._peers.rank]
        number = int(posted[0])
        self._peers.wait_until(lambda: number - int(read.min()) < _QUEUE_DEPTH)
        self._entries[self._peers.rank][number % _QUEUE_DEPTH] = (tag, offset, _DTYPES.index(full.dtype))
        posted[0] = number + 1  # written last, so that the entry is visible to ranks that see it
        return full, number

    def _entry(self, source: int, number: int) -> tuple[int, int, torch.dtype]:
        """Return the tag, offset and dtype of the entry that rank `source` posted under this number."""
        tag, offset, dtype = self._entries[source][number % _QUEUE_DEPTH].tolist()
        return tag, offset, _DTYPES[dtype]

    def _within_reach(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return `tensor`, or a copy of it in shared memory if it is elsewhere, and its offset there."""
        offset = self.pool.offset(tensor)
        if offset is None:
            tensor = self.pool.empty(tensor.numel(), tensor.dtype).copy_(tensor)
            offset = self.pool.offset(tensor) or 0  # an empty tensor has no location
        return tensor, offset

    def wait_for(self, number: int, tag: int) -> None:
        """Wait until all ranks have posted entry `number`. Raise `RuntimeError` if an entry does not have this tag."""
        self._peers.wait_until(lambda: all(int(posted[0]) > number for posted in self._posted))
        for source in range(self._peers.size):
            other, _, _ = self._entry(source, number)
            if other != tag:
                raise RuntimeError(f"rank {source} of the group is in collective {other}, but this rank is in {tag}")

    def _average_interval(self, number: int, full: torch.Tensor, how: Reduction) -> torch.Tensor:
        """Return this rank's interval of the gradients that all ranks posted in entry `number`, averaged.

        If the interval is long, the result may overwrite this rank's part of `full`, and it keeps `full` in memory.
        """
        rank = self._peers.rank
        own = own_interval(full, rank, self._peers.size)
        if own.numel() == 0:
            return own.to(how.dtype)
        terms = []
        for source, memory in enumerate(self._memories):
            _, offset, theirs = self._entry(source, number)  # a rank with accumulated gradients uses another dtype
            start = offset + rank * own.numel() * theirs.itemsize
            there = source != rank
            terms.append(torch.frombuffer(memory, dtype=theirs, count=own.numel(), offset=start) if there else own)
        # No other rank reads this interval, or the sum.
        if own.numel() * how.dtype.itemsize < LONG_NBYTES:
            into = torch.empty(own.numel(), dtype=how.dtype)  # reuses memory of freed activations
        else:
            into = own if how.dtype == own.dtype else self.pool.empty(own.numel(), how.dtype)
        return average(terms, into, how.divisor, how.inspector)

    def mark_read(self, number: int) -> None:
        """Record that this rank has read entry `number`, and wait until all other ranks have read this rank's entry."""
        for read in self._read:
            read[self._peers.rank] = number + 1
        # Memory is reused once every peer has read it; waiting bounds its size.
        own = self._read[self._peers.rank]
        self._peers.wait_until(lambda: int(own.min()) > number)

    def reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        """Start to average `full` over the ranks. The returned work waits for this rank's interval."""
        full, number = self.post(full, how.tag)
        return self._begin(number, how.tag, full, partial(self._average_interval, number, full, how))

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, splits: SplitSizes, tag: int) -> Work:
        """Start an exchange in which each rank copies its parts of all `leaving` tensors into its own `arriving`."""
        leaving, offset = self._within_reach(leaving)
        starts = np.cumsum([0, *splits.leaving[:-1]]) * leaving.itemsize + offset
        places = self.pool.empty(2 * len(starts), torch.int64)
        places.view(-1, 2).copy_(torch.from_numpy(np.stack([starts, splits.leaving], axis=1)))
        places, number = self.post(places, tag)
        return self._begin(number, tag, (leaving, places), partial(self._read_parts, number, arriving, splits))

    def _read_parts(self, number: int, arriving: torch.Tensor, splits: SplitSizes) -> torch.Tensor:
        """Copy the parts for this rank to `arriving`. All ranks must have posted entry `number`."""
        pieces = arriving.split_with_sizes(splits.arriving)
        for source, (memory, piece) in enumerate(zip(self._memories, pieces, strict=True)):
            _, places, _ = self._entry(source, number)
            start, numel = np.frombuffer(memory, np.int64, 2, places + 16 * self._peers.rank).tolist()
            if numel != piece.numel():
                raise RuntimeError(
                    f"rank {source} of the group has {numel} elements for this rank, expected {piece.numel()}"
                )
            if numel:
                piece.copy_(torch.frombuffer(memory, dtype=arriving.dtype, count=numel, offset=start))
        return arriving

    def _begin(self, number: int, tag: int, held: object, read: Callable[[], torch.Tensor]) -> Work:
        """Queue a transfer that keeps `held` in memory. `read` returns its result once all ranks have posted."""
        result: list[torch.Tensor] = []
        self._under_way.append((number, tag, held, read, result))
        return WorkOf(partial(self._finish, result))

    def _finish(self, result: list[torch.Tensor]) -> torch.Tensor:
        """Complete all queued transfers up to the one with this `result`, in the order in which they were posted."""
        while not result:
            number, tag, _, read, of_first = self._under_way[0]
            self.wait_for(number, tag)
            of_first.append(read())
            self.mark_read(number)
            self._under_way.popleft()
        return result[0]
