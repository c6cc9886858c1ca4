"""The `fullshard train` command, which starts the processes of a run or takes part in one that a launcher started."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.cli.options import given_settings, options_from, path_word
from fullshard.config.hardware import usable_cpu_count
from fullshard.core.errors import ConfigError
from fullshard.recipes.arguments import TrainArguments, read_recipe

_WORKER = "fullshard.recipes.train"


@options_from(TrainArguments)
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RECIPE.yaml]", help="A file that `fullshard plan --write` wrote; options win", parser=path_word
        ),
    ] = None,
    *,
    context: typer.Context,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            "-n",
            help="Processes to start. Default: 2 on a CPU with two cores or more, one per device otherwise.",
        ),
    ] = None,
    settings: dict[str, Any],
) -> None:
    """Train a causal language model, by default a small Llama.

    Without options, it trains on the source code of Python's standard library for a few minutes.

    Under torchrun or any other launcher that sets RANK, it does not start processes but takes part in the run.
    """
    is_launched = "RANK" in os.environ
    if recipe is not None:
        given = given_settings(context, settings)
        settings, config = read_recipe(recipe, given)
        if config.launch.num_machines > 1 and not is_launched:
            raise ConfigError(
                f"{recipe} is for {config.launch.num_machines} hosts, but fullshard train starts processes on one",
                hint=f"on each host: fullshard launch --config_file {recipe} --no_python fullshard train {recipe}",
            )
        nproc = nproc or (None if is_launched else config.launch.num_processes)
    arguments = TrainArguments.of(settings)
    if is_launched and (nproc is not None or arguments.max_restarts):
        raise ConfigError(
            f"{'--max-restarts' if nproc is None else '--nproc'} has no effect because a launcher has already started "
            "the processes (RANK is set)",
            hint="pass the option to the launcher instead",
        )
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc must be at least 1, got {nproc}")
    if nproc is None and not is_launched:  # otherwise, torch is not needed, and importing it takes seconds
        from fullshard.comm import device as devices
        from fullshard.launch.device import kind_of

        kind = kind_of(arguments.device)
        nproc = max(1, devices.count(kind)) if kind != "cpu" else min(2, usable_cpu_count())
    if is_launched or (nproc == 1 and not arguments.max_restarts):
        from fullshard.recipes.train import run

        run(arguments)
    else:
        from fullshard.launch.local import launch_local

        code = launch_local(
            _WORKER,
            [arguments.model_dump_json()],
            nproc=nproc or 1,
            max_restarts=arguments.max_restarts,
            grace_period=arguments.grace_period,
        )
        sys.exit(code)
