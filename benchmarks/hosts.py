"""`python -m benchmarks.hosts`: two hosts of two ranks on one machine, joined by a link of limited speed.

Each host is a network namespace and, as it shares no memory with the other, a process namespace. Needs root, and the
programs `ip`, `tc` (package iproute2) and `unshare`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.catalog import ROWS
from benchmarks.record import FORMAT, JOB, RESULTS, ROOT, Job, Record, Run, describe_machine, git_state, save
from benchmarks.run import log_path, result_path, run_job, wait_for
from benchmarks.table import TOLERANCES, align, conditions, loss_difference, paired_ratio, summarize

ENGINES = {
    "ddp": "DDP",
    "fsdp2": "torch FSDP2",
    "fullshard-gloo": "fullshard, FULLSHARD_COMM=gloo",
    "fullshard": "fullshard",
    "fullshard-packed": "fullshard, int8 weights and bf16 gradients sent",
    "fsdp2-hybrid": "torch FSDP2, hybrid shard",
    "fullshard-hybrid": "fullshard, hybrid shard",
}
REFERENCE = "fsdp2"
HOSTS = RANKS_PER_HOST = 2
# The bucket of `tbf`: what may go at once after a pause. Its latency bound only says how long its queue is.
BURST, LATENCY = "1mb", "50ms"
HEADINGS = ("engine", "step s (range)", "/ FSDP2", "MB on the link per step", "link busy", "losses = FSDP2")


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """Two namespaces and the cable between them."""

    names: tuple[str, str]
    cable: tuple[str, str]

    def sent_nbytes(self) -> list[int]:
        """Bytes each host has sent so far."""
        return [self._counter(host) for host in range(HOSTS)]

    def _counter(self, host: int) -> int:
        path = f"/sys/class/net/{self.cable[host]}/statistics/tx_bytes"
        command = ["ip", "netns", "exec", self.names[host], "cat", path]
        return int(subprocess.run(command, check=True, capture_output=True, timeout=20).stdout)

    def run_ranks(self, job: Job, folder: Path, timeout: float) -> str | None:
        """Starts both hosts, each with its ranks, and waits for them. See `benchmarks.run.run_job`."""
        hosts = []
        for host in range(HOSTS):
            with log_path(folder, host).open("wb") as log:
                hosts.append(subprocess.Popen(self._command(job, folder, host), cwd=ROOT, stdout=log, stderr=log))
        try:
            return wait_for(hosts, folder, time.monotonic() + timeout, timeout)
        finally:
            for process in hosts:
                process.kill()
                process.wait()

    def _command(self, job: Job, folder: Path, host: int) -> list[str]:
        common = f"OMP_NUM_THREADS=1 WORLD_SIZE={job.ranks} LOCAL_WORLD_SIZE={RANKS_PER_HOST} MASTER_PORT=29500"
        common += f" MASTER_ADDR={_address(0)} GLOO_SOCKET_IFNAME={self.cable[host]}"
        lines = []
        for local_rank in range(RANKS_PER_HOST):
            rank = host * RANKS_PER_HOST + local_rank
            worker = [sys.executable, "-m", "benchmarks.worker", JOB.dump_json(job).decode()]
            worker.append(str(result_path(folder, rank)))
            lines.append(f'{common} RANK={rank} LOCAL_RANK={local_rank} {shlex.join(worker)} & pids="$pids $!"\n')
        waiting = "for pid in $pids; do wait $pid || exit; done"  # with the code of the rank that failed
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.names[host], *apart, "sh", "-c", "".join([*lines, waiting])]


def _address(host: int) -> str:
    return f"10.78.0.{host + 1}"


@contextmanager
def linked(rate: str) -> Iterator[Link]:
    """Two namespaces, joined at `rate` (in the words of `tc`) either way, or as fast as it goes."""
    link = Link(
        (f"fsb{os.getpid()}a", f"fsb{os.getpid()}b"), (f"fb{os.getpid() % 10**6}a", f"fb{os.getpid() % 10**6}b")
    )
    try:
        for name in link.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", link.cable[0], "type", "veth", "peer", "name", link.cable[1])
        for host, (name, end) in enumerate(zip(link.names, link.cable, strict=True)):
            _run("ip", "link", "set", end, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{_address(host)}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if rate != "unlimited":
                limit = ["tbf", "rate", rate, "burst", BURST, "latency", LATENCY]
                _run("tc", "-n", name, "qdisc", "add", "dev", end, "root", *limit)
        yield link
    finally:
        for name in link.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def measure(link: Link, job: Job, position: int, timeout: float) -> Run:
    """Runs one job and counts what it sent."""
    before = link.sent_nbytes()
    run = run_job(job, position, timeout, link.run_ranks)
    sent = [after - first for after, first in zip(link.sent_nbytes(), before, strict=True)]
    return dataclasses.replace(run, sent_nbytes=sent)


def plan_jobs(options: argparse.Namespace) -> Iterator[tuple[int, Job]]:
    """All jobs in the order they run, each with its position in its repeat; the order rotates from repeat to repeat."""
    for row in options.rows:
        for repeat in range(options.repeats):
            shift = repeat % len(options.engines)
            for position, engine in enumerate(options.engines[shift:] + options.engines[:shift]):
                yield (
                    position,
                    Job(
                        row=ROWS[row],
                        engine=engine,
                        repeat=repeat,
                        ranks=HOSTS * RANKS_PER_HOST,
                        warmup=options.warmup,
                        steps=options.steps,
                        seed=17,
                        lr=1e-3,
                        device="cpu",
                    ),
                )


def render_rows(record: Record) -> str:
    """The record's tables, one per row."""
    blocks = []
    for row in dict.fromkeys(run.job.row.name for run in record.runs):
        runs = {
            engine: [r for r in record.runs if r.job.row.name == row and r.job.engine == engine] for engine in ENGINES
        }
        lines = [_cells(engine, runs) for engine in ENGINES if runs[engine]]
        blocks.append("\n".join([f"`{row}`, 2 hosts x 2 ranks:", "", *align([HEADINGS, *lines])]))
    return "\n\n".join(blocks)


