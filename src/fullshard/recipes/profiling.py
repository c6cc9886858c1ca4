"""The recordings of a few steps of a run, asked for by a flag: a profile, and what memory holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.api import ProfileKwargs
from fullshard.api.memory_timeline import MemoryTimeline, check_is_counted, write_timeline
from fullshard.api.plan_check import AT_STEP
from fullshard.config.values import step_range
from fullshard.observe import require_plots
from fullshard.plan.memory import Moment


class StepProfile:
    """Profiles steps of this process, counted from its first.

    Args:
        accelerator: has prepared the model.
        steps: as they were written; None profiles nothing.
        directory: for the traces.
        say: told where they are, or why there are none.
    """

    def __init__(self, accelerator: Any, steps: str | None, directory: Path, say: Callable[[str], None]) -> None:
        self._accelerator, self._directory, self._say = accelerator, directory, say
        self._first, self._last = (0, 0) if steps is None else step_range(steps)
        self._step = 0
        self._inside: contextlib.ExitStack | None = None

    def begin_step(self) -> None:
        """Begin a step."""
        self._step += 1
        if self._step == self._first:
            self._inside = contextlib.ExitStack()
            handler = ProfileKwargs(output_trace_dir=str(self._directory))
            self._inside.enter_context(self._accelerator.profile(handler))

    def end_step(self) -> None:
        """End a step, well or not. Collective after the last that is profiled."""
        if self._step >= self._last:
            self._stop()

    def close(self) -> None:
        """End the run: stop profiling, and say if no step was profiled."""
        self._stop()
        if self._step < self._first:
            self._say(f"profile: there is none, because the run ended after {self._step} steps, before {self._first}")

    def _stop(self) -> None:
        if self._inside is not None:
            self._inside.close()
            self._inside = None
            self._say(f"profile: {self._directory / 'trace.json'}, for https://ui.perfetto.dev")


class StepMemory:
    """Writes what memory holds through the third step of this process: `memory/` in the directory of a run.

    Args:
        accelerator: has prepared the model.
        directory: of the run.
        say: told what was found, or why nothing was.
        planned: the moments of a step as they were predicted; may be empty.

    Raises:
        ConfigError: allocated memory is not counted on this device.
        MissingExtraError: matplotlib is not installed.
    """

    def __init__(
        self, accelerator: Any, directory: Path, say: Callable[[str], None], planned: Sequence[Moment] = ()
    ) -> None:
        check_is_counted(accelerator.device)
        require_plots()
        self._accelerator, self._directory, self._say, self._planned = accelerator, directory, say, planned
        self._timeline: MemoryTimeline | None = None

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin training, with this optimizer as torch has it."""
        self._timeline = MemoryTimeline(model, optimizer, self._accelerator.device, when_done=self._write)

    def _write(self, measured: list[Moment]) -> None:
        title = f"memory of rank 0 of {self._accelerator.num_processes} over one step"
        rank = self._accelerator.process_index
        self._say(write_timeline(self._directory / "memory", rank, measured, self._planned, title=title))

    def close(self) -> None:
        """End the run: say if there is no timeline."""
        steps = 0 if self._timeline is None else self._timeline.steps
        if steps < AT_STEP:
            self._say(f"memory timeline: there is none, because the run ended after {steps} steps, before {AT_STEP}")


def watched(memory: StepMemory) -> Any:
    """Return a callback for Transformers' Trainer."""
    import transformers

    class Watched(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *about: Any, model: Any, optimizer: Any, **further: Any) -> None:
            memory.begin(model, optimizer.optimizer)

        def on_train_end(self, *about: Any, **further: Any) -> None:
            memory.close()

    return Watched()


def profiled(profile: StepProfile) -> Any:
    """Return a callback for Transformers' Trainer."""
    import transformers

    class Profiled(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *about: Any, **further: Any) -> None:
            profile.begin_step()

        def on_step_end(self, *about: Any, **further: Any) -> None:
            profile.end_step()

        def on_train_end(self, *about: Any, **further: Any) -> None:
            profile.close()

    return Profiled()
