"""What scripts read from `accelerator.state`, and the same facts told to Accelerate's own helpers.

`accelerate.utils.gather`, `get_logger`, `set_seed(device_specific=True)`, `PartialState()` and more read one state per
process, in `accelerate.state`. Without being told they would see one process, on every rank, wherever Accelerate finds
no accelerator; so they are told, as soon as a script imports them.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch.distributed as dist

from fullshard.api.options import DistributedType
from fullshard.api.processes import Processes
from fullshard.api.state import ProcessState
from fullshard.core.imports import after_import

_TOLD: list[AcceleratorState] = []
"""The state of the Accelerator that was started last, for when Accelerate is imported after it."""


class AcceleratorState(Processes):
    """This process's place in the job and how models are trained, under Accelerate's names.

    Args:
        process: this process's place in the job.
        mixed_precision: `no`, `fp32`, `bf16` or `fp16`.
        fsdp_plugin: how models are sharded.
        dynamo_backend: what units are compiled with; `no` if they are not.
    """

    deepspeed_plugin = deepspeed_plugins = megatron_lm_plugin = torch_tp_plugin = None
    parallelism_config = device_mesh = None
    initialized = True
    is_fsdp2 = True  # a model is sharded in place, and an optimizer is re-pointed to it

    def __init__(
        self, process: ProcessState, *, mixed_precision: str, fsdp_plugin: Any, dynamo_backend: str = "no"
    ) -> None:
        super().__init__(process)
        self.mixed_precision = mixed_precision
        self.fsdp_plugin = fsdp_plugin
        self.dynamo_backend = dynamo_backend
        self.distributed_type = DistributedType.FSDP
        self.debug = _flag("ACCELERATE_DEBUG_MODE")

    @property
    def backend(self) -> str | None:
        """The backend of the process group; None without one."""
        return dist.get_backend() if dist.is_initialized() else None

    @property
    def use_distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.num_processes > 1

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave a process group; None: the default one."""
        if dist.is_initialized():
            dist.destroy_process_group(group)

    def tell_accelerate(self) -> None:
        """Have Accelerate's helpers see this state, whether Accelerate is imported already, later or never."""
        is_awaited = bool(_TOLD)
        _TOLD[:] = [self]
        module = sys.modules.get("accelerate.state")
        if module is not None:
            _tell(module)
        elif not is_awaited:
            after_import("accelerate.state", _tell)


def _tell(module: ModuleType) -> None:
    """Write the state where the instances of Accelerate's two classes, made or to be made, all look."""
    state = _TOLD[0]
    # Without a process group its collectives must do nothing.
    kind = "FSDP" if dist.is_initialized() else "NO"
    partial = {
        "_cpu": state.device.type == "cpu",
        "backend": state.backend,
        "device": state.device,
        "debug": state.debug,
        "distributed_type": module.DistributedType[kind],
        "num_processes": state.num_processes,
        "process_index": state.process_index,
        "local_process_index": state.local_process_index,
        "fork_launched": _flag("FORK_LAUNCHED"),
    }
    whole = partial | {
        "deepspeed_plugins": None,
        "torch_tp_plugin": None,
        "parallelism_config": None,
        "device_mesh": None,
        "dynamo_plugin": _dynamo_plugin(state.dynamo_backend),
        "fsdp_plugin": state.fsdp_plugin,
        "_mixed_precision": "no" if state.mixed_precision == "fp32" else state.mixed_precision,
    }
    for cls, values in ((module.PartialState, partial), (module.AcceleratorState, whole)):
        cls._shared_state.clear()
        cls._shared_state.update(values)


def _dynamo_plugin(backend: str) -> Any:
    from accelerate.utils.dataclasses import DynamoBackend, TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="no")
    plugin.backend = DynamoBackend.__members__.get(backend.upper(), backend)  # torch takes backends it does not list
    return plugin


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")
