"""The entry point: collects the subcommands and turns errors into messages and exit codes."""

from __future__ import annotations

import sys

import typer

from fullshard import __version__
from fullshard.cli.ckpt import app as ckpt
from fullshard.cli.config import app as config
from fullshard.cli.doctor import doctor
from fullshard.cli.launch import RawCommand, launch
from fullshard.cli.merge import merge
from fullshard.cli.plan import plan
from fullshard.cli.simulate import simulate
from fullshard.cli.train import train
from fullshard.core.errors import FullshardError

USAGE_ERROR = 2
"""Exit code of an error that the user can mend, the same as for an unknown option."""

app = typer.Typer(
    name="fullshard",
    help="Fully Sharded Data Parallel training for PyTorch.",
    no_args_is_help=True,
    # Plain text: it pipes, and rich costs a fifth of the start-up time.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("launch", cls=RawCommand, help=launch.__doc__)(launch)
app.command("train", help=train.__doc__)(train)
app.command("merge", help=merge.__doc__)(merge)
app.command("plan", help=plan.__doc__)(plan)
app.command("simulate", help=simulate.__doc__)(simulate)
app.add_typer(config, name="config")
app.add_typer(ckpt, name="ckpt")
app.command("doctor", help=doctor.__doc__)(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fullshard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        app()
    except FullshardError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(USAGE_ERROR)
