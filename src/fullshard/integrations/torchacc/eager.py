"""TorchAcc's functions for PyTorch/XLA, which records operations and runs them later. Here they run immediately."""

from typing import Any

import torch
from accelerate.utils import send_to_device

from fullshard.api.state import ProcessState, launched_device


def joined() -> ProcessState:
    """Return this process's place in the job. If a launcher started the process, it joins the job first."""
    return ProcessState.start(device=launched_device())


def sync(wait: bool = False) -> None:
    """Wait for the device if `wait` is set. There is no recorded graph to run."""
    if wait and torch.accelerator.is_available():
        torch.accelerator.synchronize()


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Do the same as `sync(wait)`. `reset_scope` has no effect, because operations are not recorded."""
    sync(wait)


def lazy_device() -> torch.device:
    """Return the device of this rank."""
    return joined().device


def is_lazy_device(device: torch.device | str) -> bool:
    """Return False, because operations run immediately on every device."""
    return False


def is_lazy_tensor(tensor: torch.Tensor) -> bool:
    """Return False, because every tensor already contains its values."""
    return False


def fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients that the optimizer will use, averaged over all ranks.

    Gradients of sharded parameters are `ShardedTensor`s.
    """
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def send_cpu_data_to_device(data: Any, device: torch.device | str, input_sharding: None = None) -> Any:
    """Return a copy of `data` with its tensors on `device`. `data` may contain nested lists, tuples, and mappings."""
    return send_to_device(data, torch.device(device))
