"""The `fullshard plan` command, which predicts the memory, traffic, and time of a run without importing torch."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.options import file_word, given_settings, options_from, path_word, word
from fullshard.config.dialect import shown
from fullshard.config.load import load_file
from fullshard.config.resolve import Resolved, resolve
from fullshard.config.values import integer
from fullshard.config.write import save_text
from fullshard.core.errors import ConfigError
from fullshard.core.files import read_bytes
from fullshard.core.sizes import GIB, parse_size
from fullshard.plan.job import Job

if TYPE_CHECKING:
    from fullshard.config.dialect import Reading
    from fullshard.plan.evaluate import Plan
    from fullshard.plan.hardware import Cluster
    from fullshard.plan.shapes import ModelShape

DOES_NOT_FIT = 1
"""Exit code of a plan that does not fit."""

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A known name (Llama-2-7B), a config.json or its directory, or a number (7B)",
        show_default=False,
    ),
]
Devices = Annotated[
    str | None, typer.Option("--devices", "-d", help="Number and kind: 8xH100, 1024xA100-80, 2xCPU", show_default=False)
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    write: Write = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists")] = False,
    calibrate: Calibrate = None,
    settings: dict[str, Any],
) -> None:
    """Predict the memory, traffic, and time of a training run.

    Reports whether the run fits and, if it does not, what would make it fit. The exit code is 0 if it fits, 1 if it
    does not, and 2 if the arguments are invalid.
    """
    from fullshard.plan.answer import PlanQuestion, as_text, filled
    from fullshard.plan.evaluate import MARGIN, changes_that_fit, evaluate
    from fullshard.plan.library import load_model
    from fullshard.plan.report import as_dict
    from fullshard.plan.search import pareto, search

    if overwrite and write is None and calibrate is None:
        raise ConfigError(
            "--overwrite has no effect without --write", hint="set the file to write with --write FILE.yaml"
        )
    if calibrate is not None:
        _calibrate(calibrate, overwrite=overwrite)
        if model is None:
            return
        devices = devices or (f"2x{calibrate}" if config is None else str(calibrate))
    if model is None:
        raise ConfigError(
            "the option --model is required",
            hint="pass a model name, for example --model Llama-3.1-8B, or the path of a config.json",
        )
    part = MARGIN if margin is None else margin / 100
    described, notes = load_model(model)
    given = given_settings(context, settings)
    notes += _within_positions(described, given, settings["seq_len"])
    if str(given.get("strategy")).lower() == "auto":
        auto = True
        del given["strategy"]
    asked = dict(given)
    job, cluster, more = _question(given, devices, hosts, config, host_memory)
    notes += more
    front: list[Plan] = []
    if auto:
        fixed = given.keys() - {"micro_batch", "accumulation"}
        front = pareto(search(described, job, cluster, fixed=fixed, margin=part))
    chosen = front[0] if front else evaluate(described, job, cluster)
    changes = [] if chosen.fits else changes_that_fit(chosen, margin=part)
    if write is not None:
        _write(chosen, write, config, str(model), str(devices), overwrite=overwrite)
    if as_json:
        values = as_dict(chosen, changes, notes) | ({"pareto": list(map(as_dict, front))} if front else {})
        typer.echo(json.dumps(values | ({} if price is None else {"cost": chosen.cost_of(price)}), indent=2))
    else:
        options = {
            "--model": model,
            "--devices": devices,
            "--hosts": hosts,
            "--config": config,
            "--host-memory": host_memory and f"{host_memory / GIB:.12g}GiB",
        }
        typer.echo(as_text(chosen, changes, PlanQuestion(options, asked, price)))
        for note in notes:
            typer.echo(filled(f"note: {note}"))
        _print_details(chosen, changes, front) if details else _name_details(chosen, front)
    if not chosen.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _within_positions(model: ModelShape, given: dict[str, Any], seq_len: int) -> list[str]:
    """Reduce the default length to what the model supports, and return a note. Raise if the user chose the length."""
    if model.positions is None or seq_len <= model.positions:
        return []
    if "seq_len" in given:
        raise ConfigError(
            f"{model.name} supports sequences of up to {model.positions} tokens, got {seq_len}",
            hint=f"use a seq_len of at most {model.positions}",
        )
    given["seq_len"] = model.positions
    return [f"{model.name} supports sequences of up to {model.positions} tokens, so the plan uses that many"]


def _question(
    given: dict[str, Any], devices: str | None, hosts: int | None, config: Path | None, host_memory: int | None = None
) -> tuple[Job, Cluster, list[str]]:
    """Return the job, the cluster, and notes for the user. Flags take precedence over the configuration file."""
    from fullshard.plan.hardware import parse_cluster, split_devices

    if devices is None:
        raise ConfigError(
            "the option --devices is required", hint="pass the number and type of devices, for example --devices 8xH100"
        )
    if config is None:
        return Job.of(given), parse_cluster(devices, hosts, host_memory), []

    resolved = resolve([reading := load_file(config)])
    batch = _micro_batch_of(reading)
    job = Job.from_run(resolved.config, **({} if batch is None else {"micro_batch": batch}) | given)
    notes = [str(note) for note in resolved.notes if batch is None or note.key != _MICRO_BATCH] + _unplanned(resolved)
    if "precision" not in given and "precision.mode" not in resolved.settings:
        notes.append(f"{config} does not set the precision: planned in {job.compute_dtype}, as the model is stored")
    processes = resolved.config.launch.num_processes
    if processes is not None and split_devices(devices)[0] is None:
        devices = f"{processes}x{devices}"  # the file sets the number, the flag the kind
    cluster = parse_cluster(devices, hosts or resolved.config.launch.num_machines, host_memory)
    if processes not in (None, cluster.count):
        raise ConfigError(
            f"{config} starts {processes} processes, but --devices {devices} specifies {cluster.count}",
            hint=f"use --devices {cluster.device.name}, or change the file",
        )
    return job, cluster, notes


_UNPLANNED = {
    "sharding.wrap": "planned with a unit per layer; larger units need more memory",
    "sharding.wrap_classes": "planned as the model's layers; other units need other memory and traffic",
    "sharding.ignored_modules": "planned as sharded, but every rank holds all of them",
    "parallelism.cp_comm_strategy": "planned as allgather, which holds all keys and values at a time",
    "precision.param_dtype": "planned with the dtypes of precision.mode only",
}
"""Settings that affect a run but not a plan, and the consequences for the plan's figures."""


