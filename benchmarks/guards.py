"""What the guards of a step cost: gradients looked at for NaN, ranks compared, waits watched, on and off in turn.

    python -m benchmarks.guards [--turns 20] [--repeats 3] [--ranks 2]

GPT-2's shape of 124 M parameters, a sequence of 128 tokens per rank and step, fp32, AdamW, no clipping. A turn is a
step with and a step without, in an order that changes from turn to turn, with the same model, so a slow minute is one
of both. CPU seconds are those of all threads of all ranks, which other programs change little; beside them the time on
the wall of the slowest rank. What counts is the median over the turns of what a step costs more with guards.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.catalog import SHAPES, Row
from benchmarks.models import blocks, build_batches, build_model
from benchmarks.record import RESULTS, Job, describe_machine, git_state
from fullshard.comm import waiting
from fullshard.comm.waiting import PROGRESS
from fullshard.engine.extension import Extension, Extensions
from fullshard.engine.lookup import units_of
from fullshard.features import shard_model
from fullshard.features.watchdog import DesyncDetection
from fullshard.features.watchdog.watchdog import keep_status_in

RESULT = RESULTS / "guards.json"
WARMUP = 3


class Nowhere:
    """Where waits are told to nobody."""

    given_up = ""

    def enter(self, what: str, step: int | None = None, groups: Any = ()) -> None:
        """Nothing."""

    def leave(self) -> None:
        """Nothing."""


NOWHERE = Nowhere()


def _without(kind: type[Extension], extensions: Extensions) -> dict[str, Any]:
    """The moments of a step as a model has them without this extension."""
    tuples = {name: methods for name, methods in vars(extensions).items() if isinstance(methods, tuple)}
    return {name: tuple(m for m in methods if not isinstance(m.__self__, kind)) for name, methods in tuples.items()}


def play(arguments: argparse.Namespace, rank: int) -> list[dict[str, float]]:
    """The turns of one repeat, the same on every rank: seconds of a step with and without guards."""
    row = Row(arguments.shape, "fp32", 1, arguments.tokens)
    job = Job(row, "fullshard", 0, arguments.ranks, WARMUP, arguments.turns, 17, 1e-3, "cpu")
    model: Any = build_model(job)
    model = shard_model(model, unit_modules=blocks(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = build_batches(job, rank)
    losses: list[float] = []
    schedule = units_of(model)[-1].schedule
    moments = {True: dict(vars(schedule.extensions)), False: _without(DesyncDetection, schedule.extensions)}
    clock = time.perf_counter

    def step(number: int, is_guarded: bool) -> tuple[float, float]:
        model.set_nonfinite_gradients("raise" if is_guarded else "off")
        vars(schedule.extensions).update(moments[is_guarded])
        vars(waiting)["PROGRESS"] = PROGRESS if is_guarded else NOWHERE
        dist.barrier()
        cpu, wall = time.process_time(), clock()
        tokens = batches[number % len(batches)]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = torch.tensor([time.process_time() - cpu, 0.0], dtype=torch.float64)
        slowest = torch.tensor([clock() - wall], dtype=torch.float64)
        dist.all_reduce(seconds)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        losses.append(float(loss.detach()))
        return float(seconds[0]), float(slowest)

    for number in range(WARMUP):
        step(number, True)
    turns = []
    for turn in range(arguments.turns):
        order = (True, False) if turn % 2 else (False, True)
        measured = {is_guarded: step(turn, is_guarded) for is_guarded in order}
        names = {True: "on", False: "off"}
        turns.append(
            {f"{what}_{names[g]}": measured[g][i] for g in (True, False) for i, what in enumerate(("cpu", "wall"))}
        )
    turns[-1]["loss"] = losses[-1]
    return turns


def _rank(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    keep_status_in(Path(f"{arguments.output}.status{rank}"))
    store = dist.FileStore(str(arguments.output) + ".store", arguments.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks, store=store)
    repeats = [play(arguments, rank) for _ in range(arguments.repeats)]
    if rank == 0:
        commit, dirty = git_state()
        costs = {
            what: [statistics.median(t[f"{what}_on"] / t[f"{what}_off"] - 1 for t in turns) for turns in repeats]
            for what in ("cpu", "wall")
        }
        record = {
            "command": " ".join(["python -m benchmarks.guards", *sys.argv[1:]]),
            "commit": commit,
            "dirty": dirty,
            "machine": dataclasses.asdict(describe_machine()),
            "shape": dataclasses.asdict(SHAPES[arguments.shape]),
            "cost": costs,
            "repeats": repeats,
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(json.dumps(costs, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Measure in a process per rank, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--shape", choices=SHAPES, default="124m")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.multiprocessing.spawn(_rank, (arguments,), nprocs=arguments.ranks)
    for name in ("store", *(f"status{rank}" for rank in range(arguments.ranks))):
        Path(f"{arguments.output}.{name}").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
