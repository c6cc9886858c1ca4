"""Calls that are specific to CUDA. All other code uses `torch.accelerator`, so that it runs on any accelerator."""

import importlib

import torch


def is_available() -> bool:
    """Return whether torch can use a CUDA device here."""
    return torch.cuda.is_available()


def was_used() -> bool:
    """Return whether this process has initialized CUDA. If it has, processes forked from it cannot use CUDA."""
    return bool(torch.cuda.is_initialized())


def memory_nbytes(device: torch.device) -> int:
    """Return a device's memory in bytes."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def computes_bfloat16(device: torch.device) -> bool:
    """Return whether a device supports bfloat16 arithmetic in hardware."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def seen() -> tuple[tuple[str, int, float], ...]:
    """Return the name, memory and compute capability of each device. Afterwards, forked processes cannot use CUDA."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple((each.name, each.total_memory, each.major + each.minor / 10) for each in found)


def nccl_version() -> str | None:
    """Return the version of NCCL that torch was built with. Return None if torch has no NCCL or sees no devices."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, importlib.import_module("torch.cuda.nccl").version()))


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random number generator."""
    return torch.cuda.get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of a device's random number generator."""
    torch.cuda.set_rng_state(state, device)
