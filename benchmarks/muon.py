"""What `step()` of Muon takes: sharded here, in one process, and on torch's FSDP2.

    python -m benchmarks.muon [--repeats 5] [--ranks 2]

GPT-2's shape of 124 M parameters, a sequence of 128 tokens per rank and step, fp32. All ways are in the same processes
and take turns, step by step, so a slow minute is one of all of them:

    alone              one process, rank 0, with the batches of all ranks: `torch.optim.Muon` and `torch.optim.AdamW`
    fsdp2              torch's FSDP2, and the same two optimizers on its DTensors
    fsdp2-gathered     torch's FSDP2, and each direction made whole on every rank before the iteration, as
                       published for Moonlight
    fullshard          `fullshard.optim.Muon`

Seconds are the CPU time of the slowest rank, one thread each, which other programs on the machine change little, and
beside it the time on the wall. Ratios are to `alone` within a turn, and medians over the turns. The first step of each
warms up. Losses are those of all ranks; what travels is what the engine says that it sends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.catalog import SHAPES, Row
from benchmarks.models import blocks, build_batches, build_model
from benchmarks.record import RESULTS, Job, describe_machine, git_state
from fullshard.core.events import Event, EventKind
from fullshard.optim import MatrixRule, Muon
from tests.matrices import balance

RESULT = RESULTS / "muon.json"
WAYS = ("alone", "fsdp2", "fsdp2-gathered", "fullshard")
LR = 1e-3
OPTIONS: dict[str, Any] = {"lr": LR, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


class TorchsPair:
    """`torch.optim.Muon` for the matrices of hidden layers, `torch.optim.AdamW` for the rest."""

    def __init__(self, model: nn.Module, muon: type[torch.optim.Muon] = torch.optim.Muon) -> None:
        rule = MatrixRule.of(model)
        others = [*rule.embeddings.values(), *rule.heads.values(), *rule.vectors.values()]
        self._both = muon(rule.matrices.values(), **OPTIONS), torch.optim.AdamW(others, lr=LR, weight_decay=0.1)

    def step(self) -> None:
        """Of both."""
        for optimizer in self._both:
            optimizer.step()

    def zero_grad(self) -> None:
        """Of both."""
        for optimizer in self._both:
            optimizer.zero_grad()


class GatheredMuon(torch.optim.Muon):
    """Muon on DTensors that makes each direction whole on every rank, and updates what the rank has."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        from torch.distributed.tensor import distribute_tensor
        from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(momentum, group["momentum"]).bfloat16().full_tensor()
                made = _zeropower_via_newtonschulz(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
                # Every rank has made the same: it takes its part, and nothing travels.
                update = distribute_tensor(made, parameter.device_mesh, parameter.placements, src_data_rank=None)
                lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-lr)


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to train.

    Attributes:
        model, optimizer: of this rank.
        batches: token ids, one batch per step in turn.
        is_shared: whether all ranks take part.
    """

    model: nn.Module
    optimizer: Any
    batches: list[torch.Tensor]
    is_shared: bool

    def step(self, number: int) -> tuple[float, float, float]:
        """(CPU seconds of `optimizer.step()`, seconds on the wall, loss)."""
        batch = self.batches[number % len(self.batches)]
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        if self.is_shared:
            dist.barrier()  # all begin at once
        begin, cpu = time.perf_counter(), time.process_time()
        self.optimizer.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
        self.optimizer.zero_grad()
        return cpu, wall, float(loss.detach())


def build(name: str, job: Job, events: list[Event]) -> Way | None:
    """One of `WAYS`, on this rank."""
    rank = dist.get_rank()
    if name == "alone" and rank:
        return None
    model = build_model(job)
    batches = build_batches(job, rank)
    if name == "alone":
        others = [build_batches(job, other) for other in range(job.ranks)]
        return Way(model, TorchsPair(model), [torch.cat(parts) for parts in zip(*others, strict=True)], is_shared=False)
    if name == "fullshard":
        from fullshard import shard_model

        shard_model(model, unit_modules=blocks(model), event_sink=events.append)
        return Way(model, Muon(model, **OPTIONS), batches, is_shared=True)
    from torch.distributed.fsdp import fully_shard

    for module in (*blocks(model), model):
        fully_shard(module)
    muon = GatheredMuon if name == "fsdp2-gathered" else torch.optim.Muon
    return Way(model, TorchsPair(model, muon), batches, is_shared=True)


def play(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One rank: a row per way and turn."""
    job = Job(Row(arguments.shape, "fp32", 1, 128), "fullshard", 0, arguments.ranks, 1, 1, 1, LR, "cpu")
    events: list[Event] = []
    ways = {name: build(name, job, events) for name in WAYS}
    for turn in range(arguments.repeats + 1):
        for name, way in ways.items():
            events.clear()
            dist.barrier()  # the others sleep while rank 0 computes alone
            found = (0.0, 0.0, 0.0) if way is None else way.step(turn)
            sent = sum(event.nbytes for event in events if event.kind is EventKind.PIECES_SENT)
            everyone: list[Any] = [None] * arguments.ranks
            dist.all_gather_object(everyone, (*found, sent))
            ranks = everyone[: 1 if name == "alone" else arguments.ranks]
            yield {
                "turn": turn,
                "way": name,
                "cpu_seconds": [one[0] for one in ranks],
                "wall_seconds": max(one[1] for one in ranks),
                "loss": statistics.fmean(one[2] for one in ranks),
                "sent_nbytes": sum(one[3] for one in ranks),
            }
    if dist.get_rank() == 0:
        whole = ways["fullshard"]
        assert whole is not None  # noqa: S101 -- only `alone` is missing on other ranks
        dealing = whole.optimizer._whole[0].dealing
        total = sum(matrix.numel for matrix in dealing.matrices)
        most = 2 * (arguments.ranks - 1) / arguments.ranks * 2 * total
        yield {
            "work": dealing.work(),
            "balance": balance(dealing),
            "matrices_numel": total,
            "most_nbytes": most,
        }


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians over the turns but the first, of each way."""
    turns: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["turn"]:
            turns.setdefault(row["turn"], {})[row["way"]] = row

    def median(of: Callable[[dict[str, dict[str, Any]]], float]) -> float:
        return round(statistics.median(map(of, turns.values())), 3)

    def cpu(turn: dict[str, dict[str, Any]], name: str) -> float:
        return max(turn[name]["cpu_seconds"])  # type: ignore[no-any-return]

    def wall(turn: dict[str, dict[str, Any]], name: str) -> float:
        return turn[name]["wall_seconds"]  # type: ignore[no-any-return]

    return {
        name: {
            "cpu_seconds": median(lambda turn, name=name: cpu(turn, name)),  # type: ignore[misc]
            "wall_seconds": median(lambda turn, name=name: wall(turn, name)),  # type: ignore[misc]
            "cpu_ratio": median(lambda turn, name=name: cpu(turn, name) / cpu(turn, "alone")),  # type: ignore[misc]
            "wall_ratio": median(lambda turn, name=name: wall(turn, name) / wall(turn, "alone")),  # type: ignore[misc]
        }
        for name in WAYS
    }


def _rank(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(arguments.output) + ".store", arguments.ranks)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks, store=store)
    rows = []
    for row in play(arguments):
        rows.append(row)
        if rank == 0 and "turn" in row:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    if rank == 0:
        *rows, dealing = rows
        commit, dirty = git_state()
        record = {
            "command": f"python -m benchmarks.muon --repeats {arguments.repeats} --ranks {arguments.ranks}",
            "commit": commit,
            "dirty": dirty,
            "machine": dataclasses.asdict(describe_machine()),
            "shape": dataclasses.asdict(SHAPES[arguments.shape]),
            "dealing": dealing,
            "medians": summary(rows),
            "losses_differ_by": max(abs(a["loss"] - b["loss"]) for a in rows for b in rows if a["turn"] == b["turn"]),
            "rows": rows,
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(json.dumps(record["medians"], indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Measure in a process per rank, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="124m")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    Path(str(arguments.output) + ".store").unlink(missing_ok=True)
    torch.multiprocessing.spawn(_rank, (arguments,), nprocs=arguments.ranks)
    Path(str(arguments.output) + ".store").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
