"""The features outside the kernel. Each is one module or folder, and importing this package registers all of them.

The kernel calls them in the order of registration. This package also exports the public names of the engine.
"""

# isort: off
from fullshard.engine import *  # noqa: F403 -- first: it says when torch is too old
# isort: on

from fullshard import engine
from fullshard.comm import base
from fullshard.comm.select import register_backend
from fullshard.config.switches import check_switches
from fullshard.engine import module
from fullshard.engine.extension import Extension, at_first_sharding, register
from fullshard.engine.kinds import ParameterKind, register_kinds
from fullshard.engine.step.adapters import register_adapters
from fullshard.engine.storage import register_storage
from fullshard.features import dtensor_ops  # noqa: F401 -- what torch computes with a ShardedTensor
from fullshard.features.accumulation import AccumulationMethods, no_sync, with_sync
from fullshard.features.auto_reshard import keep_head, keep_unsharded
from fullshard.features.consistency import ConsistencyCheck, ConsistencyMethods
from fullshard.features.extended import Composed, Extended, LateProtocol
from fullshard.features.kept_views import KeptViews
from fullshard.features.late_registration import LateRegistration
from fullshard.features.local_optimizers import Bitsandbytes, Torchao
from fullshard.features.matrices import MatrixAdapter
from fullshard.features.meta_device import ConversionMethods, MetaDevice, meta_parameters, shard_model
from fullshard.features.nonfinite import NonFiniteGuard, NonFiniteMethods
from fullshard.features.offload import (
    ActivationOffload,
    CPUOffloadPolicy,
    OffloadPolicy,
    Parking,
    park,
    store_on_host,
    unpark,
)
from fullshard.features.optimizer_checks import OptimizerCheck
from fullshard.features.optimizer_state import install as keep_intervals_in_state_dicts
from fullshard.features.optimizer_state import repoint
from fullshard.features.packed_messages import PACKINGS
from fullshard.features.preemption import StopTogether
from fullshard.features.quantized_weights import QuantizedWeight
from fullshard.features.shared_memory import share_memory
from fullshard.features.state_dicts import StateDicts
from fullshard.features.steps_in_backward.stepper import StepsInBackward
from fullshard.features.submodule_entry import SubmoduleEntry
from fullshard.features.summary import Sharding, describe
from fullshard.features.tensor_parallel import TensorParallel
from fullshard.features.torch_compat import (
    DataParallelMeshDims,
    TorchCompat,
    TorchMethods,
    check_data_parallel,
    register_fsdp_forward_method,
    share_comm_ctx,
    state_of,
)
from fullshard.features.torch_tools import clip_grad_norm_, clip_grad_value_, install
from fullshard.features.watchdog import DesyncDetection
from fullshard.features.whole_parameters import unsharded

__all__ = [
    *engine.__all__,
    "FEATURES",
    "KINDS",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "OffloadPolicy",
    "Sharding",
    "clip_grad_norm_",
    "clip_grad_value_",
    "describe",
    "keep_head",
    "keep_unsharded",
    "meta_parameters",
    "no_sync",
    "park",
    "register_fsdp_forward_method",
    "repoint",
    "shard_model",
    "share_comm_ctx",
    "unpark",
    "unsharded",
    "with_sync",
]

FEATURES: tuple[type[Extension], ...] = (
    *(
        MetaDevice,
        TorchCompat,
        LateRegistration,
        LateProtocol,
        SubmoduleEntry,
        ActivationOffload,
        Parking,
        StopTogether,
    ),
    *(DesyncDetection, ConsistencyCheck, StepsInBackward, OptimizerCheck, NonFiniteGuard, KeptViews, StateDicts),
)
KINDS: tuple[ParameterKind, ...] = (TensorParallel(), QuantizedWeight(), Composed(), Extended())


class ShardedModule(AccumulationMethods, ConsistencyMethods, ConversionMethods, NonFiniteMethods, TorchMethods):
    """Mixin with the public methods of every sharded module, from torch's `fully_shard` and from the features."""


FSDPModule = ShardedModule
register(*FEATURES)
register_backend(share_memory)
register_kinds(*KINDS)
register_adapters(Bitsandbytes(), Torchao(), MatrixAdapter())
register_storage(store_on_host)
base.PACKINGS.update(PACKINGS)
at_first_sharding(check_switches)
at_first_sharding(install)
at_first_sharding(keep_intervals_in_state_dicts)
at_first_sharding(check_data_parallel)
module.use_module_class(FSDPModule)
engine.fully_shard.state = state_of  # type: ignore[attr-defined]
