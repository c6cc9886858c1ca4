"""`python -m benchmarks.pages`: write the tables of README.md and docs/ anew, from the records in `results/`.

A table stands between two comments, of which the first says what it is made of:

    <!-- benchmarks: summary cpu-2ranks.json cpu-2ranks-124m-fp32.json -->
    ...
    <!-- benchmarks end -->

`--check` writes nothing, and names the pages whose tables are not those of the records.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.record import RESULTS, ROOT, load
from benchmarks.table import align, render_memory, render_rows, render_summary

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(
    r"(<!-- benchmarks: (?P<kind>[\w-]+)(?P<names>(?: [\w.-]+)+) -->\n).*?(<!-- benchmarks end -->)", re.S
)
GIB = 2**30


def summary(*names: str) -> str:
    """Fullshard against FSDP2, a line per row of several records."""
    return render_summary([load(RESULTS / name) for name in names])


def rows(name: str) -> str:
    """All engines, a table per row of one record."""
    return render_rows(load(RESULTS / name))


def memory(*names: str) -> str:
    """Resident memory, of several records."""
    return render_memory([load(RESULTS / name) for name in names])


def host_time(name: str) -> str:
    """Host time per unit, and of the optimizer."""
    head = ("ranks, trained", "ms per unit, fullshard", "FSDP2", "ratio", "fused AdamW, fullshard", "FSDP2", "ratio")
    lines = [
        (
            f"{row['world_size']}, {'adapters' if row['trained'] == 'lora' else 'everything'}",
            f"{row['unit_ms']['fullshard']:.2f}",
            f"{row['unit_ms']['fsdp2']:.2f}",
            f"{row['unit_ratio']:.2f}",
            f"{row['optimizer_ms']['fullshard']:.1f} ms",
            f"{row['optimizer_ms']['fsdp2']:.1f} ms",
            f"{row['optimizer_ratio']:.2f}",
        )
        for row in _json(name)["rows"]
        if row["adamw"] == "fused"
    ]
    return "\n".join(align([head, *lines]))


def timeline(name: str) -> str:
    """Where the time of a step goes."""
    return timeline_table(_json(name))


def timeline_table(measured: dict[str, Any]) -> str:
    """Medians over the steps of each activity's own time, the longest first, and none under 0.5 ms."""
    steps = measured["steps"]
    whole = statistics.median(step["seconds"] for step in steps) * 1e3
    names = {name for step in steps for name in step["own"]}
    times = [(name, statistics.median(step["own"].get(name, 0.0) for step in steps) * 1e3) for name in names]
    times = sorted((item for item in times if item[1] >= 0.5), key=lambda item: -item[1])
    lines = [(name, f"{ms:.0f}", f"{ms / whole:.1%}") for name, ms in times]
    return "\n".join(align([("activity", "ms", "share"), *lines, ("whole step", f"{whole:.0f}", "")]))


def checkpoint(name: str) -> str:
    """Seconds to save and load, by size."""
    record = _json(name)
    head = [
        "seconds",
        *(f"{size.replace('1000M', '1 B').replace('M', ' M')}, {what}" for size in record for what in ("save", "load")),
    ]
    titles = {"fullshard": "fullshard", "dcp": "torch FSDP2 and DCP", "accelerate": "Accelerate and DCP"}
    lines = [
        [title, *(f"{sized['medians'][engine][what]:.2f}" for sized in record.values() for what in ("save", "load"))]
        for engine, title in titles.items()
    ]
    return "\n".join(align([head, *lines]))


def loading(*names: str) -> str:
    """What a rank holds at most while a model is loaded and sharded."""
    head = ("", "shard", "largest unit", "peak, fullshard", "peak, Accelerate", "seconds, fullshard", "Accelerate")
    lines = []
    for name in names:
        record = _json(name)
        ours, theirs = (record["ranks"][loader] for loader in ("fullshard", "accelerate"))
        peaks = [max(rank["peak_nbytes"] for rank in ranks) / GIB for ranks in (ours, theirs)]
        seconds = [max(rank["seconds"] for rank in ranks) for ranks in (ours, theirs)]
        shard, unit = ours[0]["shard_nbytes"] / GIB, record["largest_unit_nbytes"] / GIB
        lines.append(
            (record["form"], *(f"{gib:.2f} GiB" for gib in (shard, unit, *peaks)), *(f"{s:.0f}" for s in seconds))
        )
    return "\n".join(align([head, *lines]))


def muon(name: str) -> str:
    """What Muon's step takes, and what travels for it."""
    record = _json(name)
    last = {row["way"]: row for row in record["rows"]}
    titles = {
        "alone": "one process, `torch.optim.Muon`",
        "fsdp2": "torch FSDP2, `torch.optim.Muon` on its DTensors",
        "fsdp2-gathered": "torch FSDP2, each direction made whole on every rank",
        "fullshard": "fullshard, `fullshard.optim.Muon`",
    }
    head = ("step() of 124 M, 1x128, two ranks", "CPU seconds", "ratio", "on the wall, ratio", "loss of the last step")
    lines = [
        (
            title,
            f"{record['medians'][way]['cpu_seconds']:.2f}",
            f"{record['medians'][way]['cpu_ratio']:.2f}",
            f"{record['medians'][way]['wall_ratio']:.2f}",
            f"{last[way]['loss']:.4f}",
        )
        for way, title in titles.items()
    ]
    return "\n".join(align([head, *lines]))


KINDS: dict[str, Callable[..., str]] = {
    "summary": summary,
    "rows": rows,
    "memory": memory,
    "host-time": host_time,
    "timeline": timeline,
    "checkpoint": checkpoint,
    "loading": loading,
    "muon": muon,
}


def _json(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def with_tables(text: str) -> str:
    """A page with its tables made anew."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{KINDS[block['kind']](*block['names'].split())}\n\n{block[4]}", text)


def main(arguments: Sequence[str]) -> int:
    """Writes or checks all pages; the exit code is 1 if `--check` found a difference."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    differing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := with_tables(text)) != text:
            differing.append(page)
            if not options.check:
                page.write_text(new, encoding="utf-8")
    for page in differing:
        print(f"{page.relative_to(ROOT)}: {'not the tables of the records' if options.check else 'written'}")
    return 1 if differing and options.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
