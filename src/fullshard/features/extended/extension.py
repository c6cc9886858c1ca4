"""Refuse to be told after sharding how a parameter is gathered."""

from __future__ import annotations

import itertools
import operator

from fullshard.comm import torch_private
from fullshard.core.errors import LifecycleError
from fullshard.engine.extension import Extension
from fullshard.engine.parameter import ShardedParameter
from fullshard.features.extended.bucket import ExtendedBucket
from fullshard.features.extended.protocol import PRE


class LateProtocol(Extension):
    """Watch for `p._local_tensor.fsdp_pre_all_gather = ...`, which torch's engine asks for before each gather."""

    _sharded: tuple[ShardedParameter, ...] = ()

    def materialized(self) -> None:
        """Note the sharded parameters that say nothing."""
        buckets = [bucket for unit in self.model.units if unit.stand_ins is None for bucket in unit.buckets]
        plain = [bucket for bucket in buckets if not isinstance(bucket, ExtendedBucket)]
        self._sharded = tuple(parameter for bucket in plain for parameter in bucket.sharded_parameters)
        self._attributes = list(map(vars, self._sharded))

    def forward_begins(self) -> None:
        """Refuse a parameter that was told how it is to be gathered."""
        of_locals = map(vars, map(torch_private.local_of, self._sharded))  # every step asks: no loop but of those
        is_told = map(operator.contains, itertools.chain(self._attributes, of_locals), itertools.repeat(PRE))
        for parameter in itertools.compress(self._sharded * 2, is_told):
            raise LifecycleError(
                f"rank {parameter.mesh.rank}: {parameter.name} was given `{PRE}` after it was sharded: it is "
                "gathered with the others of its unit, and nobody would call it",
                hint="give the module a parameter whose class has the method before fully_shard",
            )
