"""The message that ends every backward: facts a rank needs from the others before it publishes gradients.

    bytes                                                                          the largest of all ranks says
    loads of weights, what they lack to 255                                        whether all have loaded the same
    a wish to stop                                                                 whether one has it
    a digest of the rank's actions, what it lacks to 255                           whether all have done the same
    per bucket: reduced, not reduced                                               whether all or none have reduced it
                collected more than it reduced                                     whether one has
                used, for each parameter                                           which of them one has used

A byte and what it lacks to 255 add up to that where all ranks have the same. One all-reduce on the host carries it all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm import torch_private

DIGEST_NBYTES = 8
_STOP, _DIGEST = 2, 3
_BUCKETS = _DIGEST + 2 * DIGEST_NBYTES


class BucketEnd(NamedTuple):
    """The part of a message that describes one bucket.

    Attributes:
        is_reduced: whether this rank has reduced it; for all ranks: whether any has.
        is_not_reduced: whether this rank has not reduced it; for all ranks: whether any has not.
        has_more: some gradients came after the reduction, or without one.
        used: for each parameter, whether it got a gradient.
    """

    is_reduced: bool
    is_not_reduced: bool
    has_more: bool
    used: bytearray


class EndOfBackward:
    """One rank's message; after `exchange`, that of all ranks.

    Args:
        loads: how often weights have been loaded.
        wants_to_stop: whether this rank wants to stop (`core.stopping`).
        digest: digest of the rank's actions (`engine.lockstep`), `DIGEST_NBYTES`.
        buckets: ends of buckets, in the same order on every rank.
    """

    def __init__(self, loads: int, wants_to_stop: bool, digest: bytes, buckets: Sequence[BucketEnd]) -> None:
        loads %= 256
        self._bytes = bytearray((loads, 255 - loads, wants_to_stop, *digest, *(255 - byte for byte in digest)))
        self._sizes = [len(bucket.used) for bucket in buckets]
        for bucket in buckets:
            self._bytes += bytes(bucket[:3]) + bucket.used

    def exchange(self, group: dist.ProcessGroup) -> None:
        """Replace this rank's message by what is known of all ranks of `group`. A collective."""
        message = torch.frombuffer(self._bytes, dtype=torch.uint8)  # the same memory
        with torch_private.uncounted():
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)

    @property
    def wants_to_stop(self) -> bool:
        """Return whether any rank wants to stop."""
        return bool(self._bytes[_STOP])

    @property
    def agrees_on_loads(self) -> bool:
        """Return whether all ranks have loaded weights equally often."""
        return sum(self._bytes[:_STOP]) == 255

    @property
    def agrees_on_steps(self) -> bool:
        """Return whether all ranks have the same digest."""
        middle = _DIGEST + DIGEST_NBYTES
        pairs = zip(self._bytes[_DIGEST:middle], self._bytes[middle:_BUCKETS], strict=True)
        return all(byte + rest == 255 for byte, rest in pairs)

    def buckets(self) -> Iterator[BucketEnd]:
        """Yield the end of each bucket, in order."""
        position = _BUCKETS
        for size in self._sizes:
            reduced, not_reduced, more = self._bytes[position : position + 3]
            position += 3
            yield BucketEnd(bool(reduced), bool(not_reduced), bool(more), self._bytes[position : position + size])
            position += size
