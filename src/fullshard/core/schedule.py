"""The order in which all ranks of a model launch collectives. The engine follows it, and the planner predicts it.

gathers      in forward order as it happens; prefetched only along an order that all ranks have agreed on
reductions   in the reverse of the first forward's order; a reduction that is ready early waits for its turn
in flight    one gather ahead and one reduction behind, which bounds the memory of unsharded tensors
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Generic, TypeVar

REDUCTIONS_IN_FLIGHT = 1
"""The number of reductions that may be in flight, which limits the memory of unsharded gradients."""

SPENT = 0.9
"""The fraction of free memory for units kept unsharded. The rest is for rare allocations and fragmentation."""

UnitT = TypeVar("UnitT")
BucketT = TypeVar("BucketT", bound=Hashable)


class BackwardPrefetch(StrEnum):
    """The time at which backward unshards the next unit."""

    BACKWARD_PRE = "BACKWARD_PRE"
    """before the current unit's gradients are computed: most overlap, with two units unsharded at the same time"""
    BACKWARD_POST = "BACKWARD_POST"
    """after the current unit's gradients are computed: less overlap, less memory"""
    NO_PREFETCH = "NO_PREFETCH"
    """only when the unit is needed"""


def gathered_ahead(order: Sequence[UnitT], begun: int, unit: UnitT) -> UnitT | None:
    """Return the unit to gather while `unit` runs forward, which is the unit after it in the previous forward.

    `order` is the order of units in the previous forward. `begun` is the number of units that have begun in this
    forward, including `unit`. Return None if `unit` has moved, because the next unit is then unknown.
    """
    return order[begun] if begun < len(order) and order[begun - 1] is unit else None


def count_kept(nbytes: Iterable[int], budget: int) -> int:
    """Return how many units can stay unsharded in `budget` bytes. `nbytes` are their sizes in backward order."""
    return sum(total <= budget for total in accumulate(nbytes))


def launched_until_over(shard_size: int, replicate_size: int, in_flight: int = REDUCTIONS_IN_FLIGHT) -> int:
    """Return the number of further launches after which a reduction is complete along both axes of its mesh.

    When `in_flight` reductions are running, the next launch first waits for the oldest one along the shard axis. The
    launch after that waits for the same reduction along the replicate axis.
    """
    return 0 if shard_size * replicate_size == 1 else in_flight + (replicate_size > 1)


class Reductions(Generic[BucketT]):
    """Keeps track of the reductions of one backward: which one to launch next, and which ones have finished.

    Attributes:
        in_flight: The number of reductions that may be in flight when another one is launched.
        launched: The buckets in the order in which they were launched.
        waiting: The buckets with unpublished gradients, each with the number of its launch, from 1.
    """

    def __init__(self) -> None:
        self.in_flight = REDUCTIONS_IN_FLIGHT
        self.clear()

    def clear(self) -> None:
        """Clear the record of a backward that has ended or failed."""
        self._queue: deque[BucketT] = deque()
        self._ready: set[BucketT] = set()
        self.launched: list[BucketT] = []
        self.waiting: dict[BucketT, int] = {}

    def expect(self, buckets: Iterable[BucketT]) -> None:
        """Append buckets to the queue of reductions, in the order in which they will be launched."""
        self._queue.extend(buckets)

    def complete(self, bucket: BucketT) -> Iterator[BucketT]:
        """Record that all gradients of a bucket exist. Yield the buckets at the head of the queue that are complete."""
        self._ready.add(bucket)
        while self._queue and self._queue[0] in self._ready:
            yield self._queue.popleft()

    def remaining(self) -> Iterator[BucketT]:
        """Yield the buckets that are still queued at the end of backward, because every rank must reduce them."""
        while self._queue:
            yield self._queue.popleft()

    def launch(self, bucket: BucketT) -> BucketT | None:
        """Record a launch. If too many reductions are in flight, return the bucket to wait for."""
        self.launched.append(bucket)
        self.waiting[bucket] = len(self.launched)
        return self.launched[-self.in_flight - 1] if len(self.launched) > self.in_flight else None

    def latest(self) -> list[BucketT]:
        """Return the buckets in `waiting` whose reductions the last launch may have finished."""
        return [bucket for bucket in self.launched[-self.in_flight - 2 :] if bucket in self.waiting]

    def is_over(self, bucket: BucketT, shard_size: int, replicate_size: int) -> bool:
        """Return whether the reduction of a bucket in `waiting` has been waited for along both axes of its mesh."""
        younger = len(self.launched) - self.waiting[bucket]
        return younger >= launched_until_over(shard_size, replicate_size, self.in_flight)
