"""Detection of stragglers, the ranks that are slower than others, from times that each rank measures."""

import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fullshard.comm.waiting import PROGRESS

SLOW, SLOW_NO_MORE = 0.7, 0.85
"""A rank is reported as slow if its speed falls below the first fraction of the median speed. It is not reported again
until its speed has exceeded the second fraction."""
LEAST_SECONDS = 0.005
"""A slow rank must also take this many seconds longer per step than the median. A smaller difference can mean
that its host was briefly busy with other work."""


@dataclass(frozen=True, slots=True)
class RankPace:
    """How one rank spends its time in a step, as medians over several steps.

    Attributes:
        computing: seconds spent in forward and backward, excluding the time spent waiting for other ranks.
        waiting: seconds spent waiting for other ranks.
        elsewhere: all other seconds, such as data loading, the loss, the optimizer, saves, logs and the script's own
            code.
    """

    rank: int
    computing: float
    waiting: float
    elsewhere: float = 0.0

    @property
    def own(self) -> float:
        """Return the seconds in which the rank did not wait for others."""
        return self.computing + self.elsewhere


def usual(paces: Sequence[RankPace], part: str) -> float:
    """Return the median of a part of the step in seconds. For an even number of ranks, use the smaller middle one."""
    return float(statistics.median_low(getattr(pace, part) for pace in paces))


def slow_ranks(paces: Sequence[RankPace], before: Collection[int] = ()) -> dict[RankPace, str]:
    """Return the slow ranks, slowest first, each with the part of the step, `computing` or `elsewhere`, that is long.

    `SLOW_NO_MORE` applies to ranks in `before`, which were slow already. The first rank may save and log elsewhere.
    """
    found, own = dict[RankPace, str](), usual(paces, "own")
    computing, elsewhere = usual(paces, "computing"), usual(paces, "elsewhere")
    for pace in sorted(paces, key=lambda pace: -pace.own):
        limit, more = SLOW_NO_MORE if pace.rank in before else SLOW, pace.computing - computing
        if pace is not paces[0] and pace.own * limit > own and pace.elsewhere - elsewhere > max(more, LEAST_SECONDS):
            found[pace] = "elsewhere"
        elif pace.computing * limit > computing and more > LEAST_SECONDS:
            found[pace] = "computing"
    return found


class Pace:
    """Records how long this process's steps take, from the second step on, until `take` is called."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float, float]] = []
        self._began: tuple[float, float] | None = None
        self._resumed: float | None = None
        self._computing = 0.0

    def begin_step(self, *, is_wanted: bool) -> None:
        """End the current step and start a new one. If `is_wanted`, record the step that just ended."""
        now, waited = time.monotonic(), PROGRESS.waited
        if self._began is not None and is_wanted:
            begin, before = self._began
            waiting = waited - before
            self._steps.append((self._computing, waiting, now - begin - waiting - self._computing))
        self._began, self._computing = (now, waited), 0.0

    def resume(self) -> None:
        """Start timing a forward or backward pass."""
        self._resumed = time.monotonic() - PROGRESS.waited

    def pause(self) -> None:
        """Stop timing the forward or backward pass, if one is being timed."""
        if self._resumed is not None:
            self._computing += time.monotonic() - PROGRESS.waited - self._resumed
            self._resumed = None

    def take(self) -> list[float]:
        """Return the median seconds of computing, waiting and other work per recorded step, and discard these steps."""
        steps, self._steps = self._steps, []
        return [statistics.median(part) for part in zip(*steps, strict=True)] or [0.0, 0.0, 0.0]
