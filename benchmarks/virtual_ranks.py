"""What the same bits at any number of ranks cost: steps with virtual ranks and without, in turn.

    python -m benchmarks.virtual_ranks [--turns 12] [--ranks 2] [--shape 30m]

GPT-2's shape, fp32, AdamW, clipping to 1, one thread per rank, the same global batch in every step, which is run

    whole      in one forward and backward per rank
    sliced     in as many as there are slices on a rank, summed as they come: ordinary accumulation
    virtual    in the same slices, summed in the tree of 8 virtual ranks

A turn is one step of each, in an order that changes from turn to turn, so a slow minute is one of all. What counts
is the median over the turns of the ratio: of CPU seconds of all ranks, which other programs change little, and of the
time on the wall of the slowest rank.
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
from fullshard.engine import MixedPrecisionPolicy, clip_grad_norm_, describe, shard_model
from fullshard.engine.lookup import units_of

RESULT = RESULTS / "virtual-ranks.json"
VIRTUAL_RANKS, WARMUP = 8, 2
WAYS = ("whole", "sliced", "virtual")


class Way:
    """One way to run a step, with a model of its own."""

    def __init__(self, job: Job, name: str, slices: int) -> None:
        self.slices, self.is_virtual = 1 if name == "whole" else slices, name == "virtual"
        model: Any = build_model(job)
        policy = MixedPrecisionPolicy(virtual_ranks=VIRTUAL_RANKS if self.is_virtual else None)
        self.model: Any = shard_model(model, unit_modules=blocks(model), mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.held = 0

    def step(self, tokens: torch.Tensor) -> dict[str, float]:
        """CPU seconds of all ranks, and seconds on the wall of the slowest."""
        share = VIRTUAL_RANKS if self.is_virtual else self.slices
        dist.barrier()
        cpu, begin = time.process_time(), time.perf_counter()
        for part in tokens.chunk(self.slices):
            (self.model(input_ids=part, labels=part).loss / share).backward()
            self.held = max(self.held, self._gradient_nbytes())
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
        slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(seconds)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return {"cpu": float(seconds), "wall": float(slowest)}

    def _gradient_nbytes(self) -> int:
        buckets = (bucket for unit in units_of(self.model) for bucket in unit.buckets)
        return sum(bucket.gradient.held_nbytes for bucket in buckets if bucket.gradient is not None)


def _rank(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(arguments.output) + ".store", arguments.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks, store=store)
    row = Row(arguments.shape, "fp32", arguments.sequences // arguments.ranks, 128)
    job = Job(row, "fullshard", 0, arguments.ranks, WARMUP, arguments.turns, 17, 1e-3, "cpu")
    ways = {name: Way(job, name, VIRTUAL_RANKS // arguments.ranks) for name in WAYS}
    batches = build_batches(job, rank)
    turns = []
    for turn in range(WARMUP + arguments.turns):
        order = WAYS[turn % 3 :] + WAYS[: turn % 3]
        turns.append({name: ways[name].step(batches[turn % len(batches)]) for name in order})
    turns = turns[WARMUP:]
    if rank == 0:
        commit, dirty = git_state()
        record = {
            "command": " ".join(["python -m benchmarks.virtual_ranks", *sys.argv[1:]]),
            "commit": commit,
            "dirty": dirty,
            "machine": dataclasses.asdict(describe_machine()),
            "shape": dataclasses.asdict(SHAPES[arguments.shape]),
            "ranks": arguments.ranks,
            "sequences": arguments.sequences,
            "ratios": {
                f"{what} to {other}": statistics.median(turn["virtual"][what] / turn[other][what] for turn in turns)
                for what in ("cpu", "wall")
                for other in ("whole", "sliced")
            },
            "gradient_nbytes": {name: way.held for name, way in ways.items()},
            "padding": {name: describe(way.model).padding for name, way in ways.items()},
            "turns": turns,
        }
        known = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        known[f"{arguments.shape}, {arguments.ranks} ranks"] = record
        arguments.output.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(json.dumps({key: value for key, value in record.items() if key != "turns"}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Measure in a process per rank, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--shape", choices=SHAPES, default="30m")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.multiprocessing.spawn(_rank, (arguments,), nprocs=arguments.ranks)
    Path(f"{arguments.output}.store").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
