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


class FullBuffer(Protocol):
    """Memory for an unsharded bucket: whole from `gather` to `free`, on every rank of the group.

    Attributes:
        full: shape (size x S,); its data are there, and at the same address, whenever the buffer is whole.
    """

    full: torch.Tensor

    @property
    def main(self) -> torch.Tensor | None:
        """Shape (S,); this rank's interval, if it outlasts `free`, so that main weights can live there."""

    @property
    def nbytes(self) -> int:
        """Bytes that `free` would give back now."""
        ...

    def gather(self, main: torch.Tensor, *, tag: int) -> Work:
        """Fill `full` with the intervals of all ranks, this rank's being `main` (cast to the dtype of `full`)."""
        ...

    def free(self) -> None:
        """End it. What was changed in `full` is lost, unless `main` and `full` are one."""
        ...


class Collectives(Protocol):
    """Collectives over one group of ranks. `tag` identifies the caller's buffer, the same on every rank.

    Ranks must issue the same calls in the same order; with a tag, a backend that can match by it reports a mismatch
    as a time-out instead of mixing up data.

    Attributes:
        rank: this rank's position in the group.
        size: ranks in the group.
    """

    rank: int
    size: int

    def full_buffer(self, numel: int, dtype: torch.dtype, device: torch.device, *, holds_main: bool) -> FullBuffer:
        """A buffer for a bucket of `numel` elements, padding included. All ranks make the same ones in the same order.

        If main weights have the same dtype (`holds_main`), they may be given a place in it.
        """
        return ResizedBuffer(self, numel, dtype, device)

    def staging(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised memory, shape (numel,), from which `reduce_scatter` is fastest."""
        return torch.empty(numel, dtype=dtype, device=device)

    def settle(self) -> None:
        """Wait until no other rank reads what this rank has freed: main weights may change after that."""
        return

    def all_gather(self, full: torch.Tensor, *, tag: int) -> Work:
        """Fill `full` (1-D, size x S elements) in place from every rank's own S-element interval of it."""
        ...

    def reduce_scatter(self, full: torch.Tensor, *, tag: int, divisor: float = 1.0) -> Work:
        """Sum `full` (1-D, size x S elements) over the ranks, in rank order where the backend leaves the choice.

        Returns:
            Work for this rank's S elements of the sum over `divisor`, in memory that does not keep `full` alive.
            `full` belongs to it and may be overwritten.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor, *, tag: int) -> Work:
        """Sum `tensor` over the ranks, in place."""
        ...


def own_interval(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The view of `full` that rank `rank` of `size` owns."""
    shard_numel = full.numel() // size
    return full.narrow(0, rank * shard_numel, shard_numel)


class ResizedBuffer:
    """A buffer in memory of its own, which is freed by resizing its storage. See `FullBuffer`.

    Never by rebinding: autograd saves views of parameters (`weight.t()`), and those keep pointing at this storage.
    """

    main = None

    def __init__(self, collectives: Collectives, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._collectives = collectives
        self.full = torch.empty(numel, dtype=dtype, device=device)
        self._own = own_interval(self.full, collectives.rank, collectives.size)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.full.untyped_storage().nbytes()

    def gather(self, main: torch.Tensor, *, tag: int) -> Work:
        """Bring the memory back, copy `main` into its place and launch the all-gather."""
        self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)
        self._own.copy_(main)
        return self._collectives.all_gather(self.full, tag=tag)

    def free(self) -> None:
        """Resize to nothing."""
        self.full.untyped_storage().resize_(0)
