"""A profile of a few steps of a run, asked for by a flag."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.api import ProfileKwargs
from fullshard.config.values import step_range


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
        """A step begins."""
        self._step += 1
        if self._step == self._first:
            self._inside = contextlib.ExitStack()
            handler = ProfileKwargs(output_trace_dir=str(self._directory))
            self._inside.enter_context(self._accelerator.profile(handler))

    def end_step(self) -> None:
        """It has ended, well or not. Collective after the last that is profiled."""
        if self._step >= self._last:
            self._stop()

    def close(self) -> None:
        """The run is over."""
        self._stop()
        if self._step < self._first:
            self._say(f"profile: there is none, because the run ended after {self._step} steps, before {self._first}")

    def _stop(self) -> None:
        if self._inside is not None:
            self._inside.close()
            self._inside = None
            self._say(f"profile: {self._directory / 'trace.json'}, for https://ui.perfetto.dev")


def profiled(profile: StepProfile) -> Any:
    """A callback for Transformers' Trainer."""
    import transformers

    class Profiled(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *about: Any, **further: Any) -> None:
            profile.begin_step()

        def on_step_end(self, *about: Any, **further: Any) -> None:
            profile.end_step()

        def on_train_end(self, *about: Any, **further: Any) -> None:
            profile.close()

    return Profiled()
