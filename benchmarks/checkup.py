"""What it costs to compare the ranks (weights of replicas, and who is slow), against a step of the same model.

    python -m benchmarks.checkup [--steps 10] [--ranks 2]

GPT-2's shape of 124 M parameters under NO_SHARD, so that every rank looks at all of it; 128 tokens per rank and step,
fp32, AdamW. After each step the comparison is made once, by itself. What counts is its median over that of the steps.
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

from benchmarks.catalog import Row
from benchmarks.models import blocks, build_batches, build_model
from benchmarks.record import RESULTS, Job, describe_machine, git_state
from fullshard.engine.lookup import units_of
from fullshard.features import shard_model
from fullshard.features.consistency import ConsistencyCheck

RESULT = RESULTS / "checkup.json"


def _rank(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(arguments.output) + ".store", arguments.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks, store=store)
    job = Job(Row("124m", "fp32", 1, 128), "fullshard", 0, arguments.ranks, 1, arguments.steps, 17, 1e-3, "cpu")
    model: Any = build_model(job)
    model = shard_model(model, unit_modules=blocks(model), strategy="NO_SHARD")
    model.set_replica_check("raise", every=0)
    check = ConsistencyCheck.of(units_of(model)[-1].schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = build_batches(job, rank)
    seconds: dict[str, list[float]] = {"step": [], "checkup": []}
    for number in range(arguments.steps + 1):
        dist.barrier()
        begin = time.perf_counter()
        tokens = batches[number % len(batches)]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds["step"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        check.run()
        seconds["checkup"].append(time.perf_counter() - begin)
    if rank == 0:
        medians = {what: statistics.median(values[1:]) for what, values in seconds.items()}
        ratio = medians["checkup"] / medians["step"]
        commit, dirty = git_state()
        record = {
            "command": " ".join(["python -m benchmarks.checkup", *sys.argv[1:]]),
            "commit": commit,
            "dirty": dirty,
            "machine": dataclasses.asdict(describe_machine()),
            "medians": medians,
            "of_a_step": ratio,
            "of_100_steps": ratio / 100,
            "seconds": seconds,
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"{medians}, {ratio:.2%} of a step, {ratio / 100:.4%} of 100\n")
    dist.destroy_process_group()


def main() -> None:
    """Measure in a process per rank, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.multiprocessing.spawn(_rank, (arguments,), nprocs=arguments.ranks)
    Path(f"{arguments.output}.store").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
