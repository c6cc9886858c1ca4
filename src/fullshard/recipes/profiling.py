"""The profile of a few steps of a run, asked for by a flag."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import ProfileKwargs

from fullshard.api import Accelerator
from fullshard.config.view import step_range


class Recorder:
    """Profiles some steps of this process, counted from its first.

    Args:
        accelerator: has prepared the model.
        directory: of the run; the profile goes into `profile/` there.
        say: told where it is, or why there is none.
        steps: the steps to profile, as they were written; None profiles nothing.
    """

    def __init__(
        self, accelerator: Accelerator, directory: Path, say: Callable[[str], None], *, steps: str | None
    ) -> None:
        self._accelerator, self._directory, self._say = accelerator, directory, say
        self._first, self._last = (0, 0) if steps is None else step_range(steps)
        self._step = 0
        self._profile: contextlib.ExitStack | None = None

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
        if self._step < self._first:
            self._say(f"profile: there is none, because the run ended after {self._step} steps, before {self._first}")


def recorded(recorder: Recorder) -> Any:
    """Return a callback for Transformers' Trainer."""
    import transformers

    class Recorded(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *about: Any, **further: Any) -> None:
            recorder.begin_step()

        def on_step_end(self, *about: Any, **further: Any) -> None:
            recorder.end_step()

        def on_train_end(self, *about: Any, **further: Any) -> None:
            recorder.close()

    return Recorded()
