"""The orders in which this process reads its data. Data loaders record them, and ranks compare them.

If one rank has read a loader when the others did not, that rank is an epoch ahead. The ranks together then read some
samples twice and never read others.
"""

from collections.abc import Iterable

from fullshard.core.errors import DataError

Orders = dict[tuple[int, int | None], int]
"""The number of the current order of each loader. A loader is identified by its number, which is the same on all ranks,
and its length, because ranks with separate data may legitimately be in different epochs."""

ORDERS: Orders = {}
"""The orders of this process for loaders that are being iterated."""


def difference(orders: Iterable[tuple[int, int | None]]) -> str | None:
    """Return an error message if ranks read a loader in different `orders`, as (rank, number or None), else None."""
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
    """Raise `DataError` if ranks read one loader in different orders. Entry i of `orders` is the order of rank i."""
    if (found := difference(enumerate(orders))) is not None:
        raise DataError(found, hint=HINT)
