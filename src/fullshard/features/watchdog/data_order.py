"""The orders in which this process reads its data: loaders note them, and ranks compare them when they meet.

A rank that has read a loader alone is an epoch ahead: then ranks read some samples twice, and others never.
"""

from __future__ import annotations

from collections.abc import Iterable

from fullshard.core.errors import DataError

Orders = dict[tuple[int, int | None], int]
"""The order's number of each loader, which is known by its own number, the same on all ranks, and by its length: ranks
that each read data of their own may well be in different epochs of it."""

ORDERS: Orders = {}
"""The orders of this process, for the loaders that are being iterated."""


def difference(orders: Iterable[tuple[int, int | None]]) -> str | None:
    """Say how a rank's order of reading one loader differs from that of the ranks before it; None: they agree.

    `orders` has ranks, and the order's number of each; None for one that does not read it.
    """
    known = [(rank, order) for rank, order in orders if order is not None]
    for rank, order in known:
        first, expected = known[0]
        if order != expected:
            return (
                f"ranks read a data loader in different orders: rank {first} in that of epoch {expected}, rank {rank} "
                f"in that of epoch {order}; so some samples are read twice, and others never"
            )
    return None


HINT = "a rank has read it alone before: read it on every rank, or call loader.set_epoch(number) on all"
"""The remedy for an unintended difference."""


def check_orders(orders: Iterable[int | None]) -> None:
    """Compare the orders in which ranks 0, 1, ... read one loader."""
    if (found := difference(enumerate(orders))) is not None:
        raise DataError(found, hint=HINT)
