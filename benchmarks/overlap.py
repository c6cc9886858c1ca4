"""How much of the time of collectives is hidden behind computation, from a profile of one step on accelerators.

    python -m benchmarks.overlap [--ranks 2] [--model 1b]

Ranks may outnumber the GPUs: then they share one, over loopback sockets (see `benchmarks.run`), which makes collectives
slow, and how much of one is covered says more than how long it takes. Prints, per kind of collective, its time and the
share of it during which a kernel of the model ran; and the losses.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from benchmarks.engines import ENGINES
from benchmarks.models import build_batches, build_model
from benchmarks.record import Job, Row

Span = tuple[float, float]


def merged(spans: Sequence[Span]) -> list[Span]:
    """The same moments, in order, as spans that do not touch."""
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def covered(spans: Sequence[Span], by: Sequence[Span]) -> float:
    """Length of the moments of `spans` that are in `by` too."""
    others = merged(by)
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in merged(spans) for b, e in others)


def _job(model: str, ranks: int, sequences: int, engine: str) -> Job:
    row = Row(model, "bf16", sequences, 512)
    return Job(row, engine, repeat=0, ranks=ranks, warmup=3, steps=1, seed=17, lr=1e-3, device="cuda")


def _train(job: Job, rank: int) -> tuple[list[float], list[tuple[str, float, float]]]:
    """Losses of a few steps, and (name, begin, end) in microseconds of every kernel in the last."""
    step = ENGINES[job.engine].build(build_model(job), job)
    batches = build_batches(job, rank)
    losses = [step(batches[i % len(batches)]).item() for i in range(job.warmup)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        losses.append(step(batches[job.warmup % len(batches)]).item())
        torch.cuda.synchronize()
    on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return losses, [(e.name, e.time_range.start, e.time_range.end) for e in on_device]


def _rank(rank: int, ranks: int, port: int, model: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    if ranks > torch.cuda.device_count():
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl")
    losses, kernels = _train(_job(model, ranks, 2, "fullshard"), rank)
    mean = torch.tensor(losses, device="cuda")
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if rank == 0:
        compute = [(b, e) for name, b, e in kernels if "nccl" not in name.lower() and "mem" not in name.lower()]
        for kind in ("AllGather", "ReduceScatter"):
            spans = [(b, e) for name, b, e in kernels if "nccl" in name.lower() and kind in name]
            total = sum(end - begin for begin, end in merged(spans))
            share = covered(spans, compute) / total if total else float("nan")
            print(f"{kind}: {len(spans)} kernels, {total / 1e3:.2f} ms, {share:.0%} of it beside computation")
        print("losses:", " ".join(f"{loss:.6f}" for loss in mean.tolist()))
    dist.destroy_process_group()


def main() -> None:
    """Profile, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="1b")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: on CPUs benchmarks.timeline shows the same")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (arguments.ranks, port, arguments.model), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
