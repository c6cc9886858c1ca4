"""`fullshard simulate`: the real engine as one rank of thousands, without data, against what the planner says."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from fullshard.cli.options import options_from
from fullshard.core.errors import ConfigError
from fullshard.plan.job import Job

DIFFERS = 1
"""Exit code when the engine does something else than the planner says."""


@options_from(Job, "strategy", "shard_size", "precision", "checkpointing", "accumulation", "micro_batch")
def simulate(
    *,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A known name (Llama-3-70B), a config.json or its directory")
    ],
    world_size: Annotated[int, typer.Option(min=1, max=4096, help="Ranks to pretend")],
    rank: Annotated[int, typer.Option(min=0, help="Which of them to be")] = 0,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per sequence")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    settings: dict[str, Any],
) -> None:
    """Shard a model as one rank of many and run a step of the real engine, with no data and no other rank.

    Prints how it is sharded, the bytes this rank would send, and the time the host needs per unit. Exit code 1 if the
    engine's events or bytes are not those that `fullshard plan` predicts.
    """
    from fullshard.api.simulation import simulate as run
    from fullshard.api.simulation import transformers_model
    from fullshard.core.sizes import format_nbytes

    job = Job.of({**settings, "seq_len": seq_len})
    result = run(transformers_model(_config(model)), job, world_size=world_size, rank=rank)
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
    if result.differences:
        raise typer.Exit(DIFFERS)


def _config(model: str) -> dict[str, Any]:
    from fullshard.plan.library import load_config

    values = load_config(model)
    if values is None:
        raise ConfigError(f"{model!r} is a number; a simulation needs a model", hint="name one, or give a config.json")
    return values
