"""The recordings of a few steps of a run, asked for by a flag: a profile, and what memory holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProfileKwargs
from torch import nn

from fullshard.api import Accelerator
from fullshard.api.memory_timeline import MemoryTimeline, check_is_counted, write_timeline
from fullshard.api.plan_check import AT_STEP
from fullshard.config.view import step_range
from fullshard.observe import require_plots
from fullshard.plan.memory import Moment


class Recorder:
    """Records steps of this process, counted from its first: a profile of some, the memory through the third.

    Args:
        accelerator: has prepared the model.
        directory: of the run; a profile goes into `profile/` there, what memory holds into `memory/`.
        say: told where they are, or why there are none.
        steps: the steps to profile, as they were written; None profiles nothing.
        memory: whether to write what memory holds.

    Raises:
        ConfigError: allocated memory is not counted on this device.
        MissingExtraError: matplotlib is not installed.
    """

    def __init__(
        self, accelerator: Accelerator, directory: Path, say: Callable[[str], None], *, steps: str | None, memory: bool
    ) -> None:
        self._accelerator, self._directory, self._say = accelerator, directory, say
        self._first, self._last = (0, 0) if steps is None else step_range(steps)
        self._step, self._has_memory = 0, memory
        self._profile: contextlib.ExitStack | None = None
        self._timeline: MemoryTimeline | None = None
        if memory:
            check_is_counted(accelerator.device)
            require_plots()

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, planned: Sequence[Moment] = ()) -> None:
        """Begin training, with this optimizer as torch has it; `planned` are the moments of a step as predicted."""

        def write(measured: list[Moment]) -> None:
            title = f"memory of rank 0 of {self._accelerator.num_processes} over one step"
            rank = self._accelerator.process_index
            self._say(write_timeline(self._directory / "memory", rank, measured, planned, title=title))

        if self._has_memory:
            self._timeline = MemoryTimeline(model, optimizer, self._accelerator.device, when_done=write)

    def begin_step(self) -> None:
        """Begin a step."""
        self._step += 1
        if self._step == self._first:
            self._profile = contextlib.ExitStack()
            handler = ProfileKwargs(output_trace_dir=str(self._directory / "profile"))
            self._profile.enter_context(self._accelerator.profile(handler))

    def end_step(self) -> None:
        """End a step, well or not. Collective after the last that is profiled."""
        if self._profile is not None and self._step >= self._last:
            self._profile.close()
            self._profile = None
            self._say(f"profile: {self._directory / 'profile' / 'trace.json'}, for https://ui.perfetto.dev")

    def close(self) -> None:
        """End the run: stop profiling, and say what there is not, because the run was too short."""
        self._last = 0
        self.end_step()
        for what, first in (("profile", self._first), ("memory timeline", AT_STEP if self._has_memory else 0)):
            if self._step < first:
                self._say(f"{what}: there is none, because the run ended after {self._step} steps, before {first}")


def recorded(recorder: Recorder) -> Any:
    """Return a callback for Transformers' Trainer."""
    import transformers

    class Recorded(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *about: Any, model: Any, optimizer: Any, **further: Any) -> None:
            recorder.begin(model, optimizer.optimizer)

        def on_step_begin(self, *about: Any, **further: Any) -> None:
            recorder.begin_step()

        def on_step_end(self, *about: Any, **further: Any) -> None:
            recorder.end_step()

        def on_train_end(self, *about: Any, **further: Any) -> None:
            recorder.close()

    return Recorded()
