"""`python -m benchmarks.run`: measures the engines on the rows, interleaved, and writes one record.

Every (row, repeat) runs each engine once in fresh processes, so that peak memory is an engine's own, and in an order
that rotates from repeat to repeat, so that a machine that slows down for a while does not favor anyone.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from torch.distributed import TCPStore

from benchmarks.catalog import BACKENDS, BARE, DEFAULT_ENGINES, DEFAULT_ROWS, ENGINES, QUICK_ROWS, ROWS, SHAPES, Row
from benchmarks.record import (
    FORMAT,
    JOB,
    RANK_RESULT,
    RESULTS,
    ROOT,
    Job,
    RankResult,
    Record,
    Run,
    describe_machine,
    git_state,
    save,
)
from benchmarks.table import render
from fullshard.config.hardware import usable_cpu_count
from fullshard.plan.evaluate import evaluate
from fullshard.plan.families import from_config
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job as PlannedJob

# How long the other ranks may take to end by themselves once one has failed; they usually wait for it in a collective.
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05

RunRanks = Callable[[Job, Path, float], str | None]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; wrong names end the program with the list of right ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="names or patterns such as '124m-*'")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), metavar="ENGINE",
                        help=f"of {', '.join(ENGINES)}; default all that train as they are, on GPUs "
                        f"{', '.join(DEFAULT_ENGINES['cuda'])}")  # fmt: skip
    parser.add_argument("--repeats", type=_at_least_one, help="default 5, with --quick 1")
    parser.add_argument("--steps", type=_at_least_one, help="measured steps per run, default 10, with --quick 5")
    parser.add_argument("--warmup", type=_at_least_one, help="steps before them, default 3, with --quick 2")
    parser.add_argument("--ranks", type=_at_least_one, default=2, help="processes of the distributed engines")
    parser.add_argument("--device", default="cpu", choices=list(BACKENDS))
    parser.add_argument("--compile", action="store_true", help="torch.compile each transformer block")
    parser.add_argument("--watch-memory", action="store_true",
                        help="sample proportional memory too, which makes steps slower")  # fmt: skip
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which one run is an error")
    parser.add_argument("--name", help="of the record in benchmarks/results, default such as cpu-2ranks")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one small row once, a few steps")
    parser.add_argument("--allow-failures", action="store_true", help="exit with 0 although an engine failed")
    options = parser.parse_args(arguments)
    if options.engines is None:
        options.engines = list(DEFAULT_ENGINES[options.device])
    if options.rows is None:
        options.rows = [QUICK_ROWS[options.device]] if options.quick else DEFAULT_ROWS[options.device]
    for option, full, quick in (("repeats", 5, 1), ("steps", 10, 5), ("warmup", 3, 2)):
        if getattr(options, option) is None:
            setattr(options, option, quick if options.quick else full)
    for pattern in options.rows:
        if not fnmatch.filter(ROWS, pattern):
            parser.error(f"no row matches {pattern!r}; rows are {', '.join(ROWS)}")
    suffix = ("-compiled" if options.compile else "") + ("-quick" if options.quick else "")
    options.name = options.name or f"{options.device}-{options.ranks}ranks{suffix}"
    return options


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def plan_jobs(options: argparse.Namespace) -> Iterator[tuple[int, Job]]:
    """All jobs in the order they run, each with its position in its repeat."""
    rows: list[Row] = [row for row in ROWS.values() if any(fnmatch.fnmatch(row.name, p) for p in options.rows)]
    engines = [engine for engine in ENGINES if engine in options.engines]
    for row in rows:
        for repeat in range(options.repeats):
            shift = repeat % len(engines)
            for position, engine in enumerate(engines[shift:] + engines[:shift]):
                job = Job(
                    row=row,
                    engine=engine,
                    repeat=repeat,
                    ranks=1 if engine == BARE else options.ranks,
                    warmup=options.warmup,
                    steps=options.steps,
                    seed=options.seed,
                    lr=options.lr,
                    device=options.device,
                    compile=options.compile,
                    watch_memory=options.watch_memory,
                )
                yield position, job


def run_job(job: Job, position: int, timeout: float, run_ranks: RunRanks | None = None) -> Run:
    """Runs one job in its own processes and returns what they measured, or why they did not.

    Args:
        job: what to run.
        position: place in its repeat's order.
        timeout: seconds.
        run_ranks: starts the ranks, with a folder for `result_path` and `log_path`, and waits for them; on this host
            if it is None. Returns the reason if they failed.
    """
    start, busy, own = time.monotonic(), _busy_cpu_seconds(), _own_cpu_seconds()
    with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as folder:
        error = (run_ranks or _run_ranks)(job, Path(folder), timeout)
        ranks: list[RankResult] = []
        try:
            if error is None:
                results = [result_path(Path(folder), rank).read_bytes() for rank in range(job.ranks)]
                ranks = [RANK_RESULT.validate_json(result) for result in results]
        except (OSError, ValidationError) as broken:
            error = f"a rank ended without a readable result: {type(broken).__name__}"
    return Run(
        job=job,
        position=position,
        wall_seconds=time.monotonic() - start,
        other_cpu_seconds=(_busy_cpu_seconds() - busy) - (_own_cpu_seconds() - own),
        ranks=ranks,
        error=error,
        planned_nbytes=planned_nbytes(job) if job.watch_memory and job.engine == "fullshard" else 0,
    )


def planned_nbytes(job: Job) -> int:
    """The least that a rank takes, as the planner says: its own memory, and its part of what ranks share."""
    shape, row = SHAPES[job.row.model], job.row
    if shape.family != "GPT-2" or row.dtype == "bf16only":
        return 0
    sizes = {"n_embd": shape.hidden, "n_layer": shape.layers, "n_head": shape.heads, "n_positions": 1024}
    sizes |= {"resid_pdrop": 0, "attn_pdrop": 0}
    model, _ = from_config({"model_type": "gpt2", "vocab_size": 50257, **sizes}, where=job.row.name)
    values = {"precision": row.dtype, "micro_batch": row.sequences, "seq_len": row.tokens, "optimizer": "adamw-fused"}
    planned = PlannedJob.of({**values, "attention": "sdpa"})
    return evaluate(model, planned, parse_cluster(f"{job.ranks}xCPU")).memory.peak_of_step


def _run_ranks(job: Job, folder: Path, timeout: float) -> str | None:
    """Starts a process per rank and waits for all; returns the reason if the job failed."""
    # The store lives here and the ranks join it, as they do under torchrun: no port to guess and none to collide on.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    # On CPUs the ranks compute with them; beside a GPU they only step what is offloaded.
    threads = 1 if job.device == "cpu" else max(1, usable_cpu_count() // job.ranks)
    for rank in range(job.ranks):
        command = [
            sys.executable,
            "-m",
            "benchmarks.worker",
            JOB.dump_json(job).decode(),
            str(result_path(folder, rank)),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job.ranks),
            "LOCAL_WORLD_SIZE": str(job.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if job.device == "cuda" and job.ranks > torch.accelerator.device_count():
            # Several ranks share a GPU: NCCL lets them if it takes them for ranks of several hosts, over loopback.
            environment |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        with log_path(folder, rank).open("wb") as log:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        return wait_for(ranks, folder, time.monotonic() + timeout, timeout)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, deadline: float, timeout: float) -> str | None:
    """Waits for processes, of which number i writes to `log_path` i; returns the reason if one failed or took long."""
    failed: int | None = None
    while any(process.poll() is None for process in ranks):
        if failed is None:
            failed = next((rank for rank, process in enumerate(ranks) if process.returncode), None)
            if failed is not None:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    if failed is None:
        failed = next((rank for rank, process in enumerate(ranks) if process.returncode), None)
    if failed is not None:
        return f"rank {failed}: {_last_words(log_path(folder, failed), ranks[failed].returncode)}"
    if any(process.returncode is None for process in ranks):
        return f"not finished after {timeout:g} s"
    return None


def _last_words(log: Path, returncode: int) -> str:
    """The exception of a failed rank on one line, without the paths of this machine."""
    # torch puts the rank before each line of a traceback.
    text = re.sub(r"^\[rank\d+\]: ", "", log.read_text(errors="replace"), flags=re.MULTILINE)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [index for index, line in enumerate(lines) if line.partition(":")[0].endswith(("Error", "Exception"))]
    said = " ".join(lines[raised[-1] : raised[-1] + 3]) if raised else (lines[-1] if lines else "no output")
    for path, name in ((str(ROOT), "."), (sys.prefix, "python"), (tempfile.gettempdir(), "tmp")):
        said = said.replace(path, name)
    return f"{said[:300]} (exit code {returncode})"


def result_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves its result."""
    return folder / f"rank{rank}.json"


