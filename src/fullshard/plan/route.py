"""The way in which a group's ranks communicate, for the planner and for collectives in shared memory."""

from __future__ import annotations

from enum import Enum


class Route(Enum):
    """One way in which ranks communicate. Its value is the name that is displayed."""

    NONE = "none"
    NATIVE = "the devices' own links"
    SHARED_MEMORY = "shared memory"
    POINT_TO_POINT = "point to point"

    @staticmethod
    def of(ranks: int, *, on_cpu: bool, per_host: int | None) -> Route:
        """Return the route of a group.

        Args:
            ranks: number of ranks in the group.
            on_cpu: whether the tensors are in host memory.
            per_host: number of the group's ranks on one host, or None if they cannot share memory.
        """
        if ranks == 1:
            return Route.NONE
        if not on_cpu:
            return Route.NATIVE
        return Route.SHARED_MEMORY if per_host is not None and per_host >= ranks else Route.POINT_TO_POINT

    @property
    def shares_memory(self) -> bool:
        """Return whether unsharded parameters are in a permanent buffer of memory that all ranks share."""
        return self is Route.SHARED_MEMORY

    @property
    def widens(self) -> bool:
        """Return whether a reduction casts its own input, so that gradients are collected in their original dtype."""
        return self is Route.SHARED_MEMORY

    @property
    def receives_apart(self) -> bool:
        """Return whether the intervals to be summed are received in separate buffers."""
        return self is Route.POINT_TO_POINT
