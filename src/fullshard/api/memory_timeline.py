"""The memory of one rank through one step, at each event of the engine: measured, beside the plan.

    timeline = MemoryTimeline(model, optimizer, device, when_done=lambda moments: ...)

What the engine holds is known by category. All else that is allocated since the step began is activations, logits and
what single operations need: `torch.accelerator.memory_allocated` counts it on an accelerator, the C library on a CPU.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.api.plan_check import AT_STEP, storage_nbytes
from fullshard.comm.device import counts_memory
from fullshard.core.errors import ConfigError
from fullshard.core.events import Event, EventKind
from fullshard.core.sizes import format_nbytes
from fullshard.engine.bucket import Bucket
from fullshard.engine.lookup import require_units
from fullshard.engine.step.plain_tensors import as_local
from fullshard.plan.memory import Moment
from fullshard.plan.pictures import draw_moments

REST = "activations and all else"
_SHARED = ("sharded parameters", "main weights", "gathered units", "reduce buffers")
"""The categories in memory that ranks share, where they share any."""


class MemoryTimeline:
    """Looks at a rank's memory at every event of one step.

    Args:
        model: sharded.
        optimizer: of its parameters.
        device: of this rank.
        when_done: called with the moments within that step's `optimizer.step()`, before the update.

    Raises:
        LifecycleError: the model is not sharded.
        ConfigError: allocated memory is not counted there.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        when_done: Callable[[list[Moment]], None],
    ) -> None:
        self._units = require_units(model)
        check_is_counted(device)
        self._optimizer, self._device, self._when_done = optimizer, device, when_done
        self._schedule = self._units[-1].schedule
        self._before = self._schedule.event_sink
        self._schedule.event_sink = self._receive
        self.steps = 0
        self._moments: list[Moment] = []
        self._rest_before = 0

    def _receive(self, event: Event) -> None:
        if self._before is not None:
            self._before(event)
        if self.steps == AT_STEP - 1:
            self._moments.append(self._look(event))
        if event.kind is EventKind.OPTIMIZER_STEP:
            self.steps += 1
            if self.steps == AT_STEP:
                if self._schedule.event_sink == self._receive:
                    self._schedule.event_sink = self._before
                self._when_done(self._moments)

    def _look(self, event: Event) -> Moment:
        held = self._held()
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        # Only the engine counts memory that ranks share.
        is_shared = any(bucket.buffer.is_persistent for bucket in buckets) and self._units[-1].mesh.world_size > 1
        counted = sum(nbytes for name, nbytes in held.items() if not (is_shared and name in _SHARED))
        rest = _counted_nbytes(self._device) - counted
        if not self._moments:
            self._rest_before = rest
        return Moment(event, {**held, REST: max(0, rest - self._rest_before)})

    def _held(self) -> dict[str, int]:
        """Return the bytes on the device that the engine and the optimizer hold, by the planner's categories."""
        buckets = [bucket for unit in self._units for bucket in unit.buckets]
        gradients = [bucket.gradient for bucket in buckets if bucket.has_gradient]
        state = [
            value
            for values in self._optimizer.state.values()
            for value in as_local(values).values()
            if isinstance(value, torch.Tensor) and value.device.type == self._device.type
        ]
        here = [bucket for bucket in buckets if bucket.main.device.type == self._device.type]
        frozen = storage_nbytes(t for bucket in here if not bucket.has_gradient for t in bucket.stored)
        return {
            "sharded parameters": frozen + sum(map(copies_nbytes, buckets)),
            "main weights": storage_nbytes(t for bucket in here if bucket.has_gradient for t in bucket.stored),
            "optimizer state": storage_nbytes(state),
            "gradients": sum(gradient.reduced_nbytes for gradient in gradients),
            "gathered units": sum(b.buffer.nbytes for b in buckets if not b.buffer.is_persistent),
            "reduce buffers": sum(gradient.collected_nbytes for gradient in gradients),
        }


def copies_nbytes(bucket: Bucket) -> int:
    """Return the bytes on the device of persistent copies in the compute dtype, besides `main`."""
    if bucket.buffer.is_persistent and bucket.buffer.main is None:  # in memory that ranks share
        return bucket.layout.shard_numel * bucket.full.itemsize
    is_apart = bucket.compute_shard is not bucket.main and not bucket.plan.is_gathered_from_host
    return bucket.compute_shard.nbytes if is_apart else 0


def check_is_counted(device: torch.device) -> None:
    """Refuse a device whose allocated memory cannot be known.

    Raises:
        ConfigError: it cannot.
    """
    if device.type == "cpu" and _c_library_nbytes() is None:
        raise ConfigError("memory_timeline: this C library does not say what is allocated", hint="glibc 2.33 does")
    if device.type != "cpu" and not counts_memory(device.type):
        raise ConfigError(f"memory_timeline: torch does not count what is allocated on {device.type}")


def _counted_nbytes(device: torch.device) -> int:
    if device.type == "cpu":
        return _c_library_nbytes() or 0
    return torch.accelerator.memory_allocated(device)


def write_timeline(
    directory: Path, rank: int, measured: Sequence[Moment], planned: Sequence[Moment], *, title: str
) -> str:
    """Write `rank-R.json`, and on rank 0 `memory.svg`.

    Args:
        directory: for both.
        rank: of this process.
        measured: moments of a step.
        planned: the same as they were predicted; may be empty.
        title: of the picture.

    Returns:
        A line for people: the fullest moments.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows = {"rank": rank, "planned": _rows(planned), "measured": _rows(measured)}
    (directory / f"rank-{rank}.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if rank == 0:
        panels = {"planned": planned, "measured": measured} if planned else {"measured": measured}
        draw_moments(panels, directory / "memory.svg", title=title)
    most = max(measured, key=lambda moment: moment.total)
    place = f"{format_nbytes(most.total)} at {most.event.kind} of {most.event.unit or 'the root'}"
    plan = f"; planned {format_nbytes(max(moment.total for moment in planned))}" if planned else ""
    return f"memory of one step: at most {place}{plan} ({directory / 'memory.svg'})"


def _rows(moments: Sequence[Moment]) -> list[dict[str, Any]]:
    return [
        {"event": str(moment.event.kind), "unit": moment.event.unit, "bytes": moment.total, "categories": moment.nbytes}
        for moment in moments
    ]


class _Allocated(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def _c_library_nbytes() -> int | None:
    """Return bytes that the C library has handed out; None where it does not say: glibc does since 2.33."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Allocated
    found = ask()
    return int(found.uordblks + found.hblkhd)
