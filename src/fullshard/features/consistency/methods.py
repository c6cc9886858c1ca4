"""Methods of a sharded model that compare its replicas and its ranks."""

from __future__ import annotations

from typing import cast

from torch import nn

from fullshard.engine.lookup import require_unit
from fullshard.features.consistency.check import ConsistencyCheck
from fullshard.features.consistency.pace import RankPace


class ConsistencyMethods:
    """Methods of `FSDPModule`."""

    def set_replica_check(self, policy: str, *, every: int | None = None) -> None:
        """Choose how to treat replicas (NO_SHARD, HYBRID_SHARD) whose weights differ. For the whole model.

        The ranks compare replicas before every save, and at the end of a backward every `every` steps.

        Args:
            policy: `raise`: a `ReplicaError` on all ranks, with rank, host and parameter. `off`: do not compare.
            every: steps between two comparisons, 100 by default; stragglers are reported as often. 0:
                never, not even before a save.

        Raises:
            ConfigError: no such policy, or a negative number.
        """
        check = self._consistency_check()
        check.choose(policy, check.every if every is None else every)

    def rank_paces(self) -> list[RankPace]:
        """Return the seconds that each rank computes and waits in a step, as last compared. No collective.

        The list is empty before the first comparison.
        """
        return list(self._consistency_check().paces)

    def _consistency_check(self) -> ConsistencyCheck:
        return ConsistencyCheck.of(require_unit(cast("nn.Module", self)).schedule)
