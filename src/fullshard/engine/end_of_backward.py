"""The message that ends every backward: facts a rank needs from the others before it publishes gradients.

    bytes                                                                          the largest of all ranks says
    per note of an extension: its bytes, what each lacks to 255                    the largest and the smallest
    per bucket: reduced, not reduced                                               whether all or none have reduced it
                collected more than it reduced                                     whether one has
                used, for each parameter                                           which of them one has used

One all-reduce on the host carries it all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm import torch_private

_COMPLEMENT = bytes(range(255, -1, -1))


class BucketEnd(NamedTuple):
    """The part of a message that describes one bucket; for all ranks: whether it is so on any.

    `has_more`: some gradients came after the reduction, or without one. `used`: which parameters got a gradient.
    """

    is_reduced: bool
    is_not_reduced: bool
    has_more: bool
    used: bytearray


class EndOfBackward:
    """One rank's message; after `exchange`, that of all ranks, which have as many notes and buckets."""

    def __init__(self, notes: Sequence[bytes], buckets: Sequence[BucketEnd]) -> None:
        self._note_sizes, self._sizes = [len(note) for note in notes], [len(bucket.used) for bucket in buckets]
        self._bytes = bytearray().join(note + note.translate(_COMPLEMENT) for note in notes)
        self._first_bucket = len(self._bytes)
        for bucket in buckets:
            self._bytes += bytes(bucket[:3]) + bucket.used

    def exchange(self, group: dist.ProcessGroup) -> None:
        """Replace this rank's message by what is known of all ranks of `group`. A collective."""
        message = torch.frombuffer(self._bytes, dtype=torch.uint8)  # the same memory
        with torch_private.uncounted():
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)

    def notes(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield for each note the largest and the smallest values that ranks have, byte by byte."""
        position = 0
        for size in self._note_sizes:
            middle, end = position + size, position + 2 * size
            yield bytes(self._bytes[position:middle]), bytes(self._bytes[middle:end]).translate(_COMPLEMENT)
            position = end

    def buckets(self) -> Iterator[BucketEnd]:
        """Yield the end of each bucket, in order."""
        position = self._first_bucket
        for size in self._sizes:
            reduced, not_reduced, more = self._bytes[position : position + 3]
            position += 3
            yield BucketEnd(bool(reduced), bool(not_reduced), bool(more), self._bytes[position : position + size])
            position += size
