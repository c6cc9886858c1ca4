"""Write, check, explain and convert configurations; without a subcommand, a questionnaire."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.cli.options import RawCommand, path_word
from fullshard.core.errors import ConfigError

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

_Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="File to write. Default: standard output.", parser=path_word)
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")]


@app.callback(invoke_without_command=True)
def config(context: typer.Context) -> None:
    """Write, check, explain and convert configurations.

    Without a subcommand it asks what matters, and writes a commented YAML.
    """
    if context.invoked_subcommand is None:
        from fullshard.cli.config_questions import run

        sys.exit(run())


@app.command("default")
def default(output: _Output = None, overwrite: _Overwrite = False) -> None:
    """Write a file with every setting, its description and its default."""
    from fullshard.config.schema import RunConfig
    from fullshard.config.write import write_native

    _put(write_native(RunConfig()), output, overwrite)


@app.command("check")
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of any dialect.", parser=path_word)],
) -> None:
    """Read files and say what becomes of each key. Exit code 2 if one of them would be refused."""
    bad = 0
    for file in files:
        try:
            resolved = _resolve(file)
        except ConfigError as error:
            bad += 1
            sys.stderr.write(f"{file}: refused\n{error}\n")
            continue
        print(f"{file}: fine, {len(resolved.settings)} settings")
        for note in resolved.notes:
            print(f"  {note}")
    if bad:
        raise typer.Exit(2)


@app.command("convert")
def convert(
    file: Annotated[Path, typer.Argument(help="A file of any dialect.", parser=path_word)],
    output: _Output = None,
    overwrite: _Overwrite = False,
) -> None:
    """Write a configuration of any dialect as fullshard's YAML; notes on its keys go to standard error."""
    from fullshard.config.write import write_native

    resolved = _resolve(file)
    _put(write_native(resolved.config), output, overwrite)
    for note in resolved.notes:
        sys.stderr.write(f"note: {note}\n")


@app.command("schema")
def schema(output: _Output = None, overwrite: _Overwrite = False) -> None:
    """Write the JSON schema of fullshard's YAML. It is for completion and checks in editors."""
    from fullshard.config.write import json_schema

    _put(json.dumps(json_schema(), indent=2) + "\n", output, overwrite)


@app.command("explain", cls=RawCommand)
def explain(context: typer.Context) -> None:
    """Print every setting as `fullshard launch` would have it.

    Beside each where its value comes from, and its default.

    fullshard config explain [FILE] [--json] [flags of `fullshard launch`]
    """
    from fullshard.cli.launch import read_sources
    from fullshard.config.explain import explain as explained
    from fullshard.config.flags import parse
    from fullshard.config.resolve import resolve

    line = parse(_with_file_as_flag([argument for argument in context.args if argument != "--json"]))
    if line.option("help"):
        print(context.get_help())
        return
    as_json = "--json" in context.args
    resolved = resolve(read_sources(line, os.environ))
    rows = list(explained(resolved))
    notes = [str(note) for note in resolved.notes]
    if as_json:
        print(json.dumps({"settings": [asdict(row) for row in rows], "notes": notes}, indent=2))
        return
    if line.option("config_file") is None:
        print("no file is named")
    _print_rows(rows)
    for note in notes:
        print(f"note: {note}")


def _with_file_as_flag(arguments: list[str]) -> list[str]:
    """Return `explain`'s command line as one of `launch`, which stops at the first word that is no flag."""
    from fullshard.config.flags import parse

    line = parse(arguments)
    if line.target is None:
        return arguments
    before = arguments[: len(arguments) - len(line.arguments) - 1]
    after = parse(line.arguments)
    if after.target is not None:
        raise ConfigError(f"one file at a time, got {line.target} and {after.target}", hint="name one")
    return ["--config_file", line.target, *before, *line.arguments]


def _print_rows(rows: list[Any]) -> None:
    """Print a table on a terminal, and aligned lines into a pipe."""
    from fullshard.config.dialect import shown

    cells = [
        (
            row.path,
            shown(row.value),
            f"{row.source} ({row.written_as})" if row.written_as else row.source,
            shown(row.default) if row.is_set else "",
        )
        for row in rows
    ]
    if not sys.stdout.isatty():
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        for row in cells:
            line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False))
            print(f"{line}  {f'default {row[3]}' if row[3] else ''}".rstrip())
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE)
    for title in ("setting", "value", "source", "default"):
        table.add_column(title, overflow="fold")  # on a narrow terminal nothing is cut off
    for explained, row in zip(rows, cells, strict=True):
        table.add_row(*(Text(text) for text in row), style="bold" if explained.is_set else "dim")
    Console().print(table)


def _resolve(file: Path) -> Any:
    from fullshard.config.load import load_file
    from fullshard.config.resolve import resolve

    return resolve([load_file(file)])


def _put(text: str, output: Path | None, overwrite: bool) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    from fullshard.config.write import save_text

    save_text(text, output, overwrite=overwrite)
    sys.stderr.write(f"wrote {output}\n")
