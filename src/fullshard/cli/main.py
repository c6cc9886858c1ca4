"""The entry point, which finds the subcommand to run and turns exceptions into messages and exit codes."""

import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from fullshard.cli import answer_interrupts, end_interrupted, interrupted
from fullshard.cli.options import RawCommand, ScriptCommand, TrainCommand, check_words
from fullshard.core.errors import FullshardError, tell
from fullshard.core.version import __version__

USAGE_ERROR = 2
"""Exit code of an error that the user can fix, the same as for an unknown option."""

COMMANDS: dict[str, type[TyperCommand] | type[TyperGroup]] = {
    "launch": RawCommand,
    "sft": RawCommand,
    "train": TrainCommand,
    "merge": TyperCommand,
    "chat": TyperCommand,
    "plan": TyperCommand,
    "recipe": TyperGroup,
    "simulate": TyperCommand,
    "rehearse": ScriptCommand,
    "config": TyperGroup,
    "ckpt": TyperGroup,
    "watch": TyperCommand,
    "report": TyperCommand,
    "doctor": TyperCommand,
}
"""The subcommands in the order of the help page. Each is a module of this package with a function of the same name. The
module of a group has a Typer named `app` instead."""


class Commands(TyperGroup):
    """A command group that imports the module of a subcommand only when it is used, which halves the startup time."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names: Any = dict.fromkeys(COMMANDS)  # for the list of commands and for suggestions
        self.commands = names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command named `cmd_name`, or None if it does not exist."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None


@functools.cache
def load_command(name: str) -> Any:
    """Import the module of a subcommand, and return the subcommand."""
    module = importlib.import_module(f"fullshard.cli.{name}")
    kind = COMMANDS[name]
    if issubclass(kind, TyperGroup):
        command = get_command(module.app)
    else:
        function = getattr(module, name)
        alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        alone.command(name, cls=kind, help=function.__doc__)(function)
        command = get_command(alone)
    command.name = name
    return command


app = typer.Typer(
    name="fullshard",
    cls=Commands,
    help="Fully Sharded Data Parallel training for PyTorch.",
    no_args_is_help=True,
    # Plain text, which can be piped; rich takes a fifth of the startup time.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    # Options may be written like settings in files: --batch_size.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fullshard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def _is_named(file: object) -> bool:
    """Return whether the command line names `file`, a path inside it, or a folder that contains it."""
    if not isinstance(file, str | Path):
        return False
    words = (word.split("=", 1)[-1] if word.startswith("-") else word for word in sys.argv[1:])
    named = [Path(os.path.expanduser(word)) for word in words if word]  # noqa: PTH111 - Path's raises
    real = Path(os.path.realpath(file))
    return any(name.is_relative_to(file) or real.is_relative_to(os.path.realpath(name)) for name in named)


def main() -> None:
    """Run the command line of this process and exit."""
    answer_interrupts()
    try:
        if sys.argv[1:2] != ["launch"]:  # `launch` leaves a script's own arguments as they are
            check_words(sys.argv[1:])
        app()
    except (KeyboardInterrupt, SystemExit):
        if interrupted:
            end_interrupted()
        raise
    except FullshardError as error:
        tell(f"{type(error).__name__}: {error}")
        sys.exit(USAGE_ERROR)
    except ModuleNotFoundError as error:
        if error.name != "torch":  # which `plan`, `recipe` and `config` do without
            raise
        sys.stderr.write(
            "ModuleNotFoundError: this command needs torch, which is not installed\nhint: pip install torch\n"
        )
        sys.exit(USAGE_ERROR)
    except OSError as error:
        if error.strerror is None or not _is_named(error.filename):
            raise
        sys.stderr.write(f"{type(error).__name__}: {error.filename}: {error.strerror}\n")
        sys.exit(USAGE_ERROR)
