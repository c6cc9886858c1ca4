"""Facts about devices for launchers, scripts and reports. The engine does not need them."""

from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.device import accelerator
from fullshard.config.hardware import usable_memory_nbytes
from fullshard.core.errors import ConfigError
from fullshard.launch import cuda


def kind_of(wanted: str) -> str:
    """Return the kind of device to compute on. `auto` selects the accelerator if there is one, or else the CPU."""
    if wanted in ("cpu", "cuda"):
        return wanted
    here = accelerator()
    kind = (here or "cpu") if wanted == "auto" else wanted
    if kind == "tpu":
        raise ConfigError(
            "fullshard does not start TPU jobs",
            hint="train with fullshard.integrations.xla and PyTorch/XLA's launcher (docs/xla.md), or use --device cpu",
        )
    if kind not in (here, "cpu"):
        raise ConfigError(f"unknown device {wanted!r}", hint="use auto, cpu or cuda")
    return kind


def object_device() -> torch.device | None:
    """Return the CPU if the default group can exchange Python objects there, or None to let the backend choose."""
    sends_from_host = "gloo" in dist.get_backend() or "cpu" in str(dist.get_backend_config())
    return torch.device("cpu") if sends_from_host else None


def synchronize(device: torch.device) -> None:
    """Wait until all work issued on a device has finished. A CPU has no work to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def name_of(device: torch.device) -> str:
    """Return the product name of a device, or the kind of device if no name is available."""
    tell: Any = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if tell is None else str(tell(device))


def memory_limit(device: torch.device, ranks_on_host: int) -> int | None:
    """Return the bytes that a rank may use: its device's memory, or its part of a CPU's. Return None if unknown."""
    if device.type == "cuda":
        return cuda.memory_nbytes(device)
    total = usable_memory_nbytes() if device.type == "cpu" else None
    return None if total is None else total // ranks_on_host
