"""The `fullshard config` commands, which write, check, explain, and convert configurations."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.cli.options import RawCommand, path_word
from fullshard.core.errors import ConfigError, filled, plural

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

_Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="File to write. Default: standard output.", parser=path_word)
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")]


@app.callback(invoke_without_command=True)
def config(context: typer.Context) -> None:
    """Write, check, explain and convert configurations.

    Without a subcommand, ask about the main settings and write a commented YAML file.
    """
    if context.invoked_subcommand is None:
        from fullshard.cli.config_questions import run

        sys.exit(run())


@app.command("default")
def default(output: _Output = None, overwrite: _Overwrite = False) -> None:
    """Write a file with the description and default of every setting."""
    from fullshard.config.schema import RunConfig
    from fullshard.config.write import write_native

    _put(write_native(RunConfig()), output, overwrite)


@app.command("check")
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of any dialect.", parser=path_word)],
) -> None:
    """Read files and report how each key is used. The exit code is 2 if any file would be rejected."""
    bad = 0
    for file in files:
        try:
            resolved = _resolve(file)
        except ConfigError as error:
            bad += 1
            sys.stderr.write(f"{file}: refused\n{error}\n")
            continue
        print(f"{file}: fine, {plural(len(resolved.settings), 'setting')}")
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
    """Convert a file to fullshard's YAML.

    Notes on the keys of the file are written to standard error.
    """
    from fullshard.config.write import write_native

    resolved = _resolve(file)
    _put(write_native(resolved.config), output, overwrite)
    for note in resolved.notes:
        sys.stderr.write(f"note: {note}\n")


@app.command("schema")
def schema(output: _Output = None, overwrite: _Overwrite = False) -> None:
    """Write the JSON schema of fullshard's YAML. Editors use it for completion and validation."""
    from fullshard.config.write import json_schema

    _put(json.dumps(json_schema(), indent=2) + "\n", output, overwrite)


@app.command("explain", cls=RawCommand)
def explain(context: typer.Context) -> None:
    """Print every setting as `fullshard launch` would use it.

    Each line also shows where the value comes from, and the default.

        fullshard config explain [FILE] [--json] [flags of `fullshard launch`]
    """
    from fullshard.cli.launch import read_sources
    from fullshard.config.dialect import shown
    from fullshard.config.flags import parse
    from fullshard.config.resolve import resolve

    line = parse(_with_file_as_flag([argument for argument in context.args if argument != "--json"]))
    if line.option("help"):
        print(context.get_help())
        return
    resolved = resolve(read_sources(line, os.environ))
    rows, notes = list(resolved.explained()), [str(note) for note in resolved.notes]
    if "--json" in context.args:
        print(json.dumps({"settings": rows, "notes": notes}, indent=2))
        return
    if line.option("config_file") is None:
        print("no configuration file was given")
    width = max(len(row["path"]) for row in rows)
    for row in rows:
        source = row["source"] + (f" ({row['written_as']})" if row["written_as"] else "")
        otherwise = "" if row["source"] == "default" else f"  default {shown(row['default'])}"
        print(filled(f"{row['path']:{width}}  {shown(row['value']):18}  {source}{otherwise}"))
    for note in notes:
        print(filled(f"note: {note}"))


def _with_file_as_flag(arguments: list[str]) -> list[str]:
    """Rewrite `explain`'s arguments for `launch`: turn a positional FILE into `--config_file` ahead of the flags."""
    from fullshard.config.flags import parse

    line = parse(arguments)
    if line.target is None:
        return arguments
    before = arguments[: len(arguments) - len(line.arguments) - 1]
    after = parse(line.arguments)
    if after.target is not None:
        raise ConfigError(f"expected one file, got {line.target} and {after.target}", hint="pass only one file")
    return ["--config_file", line.target, *before, *line.arguments]


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
