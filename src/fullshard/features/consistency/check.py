"""Compare the ranks at regular intervals. Each rank contributes a few numbers to one small all-reduce.

A digest of the weights shows whether replicas hold the same values (`replicas`). The time per step that each rank
spends on computing, waiting and other work shows which rank is a straggler (`pace`).
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import torch_private
from fullshard.comm.device import has_values
from fullshard.core.errors import ConfigError, plural, tell
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.process import this_process
from fullshard.engine.bucket import Bucket
from fullshard.engine.extension import Extension
from fullshard.engine.lookup import require_unit
from fullshard.engine.schedule import Schedule
from fullshard.features.consistency.pace import Pace, RankPace, slow_ranks, usual
from fullshard.features.consistency.replicas import digest, find_difference

OnDifference = Literal["raise", "off"]
_NANO = 1_000_000_000
_SLOW = {
    "computing": "; it computes {computing:.3g} s of a step (forward and backward, without waiting), {median:.3g} s "
    "{on}; it waits {waiting:.3g} s for others and spends {elsewhere:.3g} s on anything else (data, optimizer, saves, "
    "logs)",
    "elsewhere": ", in its data or own code; it spends {elsewhere:.3g} s of a step outside forward and backward (data, "
    "optimizer, saves, logs), {median:.3g} s {on}; it waits {waiting:.3g} s for others and computes {computing:.3g} s",
}
"""The end of the report on a slow rank, by the part of the step that is long."""


class ConsistencyCheck(Extension):
    """Compares the ranks that train a model, every few steps.

    Attributes:
        every: number of steps between two comparisons; 0 disables them.
        policy: `raise` raises an error on all ranks if weights differ; `off` disables the comparison of weights.
        paces: the measurements of the last comparison, by rank in the mesh; empty before the first comparison.
    """

    settings: ClassVar[Mapping[str, Any]] = {"every": 100, "policy": "raise"}
    every: int
    policy: OnDifference

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self._mesh, self._has_run, self._done_at = model.mesh, False, 0
        self.paces, self._pace, self._slow = list[RankPace](), Pace(), set[int]()

    def step_begins(self) -> None:
        """Start the measurement of a new step."""
        self._pace.begin_step(is_wanted=self.every > 0)

    def forward_begins(self) -> None:
        """Start counting time as computing time, unless gradients are disabled."""
        self._has_run = True
        if torch.is_grad_enabled():
            self._pace.resume()

    def forward_ends(self, *, failed: bool) -> None:
        """Stop counting time as computing time."""
        self._pace.pause()

    def backward_begins(self) -> None:
        """Start counting time as computing time."""
        self._pace.resume()

    def backward_ends(self, used: Mapping[Bucket, bytearray]) -> None:
        """Stop counting time as computing time. If a comparison is due, compare the ranks, which is a collective."""
        self._pace.pause()
        steps = self.model.steps
        if used and self.every and steps and steps % self.every == 0 and steps != self._done_at:
            self._done_at = steps
            self.run()

    def before_save(self) -> None:
        """Compare the replicas before the model is saved. This is a collective."""
        if self._has_run and self.every and self._are_compared and self._can_compare:
            with self.model.units[-1].waiting("comparing replicas"):
                self._check(self._table(digest(self.model))[..., 0])

    @property
    def _can_compare(self) -> bool:
        return self._mesh.control_group is not None and has_values(self._mesh.device)

    @property
    def _are_compared(self) -> bool:
        return self._mesh.replicate_size > 1 and self.policy != "off"

    def run(self) -> None:
        """Compare the ranks now: report stragglers and check that the replicas are equal. This is a collective."""
        seconds = [round(part * _NANO) for part in self._pace.take()]
        if self._can_compare:
            with self.model.units[-1].waiting("comparing ranks"):
                own = digest(self.model) if self._are_compared else 0
                table = self._table(own, self._mesh.rank, *seconds)
                self._tell_pace(table[..., 1:].reshape(-1, 4))
                self._check(table[..., 0])

    def _table(self, *numbers: int) -> torch.Tensor:
        """Gather `numbers` from every rank as (replicate size, shard size, len(numbers)). This is a collective."""
        mesh = self._mesh
        table = torch.zeros(mesh.replicate_size, mesh.shard_size, len(numbers), dtype=torch.int64)
        table[mesh.replicate_rank, mesh.shard_rank] = torch.tensor(numbers)
        with torch_private.uncounted():
            dist.all_reduce(table, group=mesh.control_group)
        return table

    def _check(self, digests: torch.Tensor) -> None:
        if bool((digests != digests[0]).any()):
            find_difference(self.model)

    def _tell_pace(self, table: torch.Tensor) -> None:
        """Report the ranks that have become slow since the last comparison."""
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
        for pace, part in ((pace, slow[pace]) for pace in news):
            whose, on = "the median", f"in the median of {len(self.paces)} ranks"
            if len(self.paces) == 2:
                [other] = [other.rank for other in self.paces if other is not pace]
                whose, on = f"rank {other}'s", f"on rank {other}"
            timed = part if part == "computing" else "own"
            speed = usual(self.paces, timed) / getattr(pace, timed)
            details = asdict(pace) | {"median": usual(self.paces, part), "part": part}
            text = (
                f"rank {pace.rank} ({where[pace.rank]}) is slow: {speed:.2f} of {whose} speed over the last "
                f"{plural(self.every, 'step')}{_SLOW[part].format(on=on, **details)}"
            )
            tell(f"fullshard: {text}")
            _, pid, _, host = where[pace.rank].split()
            JOURNAL.note(Happening.SLOW, text, **details, pid=int(pid), host=host)


class ConsistencyMethods:
    """Methods of `FSDPModule` that configure the comparison of ranks and return its measurements."""

    def set_replica_check(self, policy: str, *, every: int | None = None) -> None:
        """Choose what to do if replicas (NO_SHARD, HYBRID_SHARD) of the model have different weights.

        The ranks compare the replicas before every save, and at the end of a backward once every `every` steps. The
        setting applies to the whole model.

        Args:
            policy: with `raise`, all ranks raise a `ReplicaError` that names the rank, host and parameter. With `off`,
                the replicas are not compared.
            every: number of steps between two comparisons and between two straggler reports, 100 by default. 0 disables
                both, including the comparison before a save.

        Raises:
            ConfigError: The policy is unknown, or the number is negative.
        """
        check = self._consistency_check()
        every = check.every if every is None else every
        if policy not in get_args(OnDifference):
            raise ConfigError(f"{policy!r} is not a valid policy for replicas that differ", hint="use raise or off")
        if every < 0:
            raise ConfigError(
                f"the interval between comparisons of ranks is {every} steps, expected 0 or more",
                hint="use 0 to disable comparisons",
            )
        check.policy, check.every = policy, every  # type: ignore[assignment]

    def rank_paces(self) -> list[RankPace]:
        """Return how many seconds per step each rank spent computing and waiting, as of the last comparison.

        The list is empty before the first comparison. This is not a collective.
        """
        return list(self._consistency_check().paces)

    def _consistency_check(self) -> ConsistencyCheck:
        return ConsistencyCheck.of(require_unit(cast("nn.Module", self)).schedule)
