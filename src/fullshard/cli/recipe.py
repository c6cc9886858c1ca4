"""The `fullshard recipe` commands, which list, show, and copy the recipes that come with fullshard."""

import json
from pathlib import Path
from typing import Annotated

import typer

import fullshard
from fullshard.cli.options import Json, path_word
from fullshard.config.document import read_document
from fullshard.config.settings import suggestion
from fullshard.config.write import save_text
from fullshard.core.errors import ConfigError

app = typer.Typer(
    help="List, show, and copy recipes that the planner has written.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Name = Annotated[
    str, typer.Argument(help="A name that `fullshard recipe list` prints", autocompletion=lambda: list(_files()))
]


@app.command("list")
def print_all(as_json: Json = False) -> None:
    """List the recipes, with their devices, memory and speed. With --json, list all that the planner has written."""
    from rich.console import Console
    from rich.table import Table

    files = {name: {entry.key: entry.plain for entry in read_document(path)} for name, path in _files().items()}
    if as_json:
        typer.echo(json.dumps([{"recipe": name, **sections["plan"]} for name, sections in files.items()], indent=2))
        return
    table = Table("recipe", "devices", "GiB", "tokens/s", box=None, pad_edge=False)
    for name, plan in ((name, sections["plan"]) for name, sections in files.items()):
        table.add_row(name, plan["devices"], f"{plan['memory_gib']:.1f}", f"{plan['tokens_per_second']:,}")
    Console().print(table)


@app.command()
def show(name: Name) -> None:
    """Print a recipe. Its first lines say how to run it."""
    typer.echo(_find(name).read_text(encoding="utf-8"), nl=False)


@app.command()
def copy(
    name: Name,
    target: Annotated[
        Path | None, typer.Argument(help="The file to write. Default: NAME.yaml here", parser=path_word)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists")] = False,
) -> None:
    """Copy a recipe to a file of yours, to run or to change it."""
    source = _find(name)
    path = Path(source.name) if target is None else target / source.name if target.is_dir() else target
    save_text(source.read_text(encoding="utf-8").replace(source.name, path.name), path, overwrite=overwrite)
    typer.echo(f"wrote {path}, whose first lines say how to run it")


def _files() -> dict[str, Path]:
    """Return the recipes by name, from the installed package, or from the repository if it is installed as editable."""
    package = Path(fullshard.__file__).parent
    installed = sorted(package.joinpath("recipes/files").glob("*.yaml"))
    files = installed or sorted(package.parent.parent.joinpath("recipes").glob("*.yaml"))
    return {path.stem: path for path in files}


def _find(name: str) -> Path:
    if (found := _files().get(name.removesuffix(".yaml"))) is None:
        raise ConfigError(f"no recipe has the name {name!r}", hint=suggestion(name, _files()))
    return found
