"""One layer for every kind of device: a CPU, CUDA, a device that is plugged into torch, a TPU.

`torch.accelerator` answers for all that the kinds have in common. A row of a table here sets a kind apart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from fullshard.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Traits:
    """The traits that set a kind of device apart.

    Attributes:
        has_streams: copies run beside computing, in streams that wait for one another. Where there are none, everything
            happens in the order in which it was issued, and the engine makes no streams and no events.
        computes_float16: float16, and so loss scaling, is of use there.
        may_fork: a process that has started the device may be forked, if the child leaves it alone.
        is_one_per_process: a process has one device, whatever its local rank.
        sends_objects: its backend sends Python objects, too; else only Gloo does.
    """

    has_streams: bool = True
    computes_float16: bool = True
    may_fork: bool = True
    is_one_per_process: bool = False
    sends_objects: bool = True


_COMMON = Traits()
_TRAITS = {
    "cpu": Traits(has_streams=False),
    "meta": Traits(has_streams=False),
    "tpu": Traits(False, False, False, is_one_per_process=True, sends_objects=False),
}
_WITHOUT_RANKS = ("mps",)
"""Kinds for which torch has no collectives."""


def traits_of(device: torch.device) -> Traits:
    """Return the traits of a device."""
    return _TRAITS.get(device.type, _COMMON)


def accelerator() -> str | None:
    """Return the kind of accelerator that ranks can use here; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in _WITHOUT_RANKS else found.type


def count(kind: str) -> int:
    """Return the number of devices of that kind on this host which this process may use."""
    return 0 if kind != accelerator() else int(torch.get_device_module(kind).device_count())


def select(kind: str, local_rank: int) -> torch.device:
    """Make the device of a rank of this host the current one, and return it."""
    if _TRAITS.get(kind, _COMMON).is_one_per_process:
        return torch.device(kind, torch.accelerator.current_device_index())
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
    """Return the backends for `init_process_group`: the kind's own (`nccl`, `tpu_dist`), and Gloo for host memory."""
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def require_gloo(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Check that a group has Gloo, where only Gloo sends objects. Called before the first message.

    Raises:
        ConfigError: The group has no Gloo.
    """
    if group is None or traits_of(device).sends_objects:
        return
    if "gloo" not in str(dist.get_backend_config(group)):
        raise ConfigError(
            f"the process group has {dist.get_backend_config(group)} and no Gloo: {device.type} sends tensors alone",
            hint=f'init_process_group("{backends_of(device.type)}")',
        )


def require_dtype(device: torch.device, dtype: torch.dtype, what: str) -> None:
    """Raise `ConfigError`, which begins with `what`, for float16 where it is of no use."""
    if dtype == torch.float16 and not traits_of(device).computes_float16:
        kind = device.type.upper()
        raise ConfigError(
            f"{what}: float16, and a {kind} computes in bfloat16 and float32", hint="use bf16, without a scaler"
        )


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
