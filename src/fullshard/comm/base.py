"""The interface that the engine uses for all communication.

A backend subclasses `Collectives` for one group of ranks; `comm.select` chooses the backend. Every call is
asynchronous: it returns a `Work` immediately, and callers must not use the tensors they passed until `wait()` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

MAX_TAGS = 2**16
"""Tags (see `Collectives`) are below this number."""


class Work(Protocol):
    """A communication operation in progress."""

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it. On accelerators, only the current stream waits."""


@dataclass(frozen=True, slots=True)
class WorkOf:
    """A `Work` whose `wait` method is a given function."""

    wait: Callable[[], torch.Tensor]


class Packing(Protocol):
    """An encoding that sends elements in fewer bytes than they occupy in memory."""

    def gather(self, collectives: Collectives, full: torch.Tensor, main: torch.Tensor, *, tag: int) -> Work:
        """Fill `full` with the unpacked intervals of all ranks. This rank's interval is `main`."""

    def reduce(self, collectives: Collectives, full: torch.Tensor, how: Reduction) -> Work:
        """Run `Collectives.reduce_scatter`, but send intervals in packed form and unpack them before summing them."""

    def nbytes(self, numel: int) -> int:
        """Return the number of bytes in a message of `numel` packed elements, which is a multiple of 16."""

    def pack(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Pack floating-point `values`, shape (n,), into a uint8 message, shape (nbytes(n),)."""

    def unpack(self, message: torch.Tensor, into: torch.Tensor) -> None:
        """Unpack n elements into `into`, shape (n,), which may have any floating-point dtype."""


PACKINGS: dict[torch.dtype, Packing] = {}
"""The available packings, by the dtype in which elements are sent. Features add entries."""


class FullBuffer(Protocol):
    """Memory for an unsharded bucket. On every rank of the group, it is filled from `gather` until `free`."""

    full: torch.Tensor  # the unsharded bucket, shape (size x S,). Its data has the same address whenever it is filled.
    # This rank's interval, shape (S,), or None if `free` discards it. The optimizer updates the weights here.
    main: torch.Tensor | None = None
    is_persistent: bool = False  # whether the memory stays allocated, so that an unsharded bucket costs nothing
    # The number by which other ranks find the buffer in shared memory. Each rank counts its own buffers, so the numbers
    # no longer match after one rank has failed to shard a model.
    shared_number: int | None = None

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that `free` would free now."""

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Fill `full` with the intervals of all ranks.

        `main`, shape (S,), is this rank's interval, which is cast to the dtype of `full`. If intervals are sent packed,
        `full` contains the unpacked values even in this rank's own interval, unless `exactly` is set. `is_unchanged`
        means that `main` has not changed since the last gather, so a buffer that still contains it can skip the copy.
        """

    def free(self, *, keeps_memory: bool = False) -> None:
        """Free the gathered data. Changes to `full` are lost unless it shares memory with `main`.

        With `keeps_memory`, the memory stays allocated, so that `full` has the same address after the next gather.
        """

    def wait_for_readers(self) -> None:
        """Wait until no other rank reads memory that this rank has freed. The main weights may change afterwards."""
        return


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Describes the buffer for a bucket of `numel` elements, including padding.

    `holds_main` means that the main weights have the same dtype and may be stored in the buffer. `packing` is the
    encoding in which intervals are sent, or None if they are sent without encoding.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    holds_main: bool
    packing: Packing | None = None


Inspector = Callable[[torch.Tensor, Mapping[int, torch.Tensor]], None]
"""A function `(part, terms)` that inspects part of a sum while the part is still in a CPU's cache. `terms` are the
available contributions to it, by rank of the group. A term may be in the memory that now holds the part."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """Describes a reduction to a backend, which sums gradients in `dtype` and divides the sum by `divisor`.

    If intervals are sent packed, they are unpacked before summation. `inspector` gets every part of the result.
    """

    tag: int
    divisor: float
    packing: Packing | None
    dtype: torch.dtype
    inspector: Inspector | None = None


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """The numbers of elements that an exchange sends to and receives from each rank, in rank order."""

    leaving: Sequence[int]
    arriving: Sequence[int]


class Collectives(Protocol):
    """Collectives over one group of ranks. `tag` identifies the caller's buffer and is the same on every rank.

    Ranks must issue the same calls in the same order. A backend that can match calls by tag reports a mismatch as a
    time-out instead of mixing up data.
    """

    rank: int
    size: int
    sends: bool = True  # whether this backend sends messages. If it does not, packing has no effect.
    widens: bool = False  # whether `reduce_scatter` can sum in a wider dtype than `full` has, without a copy of it

    def full_buffer(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, holds_main: bool, packing: Packing | None = None
    ) -> FullBuffer:
        """Create the buffer that `BufferSpec` specifies. All ranks must create the same buffers in the same order."""
        return self._buffer(BufferSpec(numel, dtype, device, holds_main, packing if self.sends else None))

    def _buffer(self, spec: BufferSpec) -> FullBuffer:
        """Create the buffer that `full_buffer` returns. `spec.packing` is None if no messages are sent."""
        ...

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Work:
        """Fill `full` (1-D, size x S elements) in place. Each rank contributes its own interval of S elements."""

    def reduce_scatter(
        self,
        full: torch.Tensor,
        *,
        tag: int,
        divisor: float = 1.0,
        packing: Packing | None = None,
        dtype: torch.dtype | None = None,
        inspector: Inspector | None = None,
    ) -> Work:
        """Sum `full` (1-D, size x S elements) over the ranks, and return this rank's S elements divided by `divisor`.

        `Reduction` explains the other arguments. Terms are added pairwise if the backend lets the caller choose the
        order. If `dtype` is not the dtype of `full`, a copy is summed unless the backend `widens`. The memory of the
        result does not keep `full` alive. The operation may overwrite `full`.
        """
        if dtype is not None and dtype != full.dtype and not self.widens:
            full = full.to(dtype)
        how = Reduction(tag, divisor, packing if self.sends else None, dtype or full.dtype, inspector)
        return self._reduce(full, how) if how.packing is None else how.packing.reduce(self, full, how)

    def _reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        """Run `reduce_scatter` without packing. `full` already has the dtype of the sum unless the backend `widens`."""

    def all_reduce(self, tensor: torch.Tensor, *, tag: int) -> Work:
        """Sum `tensor` over the ranks, in place."""

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, splits: SplitSizes, *, tag: int) -> Work:
        """Send every rank its part of `leaving`, and fill `arriving` with the parts received from all ranks.

        Both tensors are 1-D and of one dtype. Parts are in rank order, include this rank's own, and may be empty.
        """

    # The methods below are for ranks that can access each other's memory. Other backends do nothing here.

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialized memory, shape (numel,), from which `reduce_scatter` and `exchange` read fastest."""
        return torch.empty(numel, dtype=dtype, device=device)

    def wait_for_readers(self) -> None:
        """Wait until no other rank reads memory that this rank has freed. The main weights may change afterwards."""
        return


def own_interval(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return a view of the interval of `full` that rank `rank` of `size` owns."""
    shard_numel = full.numel() // size
    return full.narrow(0, rank * shard_numel, shard_numel)
