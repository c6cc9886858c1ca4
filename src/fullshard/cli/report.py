"""The `fullshard report` command, which writes an HTML file about one run or compares several."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fullshard.cli.options import Json, file_word, path_word


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Output directories of train, sft or Trainer", parser=path_word, show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file. Default: report.html in the first directory", parser=file_word),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a report on a run, or compare several runs.

    The report shows loss, speed, memory, settings, and failures. It can be opened without network access.
    With --json, print the main numbers of each run, and write a report only if there is an --output.
    """
    from fullshard.observe.record import read_runs
    from fullshard.observe.report import numbers, write_report

    if as_json:
        typer.echo(json.dumps([numbers(run) for run in read_runs(runs)], indent=2))
    if output is not None or not as_json:
        path = runs[0] / "report.html" if output is None else output
        write_report(runs, path)
        typer.echo(f"wrote {path}", err=as_json)
