"""`fullshard train`: start the processes of a training run, or take part in one that a launcher started."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from fullshard.cli.options import options_from
from fullshard.core.errors import ConfigError
from fullshard.recipes.arguments import TrainArguments

_WORKER = "fullshard.recipes.train"


@options_from(TrainArguments)
def train(
    *,
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
    """Train a causal language model; by default a small Llama.

    Without options it trains on the source code of Python's standard library, in minutes.

    Under torchrun (or anything else that sets RANK) no processes are started: each takes part in the run.
    """
    arguments = TrainArguments.of(settings)
    if "RANK" in os.environ:
        for flag, is_given in (
            ("--nproc", nproc is not None),
            ("--max-restarts", arguments.max_restarts > 0),
        ):
            if is_given:
                raise ConfigError(
                    f"{flag} has no effect here: a launcher has started the processes already (RANK is set)",
                    hint="give it to the launcher",
                )
        _take_part(arguments)
        return
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc must be at least 1, got {nproc}")
    kind: str = arguments.device
    if nproc is None:  # else nothing here needs torch, whose import takes seconds
        from fullshard.launch.device import kind_of

        kind = kind_of(kind)
    count = _default_nproc(kind) if nproc is None else nproc
    if count == 1 and not arguments.max_restarts:
        _take_part(arguments)
    else:
        sys.exit(_launch(arguments, count))


def _take_part(arguments: TrainArguments) -> None:
    from fullshard.recipes.train import run

    run(arguments)


def _launch(arguments: TrainArguments, nproc: int) -> int:
    from fullshard.launch.local import launch_local
    from fullshard.launch.scratch import scratch_directory

    with scratch_directory("fullshard-train-") as directory:
        path = directory / "arguments.json"
        path.write_text(arguments.to_json(), encoding="utf-8")
        return launch_local(
            _WORKER,
            [str(path)],
            nproc=nproc,
            max_restarts=arguments.max_restarts,
            grace_period=arguments.grace_period,
        )


def _default_nproc(kind: str) -> int:
    from fullshard.comm import device as devices
    from fullshard.launch.processes import usable_cpu_count

    if kind != "cpu":
        return max(1, devices.count(kind))
    return min(2, usable_cpu_count())
