"""The facts that scripts read from `accelerator.state`, and that Accelerate's own helpers are told.

`accelerate.utils.gather`, `get_logger`, `set_seed(device_specific=True)`, `PartialState()` and more read one state per
process, in `accelerate.state`. Without being told they would see one process, on every rank, wherever Accelerate finds
no accelerator.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import state as theirs
from accelerate.utils.dataclasses import DistributedType, DynamoBackend, TorchDynamoPlugin

from fullshard.api.forwarding import forwarded
from fullshard.api.processes import Processes
from fullshard.api.refused import ONE_ENGINE
from fullshard.api.state import GradientState, ProcessState, launched_device

_TOLD: list[PartialState] = []
"""The state that was made last."""


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")


_DEBUG = [_flag("ACCELERATE_DEBUG_MODE")]
"""One for the process, like Accelerate's."""


class PartialState(Processes):
    """Hold the process's place in the job, under Accelerate's names. The first one made joins the job.

    Args:
        cpu: compute on the CPU although there is an accelerator. Counts for the first that is made in a process.
        timeout: how long a collective waits for the other ranks.
    """

    initialized = True
    distributed_type = DistributedType.FSDP

    def __init__(self, cpu: bool = False, timeout: timedelta | None = None) -> None:
        if _TOLD:
            super().__init__(_TOLD[0].process)
        else:
            device = "cpu" if cpu else launched_device()
            seconds = None if timeout is None else timeout.total_seconds()
            super().__init__(ProcessState.start(device=device, timeout_seconds=seconds))
            self.tell_accelerate()

    @property
    def debug(self) -> bool:
        """Return whether Accelerate's collectives compare the ranks' values; fullshard's always do."""
        return _DEBUG[0]

    @debug.setter
    def debug(self, debug: bool) -> None:
        _DEBUG[0] = debug
        for state in (theirs.PartialState, theirs.AcceleratorState):
            if state._shared_state:
                state._shared_state["debug"] = debug

    @property
    def backend(self) -> str | None:
        """The backend of the process group; None without one."""
        return dist.get_backend() if dist.is_initialized() else None

    @property
    def use_distributed(self) -> bool:
        """Return whether there are several ranks."""
        return self.num_processes > 1

    default_device: torch.device = forwarded("device")
    """The device on which this rank computes."""

    @property
    def fork_launched(self) -> bool:
        """Return whether this process is one of a notebook's."""
        return _flag("FORK_LAUNCHED")

    def set_device(self) -> None:
        """Do nothing: the device was taken when the job was joined."""

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave a process group; None: the default one."""
        if dist.is_initialized():
            dist.destroy_process_group(group)

    def tell_accelerate(self) -> None:
        """Show this state to Accelerate's helpers."""
        _TOLD[:] = [self]
        _tell(self)


class AcceleratorState(PartialState):
    """Hold the process's place in the job and how models are trained, under Accelerate's names.

    Args:
        process: this process's place in the job.
        mixed_precision: `no`, `fp32`, `bf16` or `fp16`.
        fsdp_plugin: how models are sharded.
        dynamo_backend: the backend that compiles units; `no` if they are not compiled.
        parallelism_config: as given by the script.
        gradient_state: where the loop is.
    """

    deepspeed_plugin = deepspeed_plugins = megatron_lm_plugin = torch_tp_plugin = device_mesh = None
    is_fsdp2 = True  # a model is sharded in place, and an optimizer is re-pointed to it

    if not TYPE_CHECKING:  # a type checker would take it as leave to use any name

        def __getattr__(self, name: str) -> Any:
            # Reached only for names that do not exist.
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
        gradient_state: GradientState | None = None,
    ) -> None:
        Processes.__init__(self, process)
        self.gradient_state = gradient_state
        self.mixed_precision = mixed_precision
        self.fsdp_plugin = fsdp_plugin
        self.dynamo_backend = dynamo_backend
        self.parallelism_config = parallelism_config

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"

    def __reduce__(self) -> Any:
        # The state is the process's: a copy is that of the process it comes to.
        return _arrived, (dict(vars(self)),)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the state, as Accelerate's tests do between two Accelerators."""
        theirs.AcceleratorState._reset_state(reset_partial_state)
        _TOLD.clear()

    def check_current(self) -> None:
        """Refuse to go on after a reset, when Accelerate's helpers would see one process.

        Raises:
            AttributeError: Accelerate's state was reset, and no Accelerator was made since. Its own error.
        """
        if not _TOLD or not theirs.AcceleratorState._shared_state:
            raise AttributeError(
                "`AcceleratorState` object has no attribute `distributed_type`. This happens if "
                "`AcceleratorState._reset_state()` was called and an `Accelerator` or `PartialState` was not "
                "reinitialized."
            )

    @property
    def dynamo_plugin(self) -> Any:
        """Accelerate's plugin for `dynamo_backend`."""
        return _dynamo_plugin(self.dynamo_backend)


def earlier_gradient_state() -> GradientState | None:
    """Return the gradient state of this process's Accelerators; None: there is none, or it was reset."""
    state = _TOLD[0].gradient_state if _TOLD and isinstance(_TOLD[0], AcceleratorState) else None
    return state if state is not None and vars(state) else None  # Accelerate's own reset empties their shared state


def _arrived(fields: dict[str, Any]) -> AcceleratorState:
    """Return the state of a pickled Accelerator, where it is unpickled."""
    if _TOLD and isinstance(_TOLD[0], AcceleratorState):
        return _TOLD[0]
    state = AcceleratorState.__new__(AcceleratorState)  # of a process that joins no job, such as a loader's worker
    vars(state).update(fields)
    return state


def _tell(state: PartialState) -> None:
    """Write the state where the instances of Accelerate's two classes, made or to be made, all look."""
    # Without a process group its collectives must do nothing.
    kind = "FSDP" if dist.is_initialized() else "NO"
    partial = {
        "_cpu": state.device.type == "cpu",
        "backend": state.backend,
        "device": state.device,
        "debug": state.debug,
        "distributed_type": DistributedType[kind],
        "num_processes": state.num_processes,
        "process_index": state.process_index,
        "local_process_index": state.local_process_index,
        "fork_launched": _flag("FORK_LAUNCHED"),
    }
    theirs.PartialState._shared_state.clear()
    theirs.PartialState._shared_state.update(partial)
    if not isinstance(state, AcceleratorState):
        return
    whole = partial | {
        "deepspeed_plugins": None,
        "torch_tp_plugin": None,
        "parallelism_config": state.parallelism_config,
        "device_mesh": None,
        "dynamo_plugin": _dynamo_plugin(state.dynamo_backend),
        "fsdp_plugin": state.fsdp_plugin,
        "_mixed_precision": "no" if state.mixed_precision == "fp32" else state.mixed_precision,
    }
    theirs.AcceleratorState._shared_state.clear()
    theirs.AcceleratorState._shared_state.update(whole)
    if state.gradient_state is not None:
        theirs.GradientState._shared_state = vars(state.gradient_state)  # the same fields: both see every change


def _dynamo_plugin(backend: str) -> Any:
    plugin = TorchDynamoPlugin(backend="no")
    plugin.backend = DynamoBackend.__members__.get(backend.upper(), backend)  # torch takes backends it does not list
    return plugin
