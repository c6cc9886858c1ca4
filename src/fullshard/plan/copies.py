"""The cost of copies of the state in host memory, and how often they are cheap enough.

There are copies that outlive a kill (`checkpoint/copies`), and the copy that a background save writes from
(`checkpoint/staging`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullshard.config.schema import COPIES_COST
from fullshard.plan.hardware import Cluster
from fullshard.plan.host import page_locked_nbytes
from fullshard.plan.work import PCIE


@dataclass(frozen=True, slots=True)
class PlannedCopies:
    """Copies of the whole state: one per host that makes them, and one more on the next host.

    Attributes:
        nbytes: most host memory on a host, while one copy is made beside the one before.
        seconds: training time lost to one copy.
        every: steps from one to the next, so that they cost at most `COPIES_COST`.
        aside: the part of `nbytes` that is copied out of the ranks and not yet kept; background saves keep it from one
            to the next.
    """

    nbytes: int
    seconds: float
    every: int
    aside: int

    @property
    def max_lost_steps(self) -> int:
        """Return the steps that a kill undoes at most: one copy may be under way, and the one before counts."""
        return 2 * self.every


def copies_of(
    checkpoint: int, step_seconds: float, cluster: Cluster, *, writers: int, is_on_host: bool
) -> PlannedCopies:
    """Predict the copies of a job.

    On a CPU all of it is work for the processors that compute: a rank's share is copied aside (read and written),
    written to new memory, and read for its checksum; data from another host is written to new memory, too. On
    accelerators training loses only the time of the copy from the device. Data for another host is counted in full,
    because it shares the network with training.

    Args:
        checkpoint: bytes of the state, all ranks together.
        step_seconds: of a step.
        cluster: where it runs.
        writers: ranks that it comes from, the first ones: one of several with the same state.
        is_on_host: whether trained weights and the optimizer's state are there anyway, so that no device copies them.
    """
    share, device = checkpoint / writers, cluster.device
    sent = share if cluster.hosts > 1 else 0.0
    seconds = sent / (device.network * device.link_efficiency)
    if device.is_cpu:
        seconds += 5 * share / device.memory_speed
        seconds += (share + sent) / device.fresh_bandwidth if device.fresh_bandwidth else 0.0
    else:
        seconds += share / PCIE
    on_host = (share + (sent if writers > cluster.per_host else 0.0)) * min(writers, cluster.per_host)
    block = round(share) if device.is_cpu or is_on_host else page_locked_nbytes(round(share))
    aside = block * min(writers, cluster.per_host)
    every = max(1, math.ceil(seconds / (COPIES_COST * step_seconds)))
    return PlannedCopies(round(2 * on_host) + aside, seconds, every, aside)
