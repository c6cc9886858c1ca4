"""Data loading on rank 0, which reads the batches of all ranks and sends each rank its own.

The other ranks never read the dataset. Every rank gets the batches that it would have read itself. Batches are collated
separately, so their shapes may differ. Rank 0 reads one step ahead, because it must tell each rank whether the batch
that it sends is the last one.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from fullshard.api.collectives import rank, scatter_objects, world_size
from fullshard.api.dealing import Real
from fullshard.core.errors import DataError

Given = tuple[Any, Real | None]
"""A batch, and the real part of its round, or None if that is unknown."""

_Parcel = tuple[list[Given], bool, str]
"""Rank 0's message for one step: at most one batch, whether it is the last, and rank 0's error if it failed."""


def dispatched(
    read: Callable[[], Iterator[Given]], last_real: Callable[[], Real | None], shares: int
) -> Iterator[Given]:
    """Yield this rank's batches, which rank 0 reads in rank order. This is a collective in each step."""
    copies = max(1, world_size() // shares)
    parcels = _parcels(read, last_real, shares) if rank() == 0 else itertools.repeat(None)
    for of_each_share in parcels:
        given, is_last, error = scatter_objects(of_each_share and [p for p in of_each_share for _ in range(copies)])
        if error:
            raise DataError(
                f"rank 0, which reads the data for all ranks (dispatch_batches), failed: {error}",
                hint="see the error on rank 0",
            )
        yield from given
        if is_last:
            return


def _parcels(
    read: Callable[[], Iterator[Given]], last_real: Callable[[], Real | None], shares: int
) -> Iterator[list[_Parcel]]:
    try:
        batches = read()
        following = list(itertools.islice(batches, shares))
        is_last = False
        while not is_last:
            current, following = following, list(itertools.islice(batches, shares))
            is_last = not following
            real = last_real() if is_last else None
            current = [(batch, real or known) for batch, known in current]
            yield [(current[share : share + 1], is_last, "") for share in range(shares)]
    except Exception as error:
        scatter_objects([([], True, f"{type(error).__name__}: {error}")] * world_size())
        raise
