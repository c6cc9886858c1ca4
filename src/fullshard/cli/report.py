"""The `fullshard report` command, which writes an HTML file about one run or compares several."""

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
    """Write a report on a run, or compare several runs.

    The report shows loss, speed, memory, settings, and failures. It can be opened without network access.
    """
    from fullshard.observe.report import write_report

    path = runs[0] / "report.html" if output is None else output
    write_report(runs, path)
    typer.echo(f"wrote {path}")
