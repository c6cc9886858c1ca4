"""The `fullshard plan` command, which predicts the memory, traffic, and time of a run without importing torch."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.options import DeviceName, Json, ModelName, file_word, given_settings, options_from, path_word, word
from fullshard.config.load import load_file
from fullshard.config.resolve import resolve
from fullshard.config.write import save_text
from fullshard.core.errors import ConfigError, plural
from fullshard.core.files import read_bytes
from fullshard.core.sizes import parse_size
from fullshard.plan.job import Job

if TYPE_CHECKING:
    from fullshard.plan.ask import Answer
    from fullshard.plan.evaluate import Plan

DOES_NOT_FIT = 1
"""Exit code of a plan that does not fit."""


Model = Annotated[
    str | None,
    ModelName("--model", "-m", help="A known name (Llama-2-7B), a config.json or its directory, or a number (7B)"),
]
Devices = Annotated[
    str | None, DeviceName("--devices", "-d", help="Number and kind: 8xH100, 1024xA100-80, 2xCPU", show_default=False)
]
Config = Annotated[
    Path | None,
    typer.Option(help="Plan this configuration file (any dialect of `fullshard launch`); flags win", parser=path_word),
]
Auto = Annotated[bool, typer.Option("--auto", help="Search for the fastest plan that fits; same as --strategy auto")]
Margin = Annotated[
    float | None,
    typer.Option(min=1, max=100, help="Percent of a device that --auto and proposals may fill. Default: 92"),
]
Write = Annotated[
    Path | None, typer.Option(help="Write the configuration that `fullshard launch` runs", parser=path_word)
]
Calibrate = Annotated[
    Path | None,
    typer.Option(help="Measure this machine into FILE.json, which --devices 2xFILE.json then names", parser=file_word),
]


@options_from(Job)
def plan(
    *,
    context: typer.Context,
    model: Model = None,
    devices: Devices = None,
    hosts: Annotated[
        int | None, typer.Option(min=1, help="Number of hosts of the devices. Default: fully used hosts")
    ] = None,
    host_memory: Annotated[
        int | None,
        typer.Option(
            help="Memory of each host, such as 512GiB. Default: of a typical host",
            parser=functools.partial(word, parse_size),
            metavar="<size>",
        ),
    ] = None,
    config: Config = None,
    auto: Auto = False,
    margin: Margin = None,
    details: Annotated[bool, typer.Option("--details", help="Print all tables and notes")] = False,
    price: Annotated[
        float | None, typer.Option(min=0, help="Price of a device and hour, to print the cost of a billion tokens")
    ] = None,
    as_json: Json = False,
    write: Write = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists")] = False,
    calibrate: Calibrate = None,
    web: Annotated[bool, typer.Option("--web", help="Ask in a browser, on a page for this host only")] = False,
    web_address: Annotated[
        str, typer.Option(help="Address and port of the page; 0.0.0.0:7860 shows it to other hosts")
    ] = "127.0.0.1:7860",
    settings: dict[str, Any],
) -> None:
    """Predict the memory, traffic, and time of a training run.

    Reports whether the run fits and, if it does not, what would make it fit. The exit code is 0 if it fits, 1 if it
    does not, and 2 if the arguments are invalid.
    """
    given = given_settings(context, context.params)
    if "web_address" in given and not web:
        raise ConfigError("--web-address has no effect without --web", hint="add --web")
    if web:
        if others := sorted(given.keys() - {"web", "web_address"}):
            option = others[0].removeprefix("as_").replace("_", "-")
            raise ConfigError(f"--{option} has no effect with --web", hint="ask on the page")
        from fullshard.cli.plan_page import serve

        serve(web_address)
        return
    if overwrite and write is None and calibrate is None:
        raise ConfigError(
            "--overwrite has no effect without --write", hint="set the file to write with --write FILE.yaml"
        )
    if calibrate is not None:
        _calibrate(calibrate, overwrite=overwrite)
        if model is None:
            return
        devices = devices or (f"2x{calibrate}" if config is None else str(calibrate))
    from fullshard.plan.ask import ask, section_plan

    recipe = section_plan(config)
    model = recipe.get("model") if model is None else model
    devices = recipe.get("devices") if devices is None else devices
    if model is None:
        raise ConfigError(
            "the option --model is required",
            hint="pass a model name, for example --model Llama-3.1-8B, or the path of a config.json",
        )
    about: dict[str, Any] = {"hosts": hosts, "config": config, "host_memory": host_memory}
    answer = ask(model, devices, given_settings(context, settings), auto=auto, margin=margin, price=price, **about)
    if write is not None and answer.fits:
        _write(answer.plan, write, config, model, str(devices), overwrite=overwrite)
    if as_json:
        typer.echo(json.dumps(answer.values(), indent=2))
    else:
        typer.echo(answer.text())
        _print_details(answer) if details else _name_details(answer)
    if not answer.fits:
        if write is not None:
            typer.echo(f"{write} was not written because the plan {answer.plan.verdict}", err=True)
        raise typer.Exit(DOES_NOT_FIT)


_PIPE_WIDTH = 400
"""The width of output to a pipe, so large that lines are not wrapped."""


def _print_details(answer: Answer) -> None:
    from rich.console import Console

    from fullshard.plan.report import as_tables, front_table

    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if is_sized else _PIPE_WIDTH)
    console.print(as_tables(answer.plan, answer.changes))
    if answer.front:
        console.print(front_table(answer.front, "no other is both faster and smaller"))


def _name_details(answer: Answer) -> None:
    from fullshard.plan.evaluate import notes_of

    notes, others = len(notes_of(answer.plan)), len(answer.front) - 1
    besides = f" and {plural(others, 'other plan')}" if others > 0 else ""
    typer.echo(f"--details prints all figures, {plural(notes, 'note')} on what is assumed{besides}")


def _write(plan: Plan, path: Path, planned: Path | None, model: str, devices: str, *, overwrite: bool) -> None:
    """Write the recipe of the planned run. Settings in the file `planned` that a plan does not cover are kept."""
    from fullshard.plan.recipe import as_recipe

    settings = {} if planned is None else resolve([load_file(planned)]).settings
    kept = {name: setting.value for name, setting in settings.items()}
    text = as_recipe(plan, model, devices, path.name, kept)
    save_text(text, path, overwrite=overwrite)
    typer.echo(f"wrote {path}, whose first lines say how to run it", err=True)


def _calibrate(path: Path, *, overwrite: bool) -> None:
    if path.suffix != ".json":
        raise ConfigError(
            f"the calibration file {path} does not have the suffix .json", hint="use a file name that ends in .json"
        )
    if path.exists() and not overwrite and b"memory_bandwidth" not in read_bytes(path):
        raise ConfigError(
            f"{path} exists but is not a calibration file", hint="choose another file, or add --overwrite"
        )
    from fullshard.api.calibration import calibrate

    device = calibrate(path)
    typer.echo(
        f"wrote {path}: {device.flops / 1e9:,.0f} GFLOP/s in bfloat16, {device.flops_fp32 / 1e9:,.0f} in float32, "
        f"memory {device.memory_bandwidth / 1e9:.1f} GB/s, between two processes {device.link / 1e9:.2f} GB/s",
        err=True,
    )
