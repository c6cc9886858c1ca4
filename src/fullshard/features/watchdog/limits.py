"""Time that a rank waits for another before it gives up.

Until the end of the first step, ranks load and compile, each at its own pace. After that, two minutes without a sign of
life are long, unless steps themselves take that long.
"""

from __future__ import annotations

from fullshard.comm.mesh import TIMEOUT_SECONDS

LATER_SECONDS = 120.0
_STEPS = 3
"""A rank may be as late as this many of the slowest steps."""
_STALL_SECONDS = 30.0


def seconds_to_wait(steps: int, slowest: float) -> float:
    """Return how long a wait may take after that many steps, if the script has asked for no time-out."""
    return TIMEOUT_SECONDS if steps < 1 else min(TIMEOUT_SECONDS, max(LATER_SECONDS, _STEPS * slowest))


def stall_seconds(limit: float) -> float:
    """Return the seconds after which a wait with this limit is worth a line."""
    return min(_STALL_SECONDS, limit / 2)
