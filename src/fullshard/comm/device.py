"""Functions for all kinds of devices (CPU, CUDA, and those that plug into torch) that `torch.accelerator` lacks."""

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_WITHOUT_RANKS = ("mps",)
"""Kinds of devices for which torch has no collectives."""


def has_streams(device: torch.device) -> bool:
    """Return whether copies can overlap with computation on the device. Otherwise, operations run in issue order."""
    return device.type not in ("cpu", "meta")


def accelerator() -> str | None:
    """Return the kind of accelerator that ranks can use on this host, or None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in _WITHOUT_RANKS else found.type


def count(kind: str) -> int:
    """Return the number of devices of this kind that this process may use on this host."""
    return 0 if kind != accelerator() else int(torch.get_device_module(kind).device_count())


def select(kind: str, local_rank: int) -> torch.device:
    """Make the device that belongs to a local rank the current device, and return it."""
    device = torch.device(kind, local_rank)
    set_device = getattr(torch.get_device_module(kind), "set_device", torch.accelerator.set_device_index)
    set_device(device)
    return device


def current() -> torch.device:
    """Return this rank's accelerator, or the CPU if there is none. On first use, select the device of `LOCAL_RANK`."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    was_used: Any = getattr(torch.get_device_module(found), "is_initialized", lambda: True)
    local_rank = os.environ.get("LOCAL_RANK", "")
    if not was_used() and local_rank.isdigit() and int(local_rank) < count(found.type):
        return select(found.type, int(local_rank))
    return torch.device(found.type, torch.accelerator.current_device_index())


def backends_of(kind: str) -> str:
    """Return the backends for `init_process_group`: the device's own (such as `nccl`), and Gloo for tensors on CPUs."""
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


@cache
def counts_memory(kind: str) -> bool:
    """Return whether torch can report how much device memory is allocated. Some allocators do not track this."""
    try:
        torch.accelerator.memory_stats(torch.device(kind))
    except RuntimeError:
        return False
    return True


_answering: list[None] = []


def has_values(device: torch.device) -> bool:
    """Return whether tensors on the device have values. On the meta device, they have values only inside `answered`."""
    return device.type != "meta" or bool(_answering)


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Treat the meta device as an accelerator while this context is active (`fullshard.api.virtual`)."""
    _answering.append(None)
    try:
        yield
    finally:
        _answering.pop()
