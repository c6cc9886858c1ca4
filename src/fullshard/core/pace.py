"""Which ranks compute slower than others, from seconds that each of them has measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

SLOW = 0.7
"""A rank whose speed is below this part of the median is worth a line."""
LEAST_SECONDS = 0.005
"""What it computes longer in each step; less is a host that did something else for a moment."""


@dataclass(frozen=True, slots=True)
class RankPace:
    """How one rank spends a step, in the median of several.

    Attributes:
        rank: which one.
        computing: seconds in which it did not wait for another rank; data, saves and the script's own work included.
        waiting: seconds in which it did.
    """

    rank: int
    computing: float
    waiting: float


def median_computing(paces: Sequence[RankPace]) -> float:
    """Seconds; of an even number of ranks the faster one in the middle, or of two none could be slow."""
    return statistics.median_low(pace.computing for pace in paces)


def slow_ranks(paces: Sequence[RankPace]) -> list[RankPace]:
    """Those whose speed is below `SLOW` of the median, the slowest first."""
    median = median_computing(paces)
    found = [p for p in paces if p.computing * SLOW > median and p.computing - median > LEAST_SECONDS]
    return sorted(found, key=lambda pace: -pace.computing)


@dataclass(slots=True)
class Pace:
    """Of this process: what the steps since the last report have taken, the first one left out."""

    _steps: list[tuple[float, float]] = field(default_factory=list)
    _last: tuple[float, float] | None = None

    def begin_step(self, now: float, waited: float) -> None:
        """A step begins after another, this process having waited for so many seconds so far."""
        if self._last is not None:
            begin, before = self._last
            self._steps.append((now - begin - (waited - before), waited - before))
        self._last = now, waited

    def take(self) -> tuple[float, float]:
        """Seconds of computing and of waiting of a step in the median, 0 if there was none; begin anew."""
        steps, self._steps = self._steps, []
        if not steps:
            return 0.0, 0.0
        computing, waiting = zip(*steps, strict=True)
        return statistics.median(computing), statistics.median(waiting)
