"""`fullshard simulate`: the real engine as one rank of thousands, without data, against what the planner says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.options import file_word, options_from
from fullshard.core.errors import ConfigError
from fullshard.plan.host import HostCosts
from fullshard.plan.job import Job

if TYPE_CHECKING:
    from fullshard.api.simulation import Simulation

DIFFERS = 1
"""Exit code when the engine deviates from the planner's prediction."""


@options_from(
    Job,
    *("strategy", "shard_size", "precision", "checkpointing", "accumulation", "micro_batch", "wrap_embeddings"),
    "attention",
)
def simulate(
    *,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A known name (Llama-3-70B), a config.json or its directory")
    ],
    world_size: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Ranks to pretend", show_default="those of --devices")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", "-d", help="How many of what, for --timeline: 64xH100", show_default=False),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Time the step on --devices, and write a trace for Perfetto into .json", parser=file_word),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="The same as a picture: .png, .svg or .pdf", parser=file_word)
    ] = None,
    launch_us: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e6,
            help="Microseconds of the host per operation, for --timeline",
            show_default=f"{HostCosts().launch * 1e6:g}",
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Which of them to be")] = 0,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per sequence")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    settings: dict[str, Any],
) -> None:
    """Run a step of the real engine as one rank of many.

    There is no data and no other rank. Prints how it is sharded, the bytes this rank would send, and the time the host
    needs per unit. Exit code 1 if the engine's events or bytes are not those that `fullshard plan` predicts.

    With --timeline or --plot the step is run in virtual time: a clock per stream of one of --devices, on which kernels,
    collectives and launches take what the planner's figures say. Prints the step's time, what of the communication
    is exposed, and peak memory.
    """
    if timeline is not None or plot is not None:
        _time(model, devices, world_size, rank, {**settings, "seq_len": seq_len}, timeline, plot, launch_us, as_json)
        return
    if devices is not None or launch_us is not None or settings["attention"] != Job().attention:
        raise ConfigError(
            "--devices, --launch-us and --attention are of a step in virtual time",
            hint="give --timeline or --plot, too; or leave them",
        )
    if world_size is None:
        raise ConfigError("how many ranks?", hint="give --world-size; or --devices and --timeline")
    from fullshard.api.simulation import simulate as run
    from fullshard.api.simulation import transformers_model

    job = Job.of({**settings, "seq_len": seq_len})
    result = run(transformers_model(_config(model)), job, world_size=world_size, rank=rank)
    _print(result, rank, world_size, as_json=as_json)
    if result.differences:
        raise typer.Exit(DIFFERS)


def _print(result: Simulation, rank: int, world_size: int, *, as_json: bool) -> None:
    from fullshard.core.sizes import format_nbytes

    gather, reduce, replicate = result.counted
    if as_json:
        values: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "events": len(result.events),
            "main_nbytes": result.main_nbytes,
            "sent": {"gather": gather, "reduce": reduce, "replicate": replicate},
            "seconds": {"build": result.build_seconds, "shard": result.shard_seconds, "step": result.step_seconds},
            "host_seconds_per_unit": result.unit_seconds,
            "differences": result.differences,
        }
        typer.echo(json.dumps(values, indent=2))
    else:
        typer.echo(f"rank {rank} of {world_size}: {result.sharding}")
        typer.echo(
            f"one step: {len(result.events)} events; sends {format_nbytes(gather)} to unshard, "
            f"{format_nbytes(reduce)} to reduce, {format_nbytes(replicate)} between replicas"
        )
        typer.echo(
            f"host time: {result.shard_seconds:.2f} s to shard, {1000 * result.unit_seconds:.1f} ms per unit and "
            "micro-batch (hooks, views and autograd; no arithmetic)"
        )
        for difference in result.differences:
            typer.echo(f"differs from the plan: {difference}")
        if not result.differences:
            typer.echo("events and bytes are those that fullshard plan predicts")


def _time(
    model: str,
    devices: str | None,
    world_size: int | None,
    rank: int,
    settings: dict[str, Any],
    trace: Path | None,
    picture: Path | None,
    launch_us: float | None,
    as_json: bool,
) -> None:
    from fullshard.api.virtual.rehearsal import time_step
    from fullshard.core.sizes import format_nbytes
    from fullshard.plan.hardware import parse_cluster
    from fullshard.plan.pictures import check_picture

    if devices is None:
        raise ConfigError("--timeline and --plot: on what?", hint="give --devices, such as 64xH100")
    if picture is not None:
        check_picture(picture)
    cluster = parse_cluster(devices)
    if world_size not in (None, cluster.count):
        raise ConfigError(
            f"--world-size {world_size} and --devices {devices}, which are {cluster.count}", hint="leave one out"
        )
    host = None if launch_us is None else HostCosts(launch=launch_us / 1e6)
    step = time_step(_config(model), Job.of(settings), cluster, rank=rank, host=host)
    if trace is not None:
        step.write_trace(trace)
    if picture is not None:
        step.draw(picture)
    if as_json:
        typer.echo(json.dumps({"rank": rank, "devices": str(cluster), **step.figures()}, indent=2))
        return
    ms = {name: f"{1000 * seconds:.1f} ms" for name, seconds in step.figures().items() if isinstance(seconds, float)}
    typer.echo(f"rank {rank} of {cluster}, a step in virtual time: {ms['seconds']}")
    typer.echo(
        f"device: computes {ms['compute']}, waits for communication {ms['exposed']} (of {ms['communication']}), "
        f"waits for the host {ms['idle']}"
    )
    typer.echo(
        f"host: {ms['host']} for {step.launches} operations and {step.collectives} collectives; waits {ms['blocked']}"
    )
    typer.echo(
        f"memory: {format_nbytes(step.peak_allocated)} allocated and {format_nbytes(step.peak_reserved)} reserved at "
        f"the peak; {format_nbytes(step.state)} between steps; a device has {format_nbytes(step.capacity)}"
    )
    for path in (trace, picture):
        if path is not None:
            typer.echo(f"wrote {path}")


def _config(model: str) -> dict[str, Any]:
    from fullshard.plan.library import load_config

    values = load_config(model)
    if values is None:
        raise ConfigError(f"{model!r} is a number; a simulation needs a model", hint="name one, or give a config.json")
    return values
