"""Where each millisecond and MiB of one step goes: fullshard on two CPU ranks, drawn from the engine's events.

    python -m benchmarks.timeline [--row 124m-fp32-1x128] [--svg docs/performance.svg]

Rank 0's last step of a few is drawn. The times by activity are medians over the steps, each activity's own time only,
without that of the others inside it. Watching costs something itself: a step here is a few per cent longer than in
`benchmarks.run`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.catalog import BACKENDS, ROWS
from benchmarks.engines import ENGINES
from benchmarks.models import build_batches, build_model
from benchmarks.pages import timeline_table
from benchmarks.record import RESULTS, Job
from fullshard.core.events import Event, EventKind
from fullshard.engine.bucket import Bucket
from fullshard.engine.gradient import Gradient
from fullshard.engine.schedule import Schedule
from fullshard.engine.unsharded_gradient import UnshardedGradient
from fullshard.features import units_of

WARMUP, STEPS = 4, 8
MIB = 2**20
ACTIVITIES: list[tuple[type, str, str]] = [
    (Bucket, "issue_unshard", "unshard: offer own weights"),
    (Bucket, "wait_unshard", "unshard: wait for the other ranks"),
    (Bucket, "reshard", "reshard"),
    (UnshardedGradient, "collect", "gradients: copy into the reduce input"),
    (Gradient, "launch", "gradients: offer them"),
    (Gradient, "advance", "gradients: wait for the other ranks, and average"),
    (Gradient, "finish", "gradients: publish"),
    (Schedule, "_agree_on_used", "end of backward: agree on what was used"),
    (Schedule, "settle", "wait until nobody reads what is about to change"),
    (torch.optim.AdamW, "step", "optimizer"),
]
REST = "forward and backward of the model"


class Clock:
    """Own times of activities, and the engine's events with the moment and the resident memory at each."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.events: list[dict[str, Any]] = []
        self._inside: list[float] = []

    def watch(self, owner: type, name: str, activity: str) -> None:
        """Time the method `name` of `owner` as `activity` from now on."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.timing(activity):
                return method(*args, **kwargs)

        setattr(owner, name, timed)

    @contextmanager
    def timing(self, activity: str) -> Iterator[None]:
        """Count the time inside, without that of activities inside it."""
        self._inside.append(0.0)
        begin = time.perf_counter()
        try:
            yield
        finally:
            whole = time.perf_counter() - begin
            self.seconds[activity] += whole - self._inside.pop()
            if self._inside:
                self._inside[-1] += whole

    def __call__(self, event: Event) -> None:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.events.append(
            {"at": time.perf_counter(), "kind": event.kind, "unit": event.unit, "nbytes": event.nbytes, "rss": resident}
        )


def _rank(rank: int, ranks: int, store: str, row: str, output: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group(BACKENDS["cpu"], init_method=f"file://{store}", rank=rank, world_size=ranks)
    job = Job(ROWS[row], "fullshard", repeat=0, ranks=ranks, warmup=WARMUP, steps=STEPS, seed=17, lr=1e-3, device="cpu")
    clock = Clock()
    for activity in ACTIVITIES:
        clock.watch(*activity)
    model = build_model(job)
    step = ENGINES[job.engine].build(model, job)
    units_of(model)[0].schedule.event_sink = clock
    batches = build_batches(job, rank)
    steps = []
    for number in range(WARMUP + STEPS):
        dist.barrier()
        clock.seconds.clear()
        clock.events.clear()
        begin = time.perf_counter()
        with clock.timing(REST):
            loss = step(batches[number % len(batches)]).item()
        steps.append({"seconds": time.perf_counter() - begin, "loss": loss, "own": dict(clock.seconds)})
    if rank == 0:
        events = [event | {"at": event["at"] - begin} for event in clock.events]
        Path(output).write_text(json.dumps({"row": row, "steps": steps[WARMUP:], "events": events}), encoding="utf-8")
    dist.destroy_process_group()


def spans(events: list[dict[str, Any]], first: EventKind, last: EventKind) -> list[tuple[str, float, float]]:
    """(unit, begin, end) in seconds between an event of each unit and the one that ends it."""
    open_: dict[str, float] = {}
    found = []
    for event in events:
        if event["kind"] == first:
            open_.setdefault(event["unit"], event["at"])
        elif event["kind"] == last and event["unit"] in open_:
            found.append((event["unit"], open_.pop(event["unit"]), event["at"]))
    return found


KINDS = {
    "gather": (EventKind.UNSHARD_ISSUED, EventKind.UNSHARD_READY, "#8fb8de"),
    "forward": (EventKind.FORWARD_BEGIN, EventKind.FORWARD_END, "#3a7d44"),
    "backward": (EventKind.BACKWARD_BEGIN, EventKind.BACKWARD_END, "#b5651d"),
    "reduction": (EventKind.REDUCE_ISSUED, EventKind.REDUCE_DONE, "#c9a0dc"),
}


def draw(measured: dict[str, Any], path: Path) -> None:
    """The step as a picture: what each unit does when, and the memory meanwhile."""
    from matplotlib.figure import Figure

    events = measured["events"]
    end = measured["steps"][-1]["seconds"] * 1e3
    units = list(dict.fromkeys(event["unit"] for event in events if event["kind"] == EventKind.FORWARD_BEGIN))
    figure = Figure(figsize=(10, 6), layout="constrained")
    lanes, memory = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for number, (label, (first, last, color)) in enumerate(KINDS.items()):
        lower = 0.35 if label in ("gather", "reduction") else 0.0  # communication below computation
        for unit, begin, stop in spans(events, first, last):
            y = units.index(unit) - 0.4 + lower
            lanes.broken_barh([(begin * 1e3, (stop - begin) * 1e3)], (y, 0.35), color=color, zorder=number)
        lanes.broken_barh([], (0, 0), color=color, label=label)
    begin_step = next(event["at"] for event in events if event["kind"] == EventKind.OPTIMIZER_STEP) * 1e3
    lanes.axvspan(begin_step, end, color="#dddddd", zorder=-1, label="optimizer")
    lanes.set_yticks(range(len(units)), [unit or "(model)" for unit in units], fontsize=7)
    lanes.invert_yaxis()
    lanes.legend(loc="upper center", ncols=5, fontsize=8, bbox_to_anchor=(0.5, 1.1))
    at = [event["at"] * 1e3 for event in events]
    memory.step(at, [event["rss"] / MIB for event in events], where="post", color="#333333")
    memory.set_ylabel("resident MiB, rank 0")
    memory.set_xlabel("ms since the step began")
    memory.set_xlim(0, end)
    figure.savefig(path)


def main(show: Callable[[str], None] = print) -> None:
    """Measure, print, record and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="124m-fp32-1x128", choices=list(ROWS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS / "timeline.json")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as directory:
        words = (arguments.ranks, f"{directory}/store", arguments.row, str(arguments.output))
        mp.spawn(_rank, words, nprocs=arguments.ranks)
    measured = json.loads(arguments.output.read_text(encoding="utf-8"))
    show(timeline_table(measured))
    if arguments.svg:
        draw(measured, arguments.svg)


if __name__ == "__main__":
    main()
