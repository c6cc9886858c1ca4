"""In which orders this process reads its data: noted by loaders, compared where ranks meet anyway.

A rank that has read a loader alone is an epoch ahead: it reads some samples that another has, and others nobody.
"""

from __future__ import annotations

from collections.abc import Iterable

from fullshard.core.errors import DataError

Orders = dict[tuple[int, int | None], int]
"""The order's number of each loader, which is known by its own number, the same on all ranks, and by its length: ranks
that each read data of their own may well be in different epochs of it."""

ORDERS: Orders = {}
"""Of this process, for the loaders that are being iterated."""


def check_orders(orders: Iterable[tuple[int, int | None]]) -> None:
    """Compare the order in which each rank reads one loader; None: it does not read it, and has nothing to say.

    Raises:
        DataError: they do.
    """
    known = [(rank, order) for rank, order in orders if order is not None]
    for rank, order in known:
        first, expected = known[0]
        if order != expected:
            raise DataError(
                f"ranks read a data loader in different orders: rank {first} in that of epoch {expected}, rank {rank} "
                f"in that of epoch {order}; so some samples are read twice, and others never",
                hint="a rank has read it alone before: read it on every rank, or call loader.set_epoch(number) on all",
            )
