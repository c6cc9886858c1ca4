"""The file with the numbers of every step. Written on the reporting rank, rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fullshard.core.errors import DataError
from fullshard.core.files import read_lines, write_text
from fullshard.core.paths import local_path
from fullshard.observe.metrics import StepMetrics


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
