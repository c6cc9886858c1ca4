"""The FSDP runtime. ARCHITECTURE.md suggests an order in which to read its modules."""

# Import our own module first: it reports a torch that is too old before an import of a missing name fails.
# isort: off
from fullshard.comm.mesh import Mesh, init_mesh
# isort: on

from fullshard.core.schedule import BackwardPrefetch
from fullshard.engine.fully_shard import fully_shard
from fullshard.engine.lookup import units_of
from fullshard.engine.module import UnshardHandle
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.precision import MixedPrecisionPolicy
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.step.hooks import check_optimizer

__all__ = [
    "BackwardPrefetch",
    "Mesh",
    "MixedPrecisionPolicy",
    "ShardedParameter",
    "ShardedTensor",
    "UnshardHandle",
    "check_optimizer",
    "fully_shard",
    "init_mesh",
    "units_of",
]
