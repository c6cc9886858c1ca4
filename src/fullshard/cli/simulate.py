"""The `fullshard simulate` command: the real engine as one rank of many, compared with the planner's prediction."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.cli.options import DeviceName, Json, ModelName, file_word, options_from
from fullshard.core.errors import ConfigError, filled
from fullshard.plan.job import Job

DIFFERS = 1
"""Exit code when the engine deviates from the planner's prediction."""


@options_from(
    Job,
    *("strategy", "shard_size", "precision", "checkpointing", "accumulation", "micro_batch", "wrap_embeddings"),
    *("method", "quantize", "lora_rank", "lora_targets", "attention", "cp", "sp", "ep"),
)
def simulate(
    *,
    model: Annotated[
        str, ModelName("--model", "-m", help="A known name (Llama-3-70B), a config.json or its directory")
    ],
    world_size: Annotated[
        int | None, typer.Option(min=1, max=16384, help="Number of simulated ranks", show_default="those of --devices")
    ] = None,
    devices: Annotated[
        str | None,
        DeviceName("--devices", "-d", help="Number and kind of devices for --timeline: 64xH100", show_default=False),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Time the step on --devices and write a .json trace for Perfetto", parser=file_word),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank to simulate")] = 0,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per sequence")] = 2048,
    as_json: Json = False,
    settings: dict[str, Any],
) -> None:
    """Run one step of the real engine as a single rank of a large job.

    The step needs neither data nor the other ranks. Prints how the model is sharded and how many bytes this rank would
    send. The exit code is 1 if the engine's events or bytes differ from those that `fullshard plan` predicts.

    With --timeline, the step runs in virtual time: each stream of the device that --devices names has its own clock,
    and kernels, collectives and launches take as long as the planner assumes. The command then prints the duration of
    the step, the exposed communication and the peak memory.
    """
    from fullshard.plan.library import load_config

    if timeline is None and (devices is not None or settings["attention"] != Job().attention):
        raise ConfigError("--devices and --attention require a step in virtual time", hint="add --timeline")
    if timeline is None and world_size is None:
        raise ConfigError(
            "the option --world-size is required", hint="use --world-size, or use --devices with --timeline"
        )
    if timeline is not None and devices is None:
        raise ConfigError("--timeline requires --devices", hint="add the devices, for example --devices 64xH100")
    values = load_config(model)
    if values is None:
        raise ConfigError(
            f"{model!r} is a number, but a simulation needs a model",
            hint="pass a model name or the path of a config.json",
        )
    job = Job.of({**settings, "seq_len": seq_len})
    if timeline is not None and devices is not None:
        _time(values, job, devices, world_size, rank, timeline, as_json=as_json)
    elif world_size is not None and _differs(values, job, world_size, rank, as_json=as_json):
        raise typer.Exit(DIFFERS)


def _differs(values: dict[str, Any], job: Job, world_size: int, rank: int, *, as_json: bool) -> bool:
    """Simulate a step, print what the engine did, and return whether that differs from the planner's prediction."""
    from fullshard.api.virtual.simulation import SENT, transformers_model
    from fullshard.api.virtual.simulation import simulate as run
    from fullshard.core.sizes import format_nbytes

    result = run(transformers_model(values), job, world_size=world_size, rank=rank)
    if as_json:
        shown: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "events": len(result.events),
            "main_nbytes": result.main_nbytes,
            "sent": dict(zip(SENT, result.counted, strict=True)),
            "differences": result.differences,
        }
        typer.echo(json.dumps(shown, indent=2))
        return bool(result.differences)
    gather, reduce, replicate, *of_axes = map(format_nbytes, result.counted)
    of_axes = [f", {of_axes[axis == 'sp']} in its {axis} group" for axis in job.axes]
    sent = f"{gather} to unshard, {reduce} to reduce, {replicate} between replicas{''.join(of_axes)}"
    text = f"rank {rank} of {world_size}: {result.sharding}\none step: {len(result.events)} events; sends {sent}"
    differs = [f"differs from the plan: {difference}" for difference in result.differences]
    typer.echo(filled("\n".join([text, *(differs or ["events and bytes are as fullshard plan predicts"])])))
    return bool(result.differences)


def _time(
    values: dict[str, Any], job: Job, devices: str, world_size: int | None, rank: int, trace: Path, *, as_json: bool
) -> None:
    from fullshard.api.virtual.rehearsal import time_step
    from fullshard.core.sizes import format_nbytes
    from fullshard.plan.hardware import parse_cluster

    cluster = parse_cluster(devices)
    if world_size not in (None, cluster.count):
        raise ConfigError(
            f"--world-size {world_size} conflicts with --devices {devices}, which specifies {cluster.count}",
            hint="use only one of the two",
        )
    step = time_step(values, job, cluster, rank=rank)
    step.write_trace(trace)
    if as_json:
        typer.echo(json.dumps({"rank": rank, "devices": str(cluster), **step.figures()}, indent=2))
        return
    ms = {name: f"{1000 * seconds:.1f} ms" for name, seconds in step.figures().items() if isinstance(seconds, float)}
    text = (
        f"rank {rank} of {cluster}, a step in virtual time: {ms['seconds']}\n"
        f"device: computes {ms['compute']}, waits for communication {ms['exposed']} (of {ms['communication']}), "
        f"waits for the host {ms['idle']}\n"
        f"host: {ms['host']} for {step.launches} operations and {step.collectives} collectives; waits {ms['blocked']}\n"
        f"memory: {format_nbytes(step.peak_allocated)} at the peak, {format_nbytes(step.state)} between steps"
    )
    typer.echo(f"{filled(text)}\nwrote {trace}")
