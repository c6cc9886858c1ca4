"""The one interface the engine communicates through.

A backend knows one group of ranks. Every call is asynchronous: it returns a `Work` at once, and the tensors it was
given belong to it until `wait()` returns.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Work(Protocol):
    """Communication under way."""

    def wait(self) -> torch.Tensor:
        """Block (on accelerators: make the current stream wait) until the result is there, and return it."""
        ...


class Collectives(Protocol):
    """Collectives over one group of ranks. `tag` identifies the caller's buffer, the same on every rank.

    Ranks must issue the same calls in the same order; with a tag, a backend that can match by it reports a mismatch
    as a time-out instead of mixing up data.
    """

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        ...

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Work:
        """Fill `full` (1-D, size x S elements) in place from every rank's own S-element interval of it."""
        ...

    def reduce_scatter(self, full: torch.Tensor, *, tag: int) -> Work:
        """Sum `full` (1-D, size x S elements) over the ranks; the result is this rank's S-element interval.

        `full` is overwritten; the result may be a view of it.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor, *, tag: int) -> Work:
        """Sum `tensor` over the ranks, in place."""
        ...


def own_interval(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The view of `full` that rank `rank` of `size` owns."""
    shard_numel = full.numel() // size
    return full.narrow(0, rank * shard_numel, shard_numel)
