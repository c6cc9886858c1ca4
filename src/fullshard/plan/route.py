"""How the ranks of a group communicate. Both the planner and collectives in shared memory use this."""

from __future__ import annotations

from enum import Enum


class Route(Enum):
    """One way in which ranks communicate. The value is the text that users see."""

    NONE = "none"
    NATIVE = "the devices' own links"
    SHARED_MEMORY = "shared memory"
    POINT_TO_POINT = "point to point"

    @staticmethod
    def of(ranks: int, *, on_cpu: bool, per_host: int | None) -> Route:
        """Return how `ranks` ranks communicate, of which `per_host` are on one host, or None without shared memory."""
        if ranks == 1:
            return Route.NONE
        if not on_cpu:
            return Route.NATIVE
        return Route.SHARED_MEMORY if per_host is not None and per_host >= ranks else Route.POINT_TO_POINT

    @property
    def shares_memory(self) -> bool:
        """Return whether unsharded parameters are in a permanent buffer that all ranks share."""
        return self is Route.SHARED_MEMORY

    @property
    def widens(self) -> bool:
        """Return whether the reduction casts gradients. If it does, gradients are collected in their original dtype."""
        return self is Route.SHARED_MEMORY

    @property
    def receives_apart(self) -> bool:
        """Return whether the intervals that a rank receives to sum are in separate buffers."""
        return self is Route.POINT_TO_POINT
