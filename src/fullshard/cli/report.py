"""`fullshard report`: one HTML file about a run, or several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullshard.cli.options import file_word, path_word


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Output directories of train, sft or Trainer", parser=path_word, show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file. Default: report.html in the first directory", parser=file_word),
    ] = None,
) -> None:
    """Write a report of a run, or compare several.

    It has loss, speed, memory, settings and failures. The file needs no network.
    """
    from fullshard.observe.report import write_report

    path = runs[0] / "report.html" if output is None else output
    write_report(runs, path)
    typer.echo(f"wrote {path}")
