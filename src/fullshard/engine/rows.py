"""Parameters of which each rank has rows, as under torch's `fully_shard`: where `shard_placement_fn` gives `Shard(0)`.

Such a parameter is alone in its bucket, which is cut between rows: into W intervals of ceil(n / W) rows each, the last
ones shorter or empty. So nothing else differs from any bucket, and nothing is copied on the way; but there is a gather
and a reduction for each parameter, not for each unit. Within the engine a rank's rows are flat, as any interval is.
"""

from __future__ import annotations

from fullshard.engine.bucket import Bucket
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.sharded_tensor import RowTensor


class RowParameter(ShardedParameter, RowTensor):
    """A sharded parameter that shows torch this rank's rows."""


class RowBucket(Bucket):
    """A bucket of one."""

    parameter_type = RowParameter
