"""Sinks for the numbers of a step: the console, a file, TensorBoard, trackers. Made on the reporting rank, rank 0."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from fullshard.core.errors import DataError
from fullshard.core.files import read_lines, write_text
from fullshard.core.imports import import_extra
from fullshard.core.paths import local_path
from fullshard.observe.metrics import StepMetrics


class MetricsSink(Protocol):
    """Receives every step in order; `close` is called once, also after an error."""

    def write(self, metrics: StepMetrics) -> None:
        """Take one step."""

    def close(self) -> None:
        """Flush and release the sink's resources."""


class ConsoleSink:
    """A line every `every` steps (and for the last one); on a terminal, a progress bar below the lines too.

    Args:
        total_steps: steps of the whole run.
        every: steps between two lines.
        first_step: steps that were done before, by a resumed run.
        stream: where to write; standard output by default.
    """

    def __init__(self, *, total_steps: int, every: int, first_step: int = 0, stream: TextIO | None = None) -> None:
        self._total_steps, self._every = total_steps, every
        self._stream = stream or sys.stdout
        self._progress = _progress_bar(total_steps, first_step) if self._stream.isatty() else None

    def write(self, metrics: StepMetrics) -> None:
        """Print the step if it is due, and move the bar."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=metrics.step)
        if metrics.step % self._every == 0 or metrics.step == self._total_steps:
            self.print(metrics.line(self._total_steps))
        if metrics.step == self._total_steps:
            self.close()  # output after the last step is no part of the bar

    def print(self, text: str) -> None:
        """Print a line of text above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _progress_bar(total_steps: int, first_step: int) -> Any:
    progress_module = importlib.import_module("rich.progress")
    progress = progress_module.Progress(
        progress_module.BarColumn(),
        progress_module.TextColumn("{task.completed}/{task.total} steps"),
        progress_module.TimeRemainingColumn(),
        transient=True,
    )
    progress.add_task("train", total=total_steps, completed=first_step)
    progress.start()
    return progress


class JsonlSink:
    """One line of JSON per step, each flushed as it is written, so that a killed run keeps its lines.

    Args:
        path: the file. Its lines after `last_step` are dropped first, so that a resumed run has each step
            once; with `last_step` 0 the file starts empty.
        last_step: the step the run continues from.
    """

    def __init__(self, path: Path, *, last_step: int = 0) -> None:
        path = local_path(path)
        kept = [metrics.to_json() + "\n" for metrics in read_metrics(path) if metrics.step <= last_step]
        write_text(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """Append the step."""
        self._file.write(metrics.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[StepMetrics]:
    """Yield the steps that a metrics file holds; nothing if there is no such file.

    A last line that a killed run left unfinished is left out.

    Raises:
        DataError: another line is no record.
        OSError: the file is no regular one, or larger than a metrics file can be.
    """
    unfinished = ""
    for number, line in enumerate(read_lines(path) if path.exists() else (), start=1):
        try:
            if unfinished:
                raise ValueError("a line that is longer than any record")
            if line.endswith("\n"):
                yield StepMetrics.from_json(line)
            else:
                unfinished = line
        except ValueError:
            raise DataError(
                f"{path}:{number - bool(unfinished)}: expected a step as `fullshard train` writes it, got "
                f"{(unfinished or line)[:80]!r}",
                hint="a full disk or another program may have written it; take the line out, or move the file away",
            ) from None


class TensorboardSink:
    """Scalars for TensorBoard.

    Args:
        directory: where the event files go.
        last_step: the step the run continues from; TensorBoard hides an earlier run's values after it.

    Raises:
        MissingExtraError: the package `tensorboard` is not installed.
    """

    def __init__(self, directory: Path, *, last_step: int = 0) -> None:
        module = import_extra(
            "torch.utils.tensorboard", extra="track", purpose="writing TensorBoard events", package="tensorboard"
        )
        self._writer = module.SummaryWriter(str(local_path(directory)), purge_step=last_step + 1 if last_step else None)

    def write(self, metrics: StepMetrics) -> None:
        """Add the step's scalars."""
        for _, words, value in metrics.scalars():
            self._writer.add_scalar(words, value, metrics.step)

    def close(self) -> None:
        """Flush the events."""
        self._writer.close()


class TrackerSink:
    """Hands the scalars of each step on.

    Args:
        log: takes values by name, and the step.
    """

    def __init__(self, log: Callable[[Mapping[str, float], int], None]) -> None:
        self._log = log

    def write(self, metrics: StepMetrics) -> None:
        """Hand on one step."""
        self._log({name: value for name, _, value in metrics.scalars()}, metrics.step)

    def close(self) -> None:
        """Do nothing: the code that started the trackers ends them."""
