"""Every so many steps ranks compare notes, by three numbers of each in one message.

A digest of the weights tells whether replicas hold the same (`engine.replicas`), the seconds that a rank computes and
waits in a step which of them is slow (`core.pace`).
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.device import has_values
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import ConfigError
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.pace import Pace, RankPace, median_computing, slow_ranks
from fullshard.core.place import PLACE, this_process
from fullshard.engine.replicas import Replicas

_NANO = 1_000_000_000


class Checkup:
    """Of one model.

    Args:
        mesh: the ranks that share it.
        replicas: what compares their weights.

    Attributes:
        every: steps from one to the next; 0: there is none.
        paces: of the last one, by rank of the mesh; empty before it.
    """

    def __init__(self, mesh: Mesh, replicas: Replicas) -> None:
        self._mesh, self.replicas = mesh, replicas
        self.every, self.paces = 100, list[RankPace]()
        self._pace, self._done_at = Pace(), 0

    def set_every(self, steps: int) -> None:
        """Set `every`. Raises `ConfigError` if it is negative."""
        if steps < 0:
            raise ConfigError(f"ranks are to be compared every {steps} steps", hint="use 0 for never, or more")
        self.every = steps

    def begin_step(self) -> None:
        """A step begins after another."""
        if self.every:
            self._pace.begin_step(time.monotonic(), PLACE.waited)

    def is_due(self, steps: int) -> bool:
        """Whether it is time for one, at the end of the first backward after so many steps."""
        return bool(self.every and steps and steps % self.every == 0 and steps != self._done_at)

    def run(self, steps: int) -> None:
        """Compare, say who is slow, and see to replicas. A collective.

        Raises:
            ReplicaError: they differ, and are not to be healed or cannot be.
        """
        mesh, self._done_at = self._mesh, steps
        if mesh.control_group is None or not has_values(mesh.device):
            return
        seconds = [round(part * _NANO) for part in self._pace.take()]
        table = self._table(self._digest(), mesh.rank, *seconds)
        self._tell_pace(table[..., 1:].reshape(-1, 3))
        self._settle(table[..., 0], steps)

    def compare_replicas(self, steps: int) -> None:
        """Only that, and now. A collective.

        Raises:
            ReplicaError: as `run`.
        """
        mesh = self._mesh
        if mesh.control_group is None or not self.replicas.has_any or not has_values(mesh.device):
            return
        self._settle(self._table(self._digest())[..., 0], steps)

    def _table(self, *numbers: int) -> torch.Tensor:
        """What each rank gives, shape (replicate size, shard size, numbers). A collective."""
        mesh = self._mesh
        table = torch.zeros(mesh.replicate_size, mesh.shard_size, len(numbers), dtype=torch.int64)
        table[mesh.replicate_rank, mesh.shard_rank] = torch.tensor(numbers)
        with torch_private.uncounted():
            dist.all_reduce(table, group=mesh.control_group)
        return table

    def _settle(self, digests: torch.Tensor, steps: int) -> None:
        if bool((digests != digests[0]).any()):
            self.replicas.settle(steps + 1)

    def _digest(self) -> int:
        is_wanted = self.replicas.has_any and self.replicas.policy != "off"
        return self.replicas.digest() if is_wanted else 0

    def _tell_pace(self, table: torch.Tensor) -> None:
        self.paces = [RankPace(rank, a / _NANO, b / _NANO) for rank, a, b in sorted(table.tolist())]
        slow = slow_ranks(self.paces)
        if not slow:
            return
        # A collective in an `if`: all ranks have the same table, so the same are slow on each.
        names = self._mesh.all_gather_object(this_process())
        if not self._mesh.is_first:
            return
        where = dict(zip(self._mesh.ranks, names, strict=True))
        median = median_computing(self.paces)
        for pace in slow:
            text = (
                f"rank {pace.rank} ({where[pace.rank]}) is slow: {median / pace.computing:.2f} of the median speed "
                f"over the last {self.every} steps; it computes {pace.computing:.3g} s of a step, the median "
                f"{median:.3g} s, and waits {pace.waiting:.3g} s for others"
            )
            sys.stderr.write(f"fullshard: {text}\n")
            details = {"computing": pace.computing, "waiting": pace.waiting, "median": median}
            JOURNAL.note(Happening.SLOW, text, rank=pace.rank, **details)
        sys.stderr.flush()
