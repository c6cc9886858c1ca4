"""Seconds from the kill of a rank, or of a host, to the next optimizer step, and what they are spent on.

    python -m benchmarks.recovery [--kill rank host] [--repeats 3] [--shape 124m]

`fullshard train` on two hosts of two ranks (network namespaces on this machine; needs root and `ip`), copies of the
state in host memory, nothing read from the disk. A host that is killed does not come back: the other goes on alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import GPT2Config

from benchmarks.catalog import SHAPES
from benchmarks.record import RESULTS, describe_machine, git_state
from fullshard.core.journal import read_journal
from fullshard.observe import read_metrics
from tests.launching import LAUNCH, started_into, wait_until
from tests.namespaces import namespaces

RESULT = RESULTS / "recovery.json"
RANKS_PER_HOST = 2
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def prepare(directory: Path, shape: str) -> None:
    """A model's configuration and data."""
    sizes = SHAPES[shape]
    config = GPT2Config(
        n_embd=sizes.hidden, n_layer=sizes.layers, n_head=sizes.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    (directory / "config.json").write_text(config.to_json_string(), encoding="utf-8")
    lines = "".join(f"line {i} is {i * i % 17} long\n" for i in range(20000))
    (directory / "data.txt").write_text(lines, encoding="utf-8")


def recover(kill: str, arguments: argparse.Namespace) -> dict[str, float]:
    """One run: seconds from the kill to each of what happens until the next step."""
    with tempfile.TemporaryDirectory() as name, namespaces(2) as hosts, ExitStack() as processes:
        directory = Path(name)
        prepare(directory, arguments.shape)
        output = directory / "out"
        flags = ["--nnodes", "1:2", "--nproc_per_node", str(RANKS_PER_HOST), "--main_process_ip", "10.77.0.1", "--cpu"]
        flags += ["--max_restarts", "3"]
        training = ["--model", "config.json", "--data", "data.txt", "--output-dir", "out", "--steps", "100000"]
        training += ["--batch-size", "4", "--seq-len", "16", "--save-every", "0", "--log-every", "1", "--device", "cpu"]
        training += ["--vocab-size", "320", "--no-export", "--no-plot"]
        training += ["--max-lost-steps", str(arguments.max_lost_steps)]
        words = [*LAUNCH, *flags, "-m", "fullshard", "train", *training]
        said = processes.enter_context((directory / "said").open("w", encoding="utf-8"))
        _, second = (
            processes.enter_context(started_into(said, "ip", "netns", "exec", host, *words, cwd=directory))
            for host in hosts
        )
        with explained(directory / "said"):
            wait_until(lambda: steps_done(output) >= arguments.steps_before, 400, "the first steps")
            ranks = children_of(second.pid)
            before, now = steps_done(output), time.time()
            if kill == "host":
                os.killpg(second.pid, signal.SIGKILL)
            else:
                os.kill(ranks[0], signal.SIGKILL)
            wait_until(lambda: any(e["kind"] == "load" and when(e) > now for e in read_journal(output)), 200, "a load")
            # Metrics of steps that are made again are taken away only then; what is printed has an order.
            wait_until(lambda: is_going_on(directory / "said"), 100, "a step")
            end = time.time()
        events = [event for event in read_journal(output) if when(event) > now]
        first_of = {event["kind"]: when(event) for event in reversed(events)}
        pid = next(event["pid"] for event in events if event["kind"] == "start")
        moments = {
            "all have ended": first_of["restart"],
            "the next begin": max(began(pid), first_of["restart"]),
            "imports are over": first_of["start"],
            "state is there": first_of["load"],
            "next step is done": end,
        }
        found = {what: moment - now for what, moment in moments.items()}
        metrics = list(read_metrics(output / "metrics.jsonl"))[before - 10 : before]
        found["a step before"] = statistics.median(m.step_seconds for m in metrics)
        print(kill, {what: round(seconds, 2) for what, seconds in found.items()}, flush=True)
        return found


@contextmanager
def explained(said: Path) -> Iterator[None]:
    """What the launchers have said is part of the error."""
    try:
        yield
    except AssertionError as error:
        error.add_note(said.read_text(encoding="utf-8")[-6000:])
        raise


def is_going_on(said: Path) -> bool:
    """Whether a step has been made from copies."""
    _, found, after = said.read_text(encoding="utf-8").rpartition("\nresume: from copies")
    return bool(found) and "\nstep " in after


def when(event: dict[str, Any]) -> float:
    """Seconds since the epoch."""
    return datetime.fromisoformat(event["time"]).timestamp()


def steps_done(output: Path) -> int:
    """Steps that were logged."""
    path = output / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def children_of(pid: int) -> list[int]:
    """Processes that it has started."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False, timeout=20).stdout
    return [int(line) for line in found.split()]


def began(pid: int) -> float:
    """When a process was made, in seconds since the epoch."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + ticks / CLOCK_TICKS


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", nargs="+", choices=("rank", "host"), default=["rank", "host"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="124m")
    parser.add_argument("--max-lost-steps", type=int, default=8)
    parser.add_argument("--steps-before", type=int, default=20)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(arguments.repeats):
        for kill in arguments.kill:
            found.setdefault(f"{kill} killed", []).append(recover(kill, arguments))
    medians = {
        name: {what: statistics.median(r[what] for r in runs) for what in runs[0]} for name, runs in found.items()
    }
    commit, dirty = git_state()
    record = {
        "command": " ".join(["python -m benchmarks.recovery", *sys.argv[1:]]),
        "commit": commit,
        "dirty": dirty,
        "machine": dataclasses.asdict(describe_machine()),
        "shape": dataclasses.asdict(SHAPES[arguments.shape]),
        "seconds after the kill, medians": medians,
        "runs": found,
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