def log_path(folder: Path, rank: int) -> Path:
    """What a process writes to its standard output and error."""
    return folder / f"rank{rank}.log"


def _busy_cpu_seconds() -> float:
    """CPU time all processes and, where it is reported, other guests of the host have used since start-up."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(arguments: Sequence[str]) -> int:
    """Runs everything, prints the table, returns the exit code: 1 if an engine failed and that is not allowed."""
    options = parse_arguments(arguments)
    commit, dirty = git_state()
    record = Record(
        format=FORMAT,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", "-m", "benchmarks.run", *arguments]),
        commit=commit,
        dirty=dirty,
        machine=describe_machine(),
    )
    path = RESULTS / f"{options.name}.json"
    jobs = list(plan_jobs(options))
    for number, (position, job) in enumerate(jobs, start=1):
        run = run_job(job, position, options.timeout)
        record.runs.append(run)
        save(record, path)
        outcome = run.error or f"{sorted(run.ranks[0].step_seconds)[job.steps // 2]:.3f} s/step"
        print(f"[{number}/{len(jobs)}] {job.row.name} repeat {job.repeat} {job.engine}: {outcome}", flush=True)
    print(f"\n{render(record)}\nrecord: {path.relative_to(ROOT)}")
    num_failed = sum(run.error is not None for run in record.runs)
    if num_failed:
        print(f"{num_failed} of {len(jobs)} runs failed", file=sys.stderr)
    return 1 if num_failed and not options.allow_failures else 0


if __name__ == "__main__":
    # Without this a terminated benchmark would leave its workers behind; so the exit unwinds and they are ended.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
