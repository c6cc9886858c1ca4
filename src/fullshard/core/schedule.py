"""The order of work that all ranks of a model share: the engine follows it, and the planner predicts it. No torch.

gathers      in forward order as it happens; ahead of need only along an order all ranks were seen to agree on
reductions   in the reverse of the first forward's order; one that is ready early waits for its turn
in flight    one gather ahead and one reduction behind, which bounds the memory of what is unsharded
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

REDUCTIONS_IN_FLIGHT = 1
"""Reductions that may be under way before the oldest is waited for; bounds the memory of unsharded gradients."""

SPENT = 0.9
"""Share of free memory that units kept unsharded may take: the rest is for what comes rarely, and for fragments."""

UnitT = TypeVar("UnitT")
BucketT = TypeVar("BucketT", bound=Hashable)


class BackwardPrefetch(StrEnum):
    """The moment at which backward unshards the unit it will need next."""

    BACKWARD_PRE = "BACKWARD_PRE"
    """before the current unit's gradients are computed: most overlap, two units unsharded at once"""
    BACKWARD_POST = "BACKWARD_POST"
    """after them: less overlap, less memory"""
    NO_PREFETCH = "NO_PREFETCH"
    """when it is needed"""


def gathered_ahead(order: Sequence[UnitT], begun: int, unit: UnitT) -> UnitT | None:
    """Return the unit to gather while `unit` runs forward: its successor in `order`, that of the forward before.

    `begun` units have begun in this forward, `unit` as the last. If it had another place in `order`, the next one is
    unknown.
    """
    return order[begun] if begun < len(order) and order[begun - 1] is unit else None


def count_kept(nbytes: Iterable[int], budget: int) -> int:
    """Return how many units stay unsharded between forward and backward: as many as `budget` bytes hold.

    The unit whose backward comes first is at the front, because it is kept for the shortest time.
    """
    count = 0
    for each in nbytes:
        budget -= each
        if budget < 0:
            break
        count += 1
    return count


def launched_until_over(shard_size: int, replicate_size: int, in_flight: int = REDUCTIONS_IN_FLIGHT) -> int:
    """Return how many later launches it takes until a reduction has been waited for along both axes of its mesh.

    A launch beyond the limit waits for the oldest along the shard axis; along the other it is over one launch later.
    """
    return 0 if shard_size * replicate_size == 1 else in_flight + (replicate_size > 1)


class Reductions(Generic[BucketT]):
    """The reductions of one backward: which one is launched next, and which are over.

    Attributes:
        in_flight: how many may be under way when another is launched.
        launched: in the order they were.
        waiting: buckets whose gradient is not published yet, each with the number of its launch, from 1.
    """

    def __init__(self) -> None:
        self.in_flight = REDUCTIONS_IN_FLIGHT
        self.clear()

    def clear(self) -> None:
        """Forget everything at the end of a backward."""
        self._queue: deque[BucketT] = deque()
        self._ready: set[BucketT] = set()
        self.launched: list[BucketT] = []
        self.waiting: dict[BucketT, int] = {}

    def expect(self, buckets: Iterable[BucketT]) -> None:
        """Queue these buckets for reduction, after those that are queued already."""
        self._queue.extend(buckets)

    def complete(self, bucket: BucketT) -> Iterator[BucketT]:
        """Note that all gradients of a bucket exist, and yield the buckets due: it and those before it are complete."""
        self._ready.add(bucket)
        while self._queue and self._queue[0] in self._ready:
            yield self._queue.popleft()

    def rest(self) -> Iterator[BucketT]:
        """Yield the buckets that never became complete, at the end of backward: every rank reduces them anyway."""
        while self._queue:
            yield self._queue.popleft()

    def launch(self, bucket: BucketT) -> BucketT | None:
        """Note a launch, and return the reduction to wait for if too many are under way."""
        self.launched.append(bucket)
        self.waiting[bucket] = len(self.launched)
        return self.launched[-self.in_flight - 1] if len(self.launched) > self.in_flight else None

    def latest(self) -> list[BucketT]:
        """Return the waiting reductions that the last launch may have ended."""
        return [bucket for bucket in self.launched[-self.in_flight - 2 :] if bucket in self.waiting]

    def is_over(self, bucket: BucketT, shard_size: int, replicate_size: int) -> bool:
        """Return whether a waiting reduction has been waited for already, along both axes of its mesh."""
        younger = len(self.launched) - self.waiting[bucket]
        return younger >= launched_until_over(shard_size, replicate_size, self.in_flight)
