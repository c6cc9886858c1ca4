"""The one interface the engine communicates through.

A backend is a subclass of `Collectives` for one group of ranks; `comm.select` chooses. Every call is asynchronous: it
returns a `Work` at once, and the tensors it was given belong to it until `wait()` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

MAX_TAGS = 2**16
"""Tags (see `Collectives`) are below this number."""


class Work(Protocol):
    """Communication under way."""

    def wait(self) -> torch.Tensor:
        """Block (on accelerators: make the current stream wait) until the result is there, and return it."""


@dataclass(frozen=True, slots=True)
class WorkOf:
    """Communication that a function waits for."""

    wait: Callable[[], torch.Tensor]


class Packing(Protocol):
    """A way to send elements in fewer bytes than they have."""

    def gather(self, collectives: Collectives, full: torch.Tensor, main: torch.Tensor, *, tag: int) -> Work:
        """Fill `full` with the unpacked intervals of all ranks, this one's included, which is `main`."""

    def reduce(self, collectives: Collectives, full: torch.Tensor, how: Reduction) -> Work:
        """See `Collectives.reduce_scatter`: send the other ranks their intervals packed, and add up what arrives."""

    def nbytes(self, numel: int) -> int:
        """Return the length of the message, a multiple of 16 bytes."""

    def pack(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Write `values`, shape (n,) and floating point, into a message, shape (nbytes(n),) and uint8."""

    def unpack(self, message: torch.Tensor, into: torch.Tensor) -> None:
        """Read n elements into `into`, shape (n,) and of any floating-point dtype."""


PACKINGS: dict[torch.dtype, Packing] = {}
"""The packings that there are, by the dtype that elements are sent as. Features fill it."""


class FullBuffer(Protocol):
    """Memory for an unsharded bucket: whole from `gather` to `free`, on every rank of the group.

    Attributes:
        full: shape (size x S,); its data are there, and at the same address, whenever the buffer is whole.
        main: shape (S,); this rank's interval, if it outlasts `free`: main weights, which optimizers update, are here.
        is_persistent: whether its memory is there all the time, so that staying whole costs nothing.
        place: the number by which other ranks find it in memory that they share. Each rank counts by itself: after
            one has failed to shard a model, the numbers no longer match.
    """

    full: torch.Tensor
    main: torch.Tensor | None = None
    is_persistent: bool = False
    place: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that `free` would give back now."""

    def gather(self, main: torch.Tensor, *, tag: int, exactly: bool = False, is_unchanged: bool = False) -> Work:
        """Fill `full` with the intervals of all ranks; this rank's is `main`, shape (S,), cast to the dtype of `full`.

        If intervals are sent packed, `full` holds the unpacked values on every rank, its own interval included, unless
        `exactly`. If `main` `is_unchanged` since the last gather, a buffer that still holds it makes no copy.
        """

    def free(self, *, keeps_memory: bool = False) -> None:
        """End the gather. Changes made in `full` are lost, unless `main` and `full` are one.

        `keeps_memory`: so that `full` is at the same address when it is whole again.
        """

    def wait_for_readers(self) -> None:
        """Wait until no other rank reads what this rank has freed of it: its main weights may change after that."""
        return


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A buffer for a bucket of `numel` elements, padding included.

    `holds_main`: main weights have the same dtype, and may be given a place in it. `packing`: how intervals are sent,
    if they are packed.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    holds_main: bool
    packing: Packing | None = None


Watch = Callable[[torch.Tensor, Mapping[int, torch.Tensor]], None]
"""Watches a sum: `(part, terms)`. The part is still in a CPU's cache. The terms are what each rank of the group has
contributed to it, as far as they are at hand; a term may be in the memory that now holds the part."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a backend is told of a reduction: a sum of gradients, made and returned in `dtype`, divided by `divisor`.

    Intervals that are sent packed are added up as if they were not. `watch` is called with every part of the result.
    """

    tag: int
    divisor: float
    packing: Packing | None
    dtype: torch.dtype
    watch: Watch | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """How the two flat tensors of an exchange are cut: elements for each rank, and from each, in rank order."""

    leaving: Sequence[int]
    arriving: Sequence[int]


class Collectives(Protocol):
    """Collectives over one group of ranks. `tag` identifies the caller's buffer, the same on every rank.

    Ranks must issue the same calls in the same order; with a tag, a backend that can match by it reports a mismatch
    as a time-out instead of mixing up data.

    Attributes:
        sends: whether anything is sent at all, so that packing it makes a difference.
        widens: whether `reduce_scatter` sums in a wider dtype than that of `full` without a copy.
    """

    rank: int
    size: int
    sends: bool = True
    widens: bool = False

    def full_buffer(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        holds_main: bool,
        packing: Packing | None = None,
    ) -> FullBuffer:
        """Make a buffer for a bucket; see `BufferSpec`. All ranks make the same ones in the same order."""
        return self._buffer(BufferSpec(numel, dtype, device, holds_main, packing if self.sends else None))

    def _buffer(self, spec: BufferSpec) -> FullBuffer:
        """See `full_buffer`; `spec.packing` is None where nothing is sent."""
        ...

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Work:
        """Fill `full` (1-D, size x S elements) in place from every rank's own S-element interval of it."""

    def reduce_scatter(
        self,
        full: torch.Tensor,
        *,
        tag: int,
        divisor: float = 1.0,
        packing: Packing | None = None,
        dtype: torch.dtype | None = None,
        watch: Watch | None = None,
    ) -> Work:
        """Sum `full` (1-D, size x S elements) over the ranks, in pairs where the backend leaves the choice.

        The rest is as in `Reduction`. In another dtype than that of `full` a copy is summed, unless this `widens`. The
        result is this rank's S elements of the sum, divided by `divisor`, in memory that does not keep `full` alive.
        `full` belongs to the work and may be overwritten.
        """
        if dtype is not None and dtype != full.dtype and not self.widens:
            full = full.to(dtype)
        how = Reduction(tag, divisor, packing if self.sends else None, dtype or full.dtype, watch)
        return self._reduce(full, how) if how.packing is None else how.packing.reduce(self, full, how)

    def _reduce(self, full: torch.Tensor, how: Reduction) -> Work:
        """See `reduce_scatter`; without packing, and `full` is in the dtype of the sum unless the backend `widens`."""

    def all_reduce(self, tensor: torch.Tensor, *, tag: int) -> Work:
        """Sum `tensor` over the ranks, in place."""

    def exchange(self, leaving: torch.Tensor, arriving: torch.Tensor, parts: Parts, *, tag: int) -> Work:
        """Send every rank its part of `leaving`, and fill `arriving` with the ranks' parts for this one.

        Both are 1-D and of one dtype. Parts, this rank's own included, are in the order of the ranks, and may be empty.
        """

    # What follows concerns ranks that see one another's memory. No other backend does anything.

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory, shape (numel,), from which `reduce_scatter` and `exchange` are fastest."""
        return torch.empty(numel, dtype=dtype, device=device)

    def wait_for_readers(self) -> None:
        """Wait until no other rank reads what this rank has freed: main weights may change after that."""
        return


def cut(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return views of a flat tensor, one part after the other."""
    return list(flat.split_with_sizes(list(sizes)))


def own_interval(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the view of `full` that rank `rank` of `size` owns."""
    shard_numel = full.numel() // size
    return full.narrow(0, rank * shard_numel, shard_numel)
