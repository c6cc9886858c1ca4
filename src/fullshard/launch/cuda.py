"""The calls that name CUDA. Everything else goes through `torch.accelerator`, and works on any accelerator."""

from __future__ import annotations

import importlib

import torch


def is_available() -> bool:
    """Return whether torch can use a CUDA device here."""
    return torch.cuda.is_available()


def was_used() -> bool:
    """Return whether this process has used CUDA: a process that is forked from it cannot then."""
    return bool(torch.cuda.is_initialized())


def memory_nbytes(device: torch.device) -> int:
    """Return the bytes of memory of a device."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def computes_bfloat16(device: torch.device) -> bool:
    """Return whether a device has bfloat16 arithmetic of its own."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def seen() -> tuple[tuple[str, int, float], ...]:
    """Return name, memory and compute capability of the devices that torch sees, for when no other source tells.

    It starts the runtime, after which processes cannot be forked.
    """
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple((each.name, each.total_memory, each.major + each.minor / 10) for each in found)


def nccl_version() -> str | None:
    """Return the version of the NCCL that torch was built with; None without devices or NCCL."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, importlib.import_module("torch.cuda.nccl").version()))


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random generator."""
    return torch.cuda.get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of a device's random generator."""
    torch.cuda.set_rng_state(state, device)
