"""The message that all ranks exchange at the end of every backward, before gradients are published.

    bytes                                                          what they say after the exchange
    each note of an extension, and 255 minus each of its bytes     the largest and the smallest bytes on any rank
    for each bucket: reduced, not reduced                          whether all ranks or none reduced it
                     collected more than it reduced                whether any rank did
                     used, for each parameter                      whether any rank used it

The exchange is a single all-reduce on the host that computes the maximum of each byte.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm import torch_private

_COMPLEMENT = bytes(range(255, -1, -1))


class BucketEnd(NamedTuple):
    """The part of the message about one bucket. After the exchange, a flag is set if any rank has set it.

    `has_more` means that some of the collected gradients have not been included in a reduction. `used` has a flag for
    each parameter, which is set if the parameter got a gradient.
    """

    is_reduced: bool
    is_not_reduced: bool
    has_more: bool
    used: bytearray


class EndOfBackward:
    """Holds the message of one rank or, after `exchange`, of all ranks. Every rank's message has the same size."""

    def __init__(self, notes: Sequence[bytes], buckets: Sequence[BucketEnd]) -> None:
        self._note_sizes, self._sizes = [len(note) for note in notes], [len(bucket.used) for bucket in buckets]
        self._bytes = bytearray().join(note + note.translate(_COMPLEMENT) for note in notes)
        self._first_bucket = len(self._bytes)
        for bucket in buckets:
            self._bytes += bytes(bucket[:3]) + bucket.used

    def exchange(self, group: dist.ProcessGroup) -> None:
        """Replace the message by the byte-wise maximum over all ranks of `group`. All of them must call this."""
        message = torch.frombuffer(self._bytes, dtype=torch.uint8)  # the same memory
        with torch_private.uncounted():
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)

    def notes(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the byte-wise largest and smallest value of each note over all ranks."""
        position = 0
        for size in self._note_sizes:
            middle, end = position + size, position + 2 * size
            yield bytes(self._bytes[position:middle]), bytes(self._bytes[middle:end]).translate(_COMPLEMENT)
            position = end

    def buckets(self) -> Iterator[BucketEnd]:
        """Yield the `BucketEnd` of each bucket, in order."""
        position = self._first_bucket
        for size in self._sizes:
            reduced, not_reduced, more = self._bytes[position : position + 3]
            position += 3
            yield BucketEnd(bool(reduced), bool(not_reduced), bool(more), self._bytes[position : position + size])
            position += size
