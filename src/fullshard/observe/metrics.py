"""The numbers of one optimizer step, and how rates and memory are measured."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import sys
from pathlib import Path

import torch
from pydantic import TypeAdapter

from fullshard.comm.device import counts_memory
from fullshard.core.files import parse_object
from fullshard.core.sizes import GIB


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step of the whole job, the same on every rank.

    Attributes:
        step: the optimizer step, counted from 1.
        loss: mean over all target tokens of the global batch, nats per token.
        learning_rate: of the step.
        grad_norm: global 2-norm of the gradient before clipping; not finite where the step was skipped; None
            where the optimizer steps in backward, which never has all of it.
        tokens: target tokens of the global batch.
        tokens_seen: target tokens since the first step of the run, resumed parts included.
        step_seconds: wall time of the step on rank 0, the wait for data included.
        tokens_per_second: all ranks together, over the steps since the last reported line.
        data_wait_seconds: time the ranks waited for their batches, mean over ranks.
        memory_nbytes: bytes per rank: resident set on a CPU, allocator peak on an accelerator.
        planned_nbytes: the planner's prediction for the fullest rank; None on hardware that it does not know.
        mfu: model FLOP utilisation at `tokens_per_second`, 0 to 1; None where the peak is not known.
        checkpoint_seconds: how long training stood still for a checkpoint before this step.
        skipped_steps: steps so far that changed nothing, because gradients were not finite.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    tokens: int
    tokens_seen: int
    step_seconds: float
    tokens_per_second: float
    data_wait_seconds: float
    memory_nbytes: tuple[int, ...]
    planned_nbytes: int | None = None
    mfu: float | None = None
    checkpoint_seconds: float = 0.0
    skipped_steps: int = 0

    def scalars(self) -> dict[str, float]:
        """Return the scalars to plot, by a name that every tracker takes."""
        memory = {"memory_bytes": max(self.memory_nbytes), "planned_memory_bytes": self.planned_nbytes}
        unplotted = ("step", "tokens", "tokens_seen", "memory_nbytes", "planned_nbytes")
        values = dataclasses.asdict(self) | memory
        return {name: value for name, value in values.items() if name not in unplotted and value is not None}

    def to_json(self) -> str:
        """Return one line of JSON. Floats keep all their digits; "nan" and "inf", not numbers in JSON, become text."""
        values = dataclasses.asdict(self)
        unfit = {name: str(v) for name, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        return json.dumps(values | unfit, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> StepMetrics:
        """Return the record that a line of `to_json` holds.

        Raises:
            ValueError: the line is no such record.
        """
        return _RECORD.validate_python(parse_object(line))

    def line(self, total_steps: int) -> str:
        """Return the record as one line of text."""
        norm = "" if self.grad_norm is None else f" | grad norm {self.grad_norm:.3f}"
        return (
            f"step {self.step:>{len(str(total_steps))}}/{total_steps}"
            f" | loss {self.loss:.4f}"
            f" | lr {self.learning_rate:.2e}{norm}"
            f" | {self.tokens_per_second:,.0f} tokens/s"
            f" | memory {max(self.memory_nbytes) / GIB:.2f} GiB/rank"
            f" | data wait {self.data_wait_seconds * 1e3:.1f} ms"
        )


_RECORD = TypeAdapter(StepMetrics)


def memory_nbytes(device: torch.device) -> int:
    """Return the bytes this rank uses: the process's resident set on a CPU, the allocator's peak on an accelerator.

    0 if the device's allocator does not count.
    """
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) if counts_memory(device.type) else 0
    return _resident_nbytes()


def reset_memory_peak(device: torch.device) -> None:
    """Start the allocator's peak anew; a resident set has no peak to reset."""
    if device.type != "cpu" and counts_memory(device.type):
        torch.accelerator.reset_peak_memory_stats(device)


def _resident_nbytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # Elsewhere only the peak is at hand; macOS counts it in bytes, other systems in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
