"""Define the metrics of an optimizer step, write the files of a run for reports, and measure memory."""

import dataclasses
import json
import math
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import psutil
import torch
from pydantic import TypeAdapter, WrapValidator
from torch import nn

from fullshard.comm.device import counts_memory
from fullshard.core.errors import DataError
from fullshard.core.files import parse_object, read_lines, write_text
from fullshard.core.paths import local_path
from fullshard.core.sizes import GIB, format_count
from fullshard.core.version import __version__
from fullshard.launch.device import memory_limit, name_of
from fullshard.launch.environment import RankEnvironment

Known = Annotated[float, WrapValidator(lambda value, check: None if value is None else check(value))]
"""A float, which is None in records of Trainer and of scripts if they do not know it."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """Holds the metrics of one optimizer step, which are the same on every rank."""

    step: int  # the optimizer step, counted from 1
    loss: Known  # mean over all target tokens of the global batch, in nats per token
    learning_rate: Known  # of this step
    # Global 2-norm of the gradient before clipping. It is not finite if the step was skipped, and None if the optimizer
    # steps in backward, because the complete gradient is then never in memory at once.
    grad_norm: float | None
    step_seconds: Known  # wall time of the step on rank 0, including the wait for data
    tokens_per_second: Known  # tokens of all ranks per second, over the steps since the last reported line
    data_wait_seconds: Known  # time that the ranks waited for their batches, mean over ranks
    # Bytes per rank: resident set size on a CPU, allocator peak on an accelerator.
    memory_nbytes: tuple[int, ...]
    checkpoint_seconds: Known = 0.0  # how long a checkpoint blocked training before this step
    skipped_steps: Known = 0  # number of steps so far that were skipped because gradients were not finite
    # Mean loss over held-out sequences after this step, in nats per token, if it was evaluated.
    held_out_loss: float | None = None

    @classmethod
    def known(cls, **values: Any) -> Self:
        """Return the metrics of a step of which only some are known."""
        return cls(**dict[str, Any](dict.fromkeys(field.name for field in dataclasses.fields(cls)) | values))

    def scalars(self) -> dict[str, float]:
        """Return the scalars to plot, under names that every tracker accepts."""
        unplotted = ("step", "memory_nbytes")
        values = dataclasses.asdict(self) | {"memory_bytes": max(self.memory_nbytes)}
        return {name: value for name, value in values.items() if name not in unplotted and value is not None}

    def to_json(self) -> str:
        """Return the metrics as one line of JSON. Floats keep all their digits, and NaN and infinity become strings."""
        values = dataclasses.asdict(self)
        unfit = {name: str(v) for name, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        return json.dumps(values | unfit, allow_nan=False)

    def line(self, total_steps: int) -> str:
        """Return the metrics as one line of text for the user."""
        norm = "" if self.grad_norm is None else f" | grad norm {self.grad_norm:.3f}"
        return (
            f"step {self.step:>{len(str(total_steps))}}/{total_steps}"
            f" | loss {self.loss:.4f}"
            f" | lr {self.learning_rate:.2e}{norm}"
            f" | {self.tokens_per_second:,.0f} tokens/s"
            f" | memory {max(self.memory_nbytes) / GIB:.2f} GiB/rank"
            f" | data wait {self.data_wait_seconds * 1e3:.1f} ms"
        )


class JsonlSink:
    """Writes one flushed line of JSON per step. On a resume, the lines after `last_step` are removed first."""

    def __init__(self, path: Path, *, last_step: int = 0) -> None:
        path = local_path(path)
        kept = [metrics.to_json() + "\n" for metrics in read_metrics(path) if metrics.step <= last_step]
        write_text(path, "".join(kept))
        self._path = path

    def write(self, metrics: StepMetrics) -> None:
        """Append the metrics of a step to the file, and close it, so that other hosts see the line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(metrics.to_json() + "\n")


def describe_run(
    directory: Path, settings: Mapping[str, tuple[Any, Any]], environment: Mapping[str, Any], origin: str = "given"
) -> None:
    """Write `environment.json` and `settings.json`, from (value, default). Others than defaults come from `origin`."""
    versions = {"fullshard": __version__, "torch": torch.__version__, "python": platform.python_version()}
    origins = {
        name: {"value": value, "origin": "default" if value == default else origin}
        for name, (value, default) in settings.items()
    }
    for name, content in {"settings": origins, "environment": versions | dict(environment)}.items():
        write_text(directory / f"{name}.json", json.dumps(content, indent=2, default=str) + "\n")


def run_facts(
    model: nn.Module, plan: Any, why: str, environment: RankEnvironment, device: torch.device, before: int | None = None
) -> dict[str, Any]:
    """Return what a report says about the model and the memory of a run. `why` says why there is no plan (None).

    `before` is what `memory_nbytes` returned before the model was built, if it was called.
    """
    size = format_count(sum(parameter.numel() for parameter in model.parameters()))
    facts: dict[str, Any] = {"model": f"{type(model).__name__}, {size} parameters", "device": name_of(device)}
    facts |= {"ranks": environment.world_size, "before_model_nbytes": before or 0, "unplanned": why}
    facts["limit_nbytes"] = memory_limit(device, max(1, environment.local_world_size))
    if plan is not None and before is None and device.type == "cpu":
        facts["unplanned"] = "what the process used before it built the model was not measured"
    elif plan is not None:
        tensors = plan.memory.allocated
        facts |= {"planned_nbytes": (before or 0) + tensors, "reserve_nbytes": plan.memory.needed - tensors}
    return facts


def read_metrics(path: Path) -> Iterator[StepMetrics]:
    """Yield the steps of a metrics file, if it exists. Skip an incomplete last line, which a killed run may leave."""
    unfinished = ""
    for number, line in enumerate(read_lines(path) if path.exists() else (), start=1):
        try:
            if unfinished:
                raise ValueError("a line is longer than any valid record")
            if line.endswith("\n"):
                yield _RECORD.validate_python(parse_object(line))
            else:
                unfinished = line
        except ValueError:
            raise DataError(
                f"{path}:{number - bool(unfinished)}: expected a step that fullshard wrote, got "
                f"{(unfinished or line)[:80]!r}",
                hint="remove the line, or move the file away; a full disk or another program may have caused this",
            ) from None


_RECORD = TypeAdapter(StepMetrics)


def memory_nbytes(device: torch.device) -> int:
    """Return this rank's memory: on a CPU the resident set, on an accelerator the allocator's peak, in bytes."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) if counts_memory(device.type) else 0
    return int(psutil.Process().memory_info().rss)


def reset_memory_peak(device: torch.device) -> None:
    """Reset the peak of the device's allocator. On a CPU, do nothing, because a resident set size has no peak."""
    if device.type != "cpu" and counts_memory(device.type):
        torch.accelerator.reset_peak_memory_stats(device)