def _unplanned(resolved: Resolved) -> list[str]:
    """Return a line for each setting of the configuration file that affects the run but that the planner ignores."""
    found = []
    for path, meaning in _UNPLANNED.items():
        setting = resolved.settings.get(path)
        if setting is not None and setting.value not in (None, "auto", "class", "allgather", ()):
            found.append(f"{setting.origin}: {setting.key} ({path} = {shown(setting.value)}): {meaning}")
    return found


_MICRO_BATCH = "train_micro_batch_size_per_gpu"


def _micro_batch_of(reading: Reading) -> int | None:
    """Return the micro-batch size from a DeepSpeed file, or None if the file does not set it to a number."""
    entry = reading.entries.get(_MICRO_BATCH)
    if entry is None or entry.value is None or str(entry.value).strip().lower() == "auto":
        return None
    return integer(entry.value)


_PIPE_WIDTH = 400
"""The width of output to a pipe, so large that lines are not wrapped."""


def _print_details(plan: Plan, changes: list[Any], front: list[Plan]) -> None:
    from rich.console import Console

    from fullshard.plan.report import as_tables, front_table

    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if is_sized else _PIPE_WIDTH)
    console.print(as_tables(plan, changes))
    if front:
        console.print(front_table(front, "no other is both faster and smaller"))


def _name_details(plan: Plan, front: list[Plan]) -> None:
    from fullshard.plan.evaluate import notes_of

    notes, others = len(notes_of(plan)), len(front) - 1
    besides = f" and {others} other plan{'s' * (others > 1)}" if others > 0 else ""
    typer.echo(f"--details prints all figures, {notes} note{'s' * (notes != 1)} on what is assumed{besides}")


def _write(plan: Plan, path: Path, planned: Path | None, model: str, devices: str, *, overwrite: bool) -> None:
    """Write the recipe of the planned run. Settings in the file `planned` that a plan does not cover are kept."""
    from fullshard.plan.recipe import as_recipe

    if not plan.fits:
        raise ConfigError(
            f"{path} was not written because the plan {plan.verdict}", hint="change the plan, or use --auto"
        )
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
