"""One layer for every kind of device: a CPU, CUDA, a device that is plugged into torch.

`torch.accelerator` answers for all that the kinds have in common.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_WITHOUT_RANKS = ("mps",)
"""Kinds for which torch has no collectives."""


def has_streams(device: torch.device) -> bool:
    """Return whether copies run beside computing there; else everything happens in the order in which it was issued."""
    return device.type not in ("cpu", "meta")


def accelerator() -> str | None:
    """Return the kind of accelerator that ranks can use here; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in _WITHOUT_RANKS else found.type


def count(kind: str) -> int:
    """Return the number of devices of that kind on this host which this process may use."""
    return 0 if kind != accelerator() else int(torch.get_device_module(kind).device_count())


def select(kind: str, local_rank: int) -> torch.device:
    """Make the device of a rank of this host the current one, and return it."""
    device = torch.device(kind, local_rank)
    set_device = getattr(torch.get_device_module(kind), "set_device", torch.accelerator.set_device_index)
    set_device(device)
    return device


def current() -> torch.device:
    """Return this rank's accelerator if there is one, else the CPU. Until a device was used, the launcher names it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    was_used: Any = getattr(torch.get_device_module(found), "is_initialized", lambda: True)
    local_rank = os.environ.get("LOCAL_RANK", "")
    if not was_used() and local_rank.isdigit() and int(local_rank) < count(found.type):
        return select(found.type, int(local_rank))
    return torch.device(found.type, torch.accelerator.current_device_index())


def backends_of(kind: str) -> str:
    """Return the backends for `init_process_group`: the kind's own (`nccl`), and Gloo for host memory."""
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


@cache
def counts_memory(kind: str) -> bool:
    """Return whether torch knows how much memory is allocated on a device; not every allocator counts."""
    try:
        torch.accelerator.memory_stats(torch.device(kind))
    except RuntimeError:
        return False
    return True


_answering: list[None] = []


def has_values(device: torch.device) -> bool:
    """Return whether reading a number there gives one: not on the meta device, except inside `answered`."""
    return device.type != "meta" or bool(_answering)


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Let the meta device answer as an accelerator does (`fullshard.api.virtual`)."""
    _answering.append(None)
    try:
        yield
    finally:
        _answering.pop()
