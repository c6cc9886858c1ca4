"""The state that scripts read from `accelerator.state`, and that Accelerate's own helpers use.

`accelerate.utils.gather`, `get_logger`, `set_seed(device_specific=True)`, `PartialState()` and others read one state
per process, in `accelerate.state`. If fullshard did not fill that in, they would assume a single process on every rank
wherever Accelerate finds no accelerator.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from accelerate import state as theirs
from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin, parse_flag_from_env

from fullshard.api.forwarding import forwarded
from fullshard.api.processes import Processes
from fullshard.api.refused import ONE_ENGINE
from fullshard.api.state import ProcessState, launched_device

_TOLD: list[PartialState] = []
"""The state that was published last, in a list with at most one item."""


class PartialState(Processes):
    """Holds the process's rank and job information under Accelerate's names. The first instance joins the job.

    Args:
        cpu: compute on the CPU even if there is an accelerator. Only the first instance in a process uses this.
        timeout: how long a collective waits for the other ranks.
    """

    def __init__(self, cpu: bool = False, timeout: timedelta | None = None) -> None:
        if _TOLD:
            super().__init__(_TOLD[0].process)
        else:
            device = "cpu" if cpu else launched_device()
            seconds = None if timeout is None else timeout.total_seconds()
            super().__init__(ProcessState.start(device=device, timeout_seconds=seconds))
            self.tell_accelerate()

    __repr__, set_device = theirs.PartialState.__repr__, theirs.PartialState.set_device
    destroy_process_group, default_device = theirs.PartialState.destroy_process_group, forwarded("device")

    @property
    def debug(self) -> Any:
        """Return whether Accelerate's collectives check that ranks pass equal shapes. fullshard's always do."""
        return theirs.PartialState._shared_state.get("debug", parse_flag_from_env("ACCELERATE_DEBUG_MODE"))

    @debug.setter
    def debug(self, debug: bool) -> None:
        for state in (theirs.PartialState, theirs.AcceleratorState):
            if state._shared_state:
                state._shared_state["debug"] = debug

    @property
    def backend(self) -> str | None:
        """Return the backend of the process group, or None if there is no group."""
        return dist.get_backend() if dist.is_initialized() else None

    @property
    def fork_launched(self) -> Any:
        """Return whether a notebook launcher started this process."""
        return parse_flag_from_env("FORK_LAUNCHED")

    def tell_accelerate(self) -> dict[str, Any]:
        """Publish the state in the dict that all instances of Accelerate's `PartialState` share. Return the values."""
        _TOLD[:] = [self]
        names = ("backend", "device", "debug", "num_processes", "process_index", "local_process_index", "fork_launched")
        # Without a process group, Accelerate's collectives must do nothing.
        kind = DistributedType.FSDP if dist.is_initialized() else DistributedType.NO
        state = {name: getattr(self, name) for name in names}
        state |= {"_cpu": self.device.type == "cpu", "distributed_type": kind}
        _replace(theirs.PartialState, state)
        return state


def _replace(kind: Any, state: dict[str, Any]) -> None:
    kind._shared_state.clear()
    kind._shared_state.update(state)


class AcceleratorState(PartialState):
    """Holds the process's rank and job information and the training settings, under Accelerate's names."""

    deepspeed_plugin = deepspeed_plugins = megatron_lm_plugin = torch_tp_plugin = device_mesh = None
    _known_attrs = theirs.AcceleratorState._known_attrs
    is_fsdp2 = True  # a model is sharded in place, and an optimizer is re-pointed to it

    if not TYPE_CHECKING:  # otherwise a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            # Called only for names that do not exist.
            reason = f" ({ONE_ENGINE})" if "deepspeed" in name else ""
            raise AttributeError(f"the state of fullshard's Accelerator has no {name!r}{reason}")

    def __init__(
        self,
        process: ProcessState,
        *,
        mixed_precision: str,
        fsdp_plugin: Any,
        dynamo_backend: str = "no",
        parallelism_config: Any = None,
    ) -> None:
        Processes.__init__(self, process)
        self.mixed_precision = mixed_precision
        self.fsdp_plugin = fsdp_plugin
        self.parallelism_config = parallelism_config
        self.dynamo_plugin = TorchDynamoPlugin(backend="no")
        # Torch accepts backends that Accelerate does not list.
        self.dynamo_plugin.backend = DynamoBackend.__members__.get(dynamo_backend.upper(), dynamo_backend)

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"

    def __reduce__(self) -> Any:
        # There is one state per process, so unpickling returns the state of the receiving process.
        return _arrived, (dict(vars(self)),)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Reset the state, as Accelerate's tests do between two Accelerators."""
        theirs.AcceleratorState._reset_state(reset_partial_state)
        _TOLD.clear()

    def check_current(self) -> None:
        """Raise Accelerate's error if the state was reset, because its helpers would then assume a single process."""
        if not _TOLD or not theirs.AcceleratorState._shared_state:
            theirs.AcceleratorState.__getattr__(self, "distributed_type")

    def tell_accelerate(self) -> dict[str, Any]:
        """Publish the state in the dicts that instances of Accelerate's two state classes share. Return the values."""
        state = super().tell_accelerate()
        state |= {"deepspeed_plugins": None, "torch_tp_plugin": None, "device_mesh": None}
        state |= {name: getattr(self, name) for name in ("parallelism_config", "dynamo_plugin", "fsdp_plugin")}
        state["_mixed_precision"] = "no" if self.mixed_precision == "fp32" else self.mixed_precision
        _replace(theirs.AcceleratorState, state)
        return state


def _arrived(fields: dict[str, Any]) -> AcceleratorState:
    """Return the state of this process for an unpickled object. If there is none, create it from `fields`."""
    if _TOLD and isinstance(_TOLD[0], AcceleratorState):
        return _TOLD[0]
    state = AcceleratorState.__new__(AcceleratorState)  # the process is in no job, such as a loader's worker
    vars(state).update(fields)
    return state
