"""The orders in which this process reads its data. Loaders record them, and ranks compare them.

If one rank alone has read a loader before, it is an epoch ahead. The ranks then read some samples twice and others
never.
"""

from __future__ import annotations

from collections.abc import Iterable

from fullshard.core.errors import DataError

Orders = dict[tuple[int, int | None], int]
"""The number of the current order of each loader. A loader is identified by its number, which is the same on all ranks,
and its length, because ranks with separate data may legitimately be in different epochs."""

ORDERS: Orders = {}
"""The orders of this process for loaders that are being iterated."""


def difference(orders: Iterable[tuple[int, int | None]]) -> str | None:
    """Describe how a rank's order of reading one loader differs from that of earlier ranks, or return None.

    `orders` contains pairs of a rank and the number of its order, or None if the rank does not read the loader.
    """
    known = [(rank, order) for rank, order in orders if order is not None]
    for rank, order in known:
        first, expected = known[0]
        if order != expected:
            return (
                f"ranks read a data loader in different orders: rank {first} in the order of epoch {expected}, rank "
                f"{rank} in the order of epoch {order}; some samples are read twice, and others never"
            )
    return None


HINT = "read the loader on every rank, or call loader.set_epoch(number) on all ranks: one rank has read it alone"
"""The hint for an unintended difference."""


def check_orders(orders: Iterable[int | None]) -> None:
    """Raise if ranks 0, 1, ... read one loader in different orders."""
    if (found := difference(enumerate(orders))) is not None:
        raise DataError(found, hint=HINT)
