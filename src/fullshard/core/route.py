"""How the ranks of a group reach one another, which `comm.select` makes collectives for and the planner counts with."""

from __future__ import annotations

from enum import Enum


class Route(Enum):
    """One way, by the name that is shown."""

    NONE = "none"
    NATIVE = "the devices' own links"
    SHARED_MEMORY = "shared memory"
    TWO_LEVELS = "shared memory and streams between hosts"
    POINT_TO_POINT = "point to point"

    @staticmethod
    def of(ranks: int, *, on_cpu: bool, per_host: int | None) -> Route:
        """That of a group.

        Args:
            ranks: how many it has.
            on_cpu: whether the tensors are in host memory.
            per_host: neighbours in the group that are on one host, on each the same number; None if there is no such
                number, or if they cannot share memory.
        """
        if ranks == 1:
            return Route.NONE
        if not on_cpu:
            return Route.NATIVE
        if per_host is None or per_host == 1:
            return Route.POINT_TO_POINT
        return Route.SHARED_MEMORY if per_host >= ranks else Route.TWO_LEVELS

    @property
    def shares_memory(self) -> bool:
        """Whether unsharded parameters are one piece of memory for all ranks, which is there all the time."""
        return self is Route.SHARED_MEMORY

    @property
    def widens(self) -> bool:
        """Whether reductions cast what they read, so that gradients are collected in the dtype they are made in."""
        return self in (Route.SHARED_MEMORY, Route.TWO_LEVELS)

    @property
    def receives_apart(self) -> bool:
        """Whether the intervals to be summed are received into buffers of their own."""
        return self in (Route.POINT_TO_POINT, Route.TWO_LEVELS)