def _cells(engine: str, runs: dict[str, list[Run]]) -> tuple[str, ...]:
    num_cpus = os.cpu_count() or 1
    done = [run for run in runs[engine] if run.error is None]
    if not done:
        return (ENGINES[engine], "failed", *["-"] * (len(HEADINGS) - 2))
    summary, reference = (
        summarize(runs[engine], num_cpus),
        summarize(runs[REFERENCE], num_cpus) if runs[REFERENCE] else None,
    )
    seconds = summary.step_seconds
    per_step = statistics.median(max(run.sent_nbytes) / (run.job.warmup + run.job.steps) for run in done)
    ratio = same = "-"
    if reference is not None and seconds.keys() & reference.step_seconds.keys():
        ratio = f"{paired_ratio(seconds, reference.step_seconds):.2f}"
        difference = loss_difference(summary.losses, reference.losses)
        same = f"{'yes' if difference <= TOLERANCES[done[0].job.row.dtype] else 'NO'} ({difference:.0e})"
    median = statistics.median(seconds.values())
    return (
        ENGINES[engine],
        f"{median:.3f} ({min(seconds.values()):.3f}-{max(seconds.values()):.3f})",
        ratio,
        f"{per_step / 1e6:.0f}",
        f"{per_step / median * 8 / 1e6:.0f} Mbit/s",
        same,
    )


def main(arguments: Sequence[str]) -> int:
    """Runs everything, prints the tables, returns the exit code: 1 if an engine failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=["30m-fp32-1x128"], choices=list(ROWS), metavar="ROW")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), metavar="ENGINE",
                        help=f"of {', '.join(ENGINES)}")  # fmt: skip
    parser.add_argument("--rate", default="1gbit", help="of the link either way, for `tc`, or `unlimited`")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which one run is an error")
    parser.add_argument("--name", default="hosts", help="of the record in benchmarks/results")
    options = parser.parse_args(arguments)
    commit, dirty = git_state()
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    command = shlex.join(["python", "-m", "benchmarks.hosts", *arguments])
    record = Record(
        format=FORMAT, created=created, command=command, commit=commit, dirty=dirty, machine=describe_machine()
    )
    with linked(options.rate) as link:
        for position, job in plan_jobs(options):
            run = measure(link, job, position, options.timeout)
            record.runs.append(run)
            save(record, RESULTS / f"{options.name}.json")
            outcome = run.error or f"{statistics.median(run.ranks[0].step_seconds):.3f} s/step"
            print(f"{job.row.name} repeat {job.repeat} {job.engine}: {outcome}, sent {run.sent_nbytes}", flush=True)
    print(f"\n{render_rows(record)}\n\n{conditions(record)}")
    return 1 if any(run.error is not None for run in record.runs) else 0


if __name__ == "__main__":
    # So that a terminated benchmark unwinds, which ends its processes and removes the namespaces.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
