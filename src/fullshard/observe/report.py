"""Write a report of one run or several: one HTML file that needs no network, for light and dark screens and for paper.

The page is `report.html.j2`; this module fills it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullshard.core.files import write_text
from fullshard.core.imports import import_extra
from fullshard.core.sizes import GIB, MIB, format_count, format_nbytes
from fullshard.core.version import __version__
from fullshard.observe.plots import Line, bar_chart, line_chart, require_plots
from fullshard.observe.record import BucketRecord, RunRecord, UnitRecord, read_runs

_TROUBLE = ("failure", "restart", "rollback", "skip", "preemption", "shrink", "growth", "replica", "slow")
_MOST_ROWS, _MOST_BARS, _MOST_RANKS, _LONGEST = 200, 40, 64, 300
_COURSE = (
    ("Loss", "nats per token", "loss"),
    ("Throughput", "tokens per second", "tokens_per_second"),
    ("Gradient norm", "2-norm before clipping", "grad_norm"),
    ("Learning rate", "", "learning_rate"),
    ("Time of a step", "seconds", "step_seconds"),
    ("Wait for data", "seconds", "data_wait_seconds"),
)

Rows = list[tuple[str, ...]]


def write_report(paths: Sequence[Path], output: Path) -> None:
    """Read runs from their folders and write the report of them.

    Args:
        paths: of `fullshard train`, `fullshard sft` or Trainer.
        output: the HTML file, written whole or not at all. In a run's folder it replaces a link and does not follow it.

    Raises:
        DataError: a folder holds no run, or a file of it cannot be read.
        MissingExtraError: matplotlib or Jinja is not installed.
    """
    require_plots()
    page = render(read_runs(paths)).encode("utf-8", "replace").decode()  # names of files may be no text
    folder = output.parent.resolve()
    is_in_a_run = any(folder.is_relative_to(path.resolve()) for path in paths)
    (_replace_text if is_in_a_run else write_text)(output, page)


def _replace_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, in the place of whatever has that name: a link is not followed.

    Raises:
        OSError: it cannot be written, or a folder has that name.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def render(runs: Sequence[RunRecord]) -> str:
    """Return the page."""
    jinja = import_extra("jinja2", extra="plots", purpose="writing a report")
    pages = jinja.Environment(
        loader=jinja.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja.StrictUndefined
    )
    pages.filters["short"] = lambda text: text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    names = [run.name for run in runs]
    given, differing, by_default = _settings(runs)
    return str(
        pages.get_template("report.html.j2").render(
            most=_MOST_ROWS,
            title=" and ".join(names),
            names=names,
            states=[f"{run.name}: {_state(run)}" for run in runs],
            overview=_overview(runs),
            charts=_charts(runs),
            runs=[_parts(run) for run in runs],
            given=given,
            differing=differing,
            by_default=by_default,
            environment=_environment(runs),
            version=__version__,
            now=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        )
    )


def _state(run: RunRecord) -> str:
    """Return how a run stands, in words."""
    kinds = [event["kind"] for event in run.events]
    last = run.steps[-1]["step"] if run.steps else 0
    begun = max((number for number, kind in enumerate(kinds) if kind == "start"), default=0)
    failed = next((event for event in run.events[begun:] if event["kind"] == "failure"), None)
    if kinds and kinds[-1] == "end":
        return f"done, {last} steps"
    if failed is not None:
        return f"failed after step {last}: " + str(failed.get("message") or failed.get("how") or "").partition("\n")[0]
    if kinds and kinds[-1] == "preemption":
        return f"stopped by a signal after step {last}"
    return f"{last} steps; whether it goes on is not noted" if kinds else f"{last} steps"


def _overview(runs: Sequence[RunRecord]) -> Rows:
    rows: list[tuple[str, Callable[[RunRecord], str]]] = [
        ("model", lambda run: f"{p.model}, {format_count(p.parameters)} parameters" if (p := run.plan) else ""),
        ("ranks", _ranks),
        ("steps", lambda run: str(run.steps[-1]["step"]) if run.steps else ""),
        ("loss at the end", lambda run: _of(run, "loss", _end, "{:.4f}, mean of the last tenth")),
        ("tokens per second, median", lambda run: _of(run, "tokens_per_second", statistics.median, "{:,.0f}")),
        ("MFU, median", lambda run: _of(run, "mfu", statistics.median, "{:.1%}")),
        ("memory of the fullest rank", lambda run: _of(run, "memory_nbytes", max)),
        ("planned", lambda run: _of(run, "planned_nbytes", max)),
        ("waited for data", lambda run: _of(run, "data_wait_seconds", sum, "{:.1f} s")),
        ("stood still for checkpoints", lambda run: _of(run, "checkpoint_seconds", sum, "{:.1f} s")),
        ("steps left out", lambda run: _of(run, "skipped_steps", max, "{:.0f}")),
        ("from first to last event", lambda run: "" if (s := run.seconds()) is None else f"{s:,.0f} s"),
    ]
    filled = [(name, *(value(run) for run in runs)) for name, value in rows]
    return [row for row in filled if any(row[1:])]


def _of(run: RunRecord, name: str, of: Callable[[list[float]], float], form: str = "") -> str:
    """Return a summary of a series, in words; without a `form` the values are bytes."""
    values = run.series(name)[1]
    if not values:
        return ""
    return form.format(of(values)) if form else format_nbytes(round(of(values)))


def _end(values: list[float]) -> float:
    return statistics.fmean(values[-max(1, len(values) // 10) :])


def _ranks(run: RunRecord) -> str:
    if run.environment is not None:
        return f"{run.environment.ranks} x {run.environment.device}"
    return next((_value(event.get("world_size")) for event in reversed(run.events) if event["kind"] == "start"), "")


def _charts(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    charts = [
        (title, unit, [Line(run.name, *run.series(name), number) for number, run in enumerate(runs)])
        for title, unit, name in _COURSE
    ]
    memory = []
    for number, run in enumerate(runs):
        for name, words, style in (("memory_nbytes", "measured", "-"), ("planned_nbytes", "planned", "--")):
            x, y = run.series(name)
            memory.append(Line(f"{run.name}, {words}", x, [value / GIB for value in y], number, style))
    charts.insert(2, ("Memory of the fullest rank", "GiB", memory))
    drawn = [(title, unit, [line for line in lines if line.x]) for title, unit, lines in charts]
    return [(title, line_chart(unit, lines)) for title, unit, lines in drawn if lines]


def _parts(run: RunRecord) -> dict[str, Any]:
    """Return the sections that each run has of its own."""
    return {
        "name": run.name,
        "memory": _memory(run),
        "owners": _owners(run),
        "has_events": bool(run.events),
        "trouble": [
            (event["time"], event["kind"], _value(event.get("step")), _value(event.get("rank")), _details(event))
            for event in reversed(run.events)
            if event["kind"] in _TROUBLE
        ],
        "checkpoints": _checkpoints(run),
    }


def _memory(run: RunRecord) -> dict[str, Any] | None:
    if run.plan is None or not run.plan.phases:
        return None
    before = {"before the model": run.plan.process} if run.plan.process else {}
    phases = {name: before | sizes for name, sizes in list(run.plan.phases.items())[:_MOST_BARS]}
    kinds = dict.fromkeys(kind for sizes in phases.values() for kind, size in sizes.items() if size)
    rows = [(kind, *(format_nbytes(s[kind]) if s.get(kind) else "" for s in phases.values())) for kind in kinds]
    measured = run.series("memory_nbytes")[1]
    bars = [
        (name, {kind: sizes.get(kind, 0) / GIB for kind in list(kinds)[:_MOST_BARS]}) for name, sizes in phases.items()
    ]
    return {
        "words": run.plan.verdict,
        "picture": bar_chart("GiB", bars, ("measured, most", max(measured) / GIB) if measured else None),
        "heads": ["planned, per rank", *phases],
        "rows": [*rows, ("all", *(format_nbytes(sum(sizes.values())) for sizes in phases.values()))],
    }


def _owners(run: RunRecord) -> dict[str, Any] | None:
    if run.plan is None or not run.plan.units:
        return None
    groups = _alike(run.plan.units)
    cuts = [round(bucket.elements / bucket.per_rank) or 1 for unit in run.plan.units for bucket in unit.buckets]
    shared = min(cuts, default=1)
    parts = min(shared, _MOST_RANKS)
    bars = [(name, {str(rank): _nbytes(unit) / MIB / parts for rank in range(parts)}) for name, unit, _ in groups]
    return {
        "words": f"{run.plan.ranks} ranks; {shared} share a unit, and each owns one interval of every bucket.",
        "picture": bar_chart("MiB", bars[:_MOST_BARS]),
        "heads": ["unit", "how many", "buckets: elements, stored and computed in", "unsharded"],
        "rows": [
            (name, str(count), ", ".join(map(_bucket, unit.buckets)), format_nbytes(_nbytes(unit)))
            for name, unit, count in groups
        ],
    }


def _alike(units: Sequence[UnitRecord]) -> list[tuple[str, UnitRecord, int]]:
    """Return neighbours that are alike as one row, with their count."""
    groups: list[tuple[str, UnitRecord, int]] = []
    for unit in units:
        if groups and groups[-1][1].buckets == unit.buckets:
            name, first, count = groups[-1]
            groups[-1] = f"{name.partition(' to ')[0]} to {unit.name.rpartition('.')[2]}", first, count + 1
        else:
            groups.append((unit.name or "root", unit, 1))
    return groups


def _nbytes(unit: UnitRecord) -> int:
    return sum(bucket.bytes for bucket in unit.buckets)


def _bucket(bucket: BucketRecord) -> str:
    frozen = "" if bucket.trainable else ", frozen"
    return f"{format_count(bucket.elements)} {bucket.dtype} / {bucket.compute_dtype}{frozen}"


def _checkpoints(run: RunRecord) -> Rows:
    saves = {Path(str(event.get("path", ""))).name: event for event in run.events if event["kind"] == "save"}
    present = {one.name: one for one in run.checkpoints}
    rows: Rows = []
    for name in dict.fromkeys([*saves, *present]):
        one, save = present.get(name), saves.get(name, {})
        seconds = save.get("seconds")
        written = f"{seconds:.2f} s" if isinstance(seconds, float) else _value(seconds)
        size = "removed since" if one is None else f"{format_nbytes(one.nbytes)} in {one.files} files"
        size = "a link, which is not followed" if one is not None and one.is_link else size
        rows.append((name, _value(save.get("step")), str(save.get("time", "")), written, size))
    return rows[-_MOST_ROWS:]


def _settings(runs: Sequence[RunRecord]) -> tuple[Rows, list[int], Rows]:
    """Return settings that were given, which of those rows differ between runs, and settings by default."""
    given, differing, by_default = Rows(), list[int](), Rows()
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        found = [run.settings.get(name) for run in runs]
        row = (name, *("" if one is None else f"{_value(one.value)} ({one.origin})" for one in found))
        differs = len({None if one is None else _value(one.value) for one in found}) > 1
        if differs:
            differing.append(len(given))
        is_given = differs or any(one is not None and one.origin != "default" for one in found)
        (given if is_given else by_default).append(row)
    return given, differing, by_default


def _environment(runs: Sequence[RunRecord]) -> Rows:
    found = [{} if run.environment is None else run.environment.model_dump() for run in runs]
    return [
        (name, *(_value(one.get(name)) for one in found)) for name in dict.fromkeys(n for one in found for n in one)
    ]


def _details(event: dict[str, Any]) -> str:
    known = ("time", "kind", "rank", "host", "pid", "step", "message")
    further = ", ".join(f"{name} {_value(value)}" for name, value in event.items() if name not in known)
    return ": ".join(part for part in (further, _value(event.get("message"))) if part)


def _value(value: object) -> str:
    """Return a value of a file in words. Python refuses to write integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a huge number"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
