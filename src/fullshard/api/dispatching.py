"""Rank 0 reads the batches of all ranks and sends each rank its own; the others never touch the dataset.

Every rank gets the batches that it would have read itself: collated alone, so that they may differ in shape. Rank 0 is
one step ahead, because a rank must be told that a batch is its last together with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fullshard.api.collectives import rank, scatter_objects, world_size
from fullshard.api.dealing import Real
from fullshard.core.errors import DataError


@dataclass(frozen=True, slots=True)
class Parcel:
    """The message from rank 0 to one rank for one step.

    Attributes:
        batches: the batch and the real part of its round if known, in a list; empty if the rank gets none.
        is_last: nothing comes after it.
        real: the real part of the last round, with the last batch; else None.
        error: why rank 0 could not read; None: it could.
    """

    batches: list[tuple[Any, Real | None]]
    is_last: bool
    real: Real | None = None
    error: str | None = None


def dispatched(
    read: Callable[[], Iterator[tuple[Any, Real | None]]],
    last_real: Callable[[], Real | None],
    shares: int,
) -> Iterator[tuple[Any, Real | None]]:
    """Yield this rank's batches, with the real part of the round if rank 0 knows it. A collective at each.

    Args:
        read: begins to read on rank 0, the batches of one step one rank after the other; called there only.
        last_real: returns the real part of the last round, once everything was read.
        shares: number of them in a step. Where there are more ranks, as many neighbours have the same.

    Raises:
        DataError: on the other ranks, if reading fails on rank 0, which raises its own error.
    """
    copies = max(1, world_size() // shares)
    parcels = _parcels(read, last_real, shares) if rank() == 0 else itertools.repeat(None)
    for of_each_share in parcels:
        parcel_of_each = of_each_share and [parcel for parcel in of_each_share for _ in range(copies)]
        parcel = scatter_objects(parcel_of_each)
        if parcel.error is not None:
            raise DataError(
                f"rank 0, which reads for all ranks (dispatch_batches), could not: {parcel.error}",
                hint="see the error of rank 0",
            )
        for batch, real in parcel.batches:
            yield batch, real if parcel.real is None else parcel.real
        if parcel.is_last:
            return


def _parcels(
    read: Callable[[], Iterator[tuple[Any, Real | None]]], last_real: Callable[[], Real | None], shares: int
) -> Iterator[list[Parcel]]:
    try:
        batches = read()
        following = list(itertools.islice(batches, shares))
        is_last = False
        while not is_last:
            current, following = following, list(itertools.islice(batches, shares))
            is_last = not following
            real = last_real() if is_last else None
            yield [Parcel(current[share : share + 1], is_last, real) for share in range(shares)]
    except Exception as error:
        scatter_objects([Parcel([], True, error=f"{type(error).__name__}: {error}")] * world_size())
        raise
