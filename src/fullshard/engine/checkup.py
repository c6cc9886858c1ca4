"""Compare the ranks every few steps, by a few numbers of each in one message.

A digest of the weights tells whether replicas hold the same values (`engine.replicas`). The seconds that a rank spends
in a step computing, waiting and on other work tell which rank is a straggler (`core.pace`).
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
from fullshard.core.pace import Pace, RankPace, slow_ranks, usual_computing
from fullshard.core.place import PLACE, this_process
from fullshard.engine.replicas import Replicas

_NANO = 1_000_000_000


class Checkup:
    """The periodic comparison of the ranks of one model.

    Args:
        mesh: the ranks that share the model.
        replicas: compares the weights of the ranks.

    Attributes:
        every: steps between two checkups; 0: never.
        paces: paces of the last checkup, by rank of the mesh; empty before the first one.
    """

    def __init__(self, mesh: Mesh, replicas: Replicas) -> None:
        self._mesh, self.replicas = mesh, replicas
        self.every, self.paces = 100, list[RankPace]()
        self._pace, self._done_at, self._slow = Pace(), 0, set[int]()

    def set_every(self, steps: int) -> None:
        """Set `every`. Raises `ConfigError` if it is negative."""
        if steps < 0:
            raise ConfigError(f"ranks are to be compared every {steps} steps", hint="use 0 for never, or more")
        self.every = steps

    def begin_step(self) -> None:
        """Learn that a new step begins."""
        if self.every:
            self._pace.begin_step(time.monotonic(), PLACE.waited)

    def resume(self) -> None:
        """Learn that a forward or backward begins."""
        if self.every:
            self._pace.resume(time.monotonic(), PLACE.waited)

    def pause(self) -> None:
        """Learn that the forward or backward is over."""
        if self.every:
            self._pace.pause(time.monotonic(), PLACE.waited)

    def is_due(self, steps: int) -> bool:
        """Return whether a checkup is due, at the end of the first backward after this many steps."""
        return bool(self.every and steps and steps % self.every == 0 and steps != self._done_at)

    def run(self, steps: int) -> None:
        """Compare the ranks, report stragglers, and check or heal replicas. A collective.

        Raises:
            ReplicaError: replicas differ, and healing them is not requested or not possible.
        """
        mesh, self._done_at = self._mesh, steps
        if mesh.control_group is None or not has_values(mesh.device):
            return
        seconds = [round(part * _NANO) for part in self._pace.take()]
        table = self._table(self._digest(), mesh.rank, *seconds)
        self._tell_pace(table[..., 1:].reshape(-1, 4))
        self._settle(table[..., 0], steps)

    def compare_replicas(self, steps: int) -> None:
        """Compare only the replicas, now. A collective.

        Raises:
            ReplicaError: as `run`.
        """
        mesh = self._mesh
        if mesh.control_group is None or not self.replicas.has_any or not has_values(mesh.device):
            return
        self._settle(self._table(self._digest())[..., 0], steps)

    def _table(self, *numbers: int) -> torch.Tensor:
        """Return the numbers of every rank, shape (replicate size, shard size, numbers). A collective."""
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
        """Report the ranks that are slow now and were not in the last report."""
        self.paces = [RankPace(rank, *(part / _NANO for part in parts)) for rank, *parts in sorted(table.tolist())]
        slow = slow_ranks(self.paces, self._slow)
        news = [pace for pace in slow if pace.rank not in self._slow]
        self._slow = {pace.rank for pace in slow}
        if not news:
            return
        # A collective in an `if` is safe: all ranks have the same table, so they find the same slow ranks.
        names = self._mesh.all_gather_object(this_process())
        if not self._mesh.is_first:
            return
        where = dict(zip(self._mesh.ranks, names, strict=True))
        usual, count = usual_computing(self.paces), len(self.paces)
        for pace in news:
            whose, on = "the median", f"in the median of {count} ranks"
            if count == 2:
                [other] = [other.rank for other in self.paces if other is not pace]
                whose, on = f"rank {other}'s", f"on rank {other}"
            name, speed = (
                f"rank {pace.rank} ({where[pace.rank]})",
                f"{usual / pace.computing:.2f} of {whose} speed over the last {self.every} steps",
            )
            text = (
                f"{name} is slow: {speed}; it computes {pace.computing:.3g} s of a step (forward and backward, without "
                f"waiting), {usual:.3g} s {on}; it waits {pace.waiting:.3g} s for others and spends "
                f"{pace.elsewhere:.3g} s on anything else (data, optimizer, saves, logs)"
            )
            sys.stderr.write(f"fullshard: {text}\n")
            details = {"computing": pace.computing, "waiting": pace.waiting, "elsewhere": pace.elsewhere}
            JOURNAL.note(Happening.SLOW, text, rank=pace.rank, **details, median=usual)
        sys.stderr.flush()
