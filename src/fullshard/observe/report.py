"""Write a report on one or more runs as a single HTML file, which can be opened without network access."""

import os
import stat
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullshard.core.files import write_text
from fullshard.core.imports import import_extra
from fullshard.core.sizes import GIB, format_nbytes
from fullshard.core.version import __version__
from fullshard.observe.plots import Line, line_chart, rehearsal_chart, require_plots
from fullshard.observe.record import RunRecord, read_runs

_TROUBLE = ("failure", "restart", "skip", "preemption", "shrink", "growth", "replica", "slow")
_MOST_ROWS, _LONGEST = 200, 300
_COURSE = (
    ("Loss", "nats per token", "loss"),
    ("Throughput", "tokens per second", "tokens_per_second"),
    ("Memory of the fullest rank", "GiB", "memory_nbytes"),
    ("Gradient norm", "2-norm before clipping", "grad_norm"),
    ("Learning rate", "", "learning_rate"),
    ("Time of a step", "seconds", "step_seconds"),
    ("Wait for data", "seconds", "data_wait_seconds"),
)

Rows = list[tuple[str, ...]]


def write_report(paths: Sequence[Path], output: Path) -> None:
    """Write a report on the runs in some folders to a file, atomically.

    If `output` is in the folder of a run and is not a regular file (for example, a link), it is replaced.
    """
    require_plots()
    page = render(read_runs(paths)).encode("utf-8", "replace").decode()  # file names may be invalid Unicode
    folder = output.parent.resolve()
    is_in_a_run = any(folder.is_relative_to(path.resolve()) for path in paths)
    if is_in_a_run and os.path.lexists(output) and not stat.S_ISREG(output.lstat().st_mode):
        output.unlink()
    write_text(output, page)


def render(runs: Sequence[RunRecord]) -> str:
    """Return the HTML page of a report."""
    jinja = import_extra("jinja2", extra="plots", purpose="writing a report")
    pages = jinja.Environment(
        loader=jinja.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja.StrictUndefined
    )
    pages.filters["short"] = lambda text: text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    given, differing, by_default = _settings(runs)
    values: dict[str, Any] = {
        "most": _MOST_ROWS,
        "names": [run.name for run in runs],
        "states": [f"{run.name}: {run.state}" for run in runs],
        "overview": _overview(runs),
        "charts": _charts(runs),
        "rehearsals": [(r.name, rehearsal_chart(r.rehearsal.model_dump())) for r in runs if r.rehearsal],
        "trouble": [(run.name, _trouble(run)) for run in runs if run.events],
        "given": given,
        "differing": differing,
        "by_default": by_default,
        "environment": _environment(runs),
        "version": __version__,
        "now": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
    }
    return str(pages.get_template("report.html.j2").render(values))


def _overview(runs: Sequence[RunRecord]) -> Rows:
    rows: list[tuple[str, Callable[[RunRecord], str]]] = [
        ("ranks", lambda run: _value(run.environment.get("ranks"))),
        ("steps", lambda run: str(run.steps[-1]["step"]) if run.steps else ""),
        ("loss at the end", lambda run: _of(run, "loss", _end, "{:.4f}, mean of the last tenth")),
        ("tokens per second, median", lambda run: _of(run, "tokens_per_second", statistics.median, "{:,.0f}")),
        ("memory of the fullest rank", lambda run: _of(run, "memory_nbytes", max)),
        ("waited for data", lambda run: _of(run, "data_wait_seconds", sum, "{:.1f} s")),
        ("stood still for checkpoints", lambda run: _of(run, "checkpoint_seconds", sum, "{:.1f} s")),
        ("steps left out", lambda run: _of(run, "skipped_steps", max, "{:.0f}")),
    ]
    filled = [(name, *(value(run) for run in runs)) for name, value in rows]
    return [row for row in filled if any(row[1:])]


def _of(run: RunRecord, name: str, of: Callable[[list[float]], float], form: str = "") -> str:
    """Return the result of `of` for a series of metrics as text, formatted by `form` or as a size in bytes."""
    values = run.series(name)[1]
    if not values:
        return ""
    return form.format(of(values)) if form else format_nbytes(round(of(values)))


def _end(values: list[float]) -> float:
    return statistics.fmean(values[-max(1, len(values) // 10) :])


def _charts(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    drawn = []
    for title, unit, name in _COURSE:
        scale = GIB if unit == "GiB" else 1
        found = [(run.name, *run.series(name), number) for number, run in enumerate(runs)]
        lines = [Line(label, x, [value / scale for value in y], number) for label, x, y, number in found if x]
        if lines:
            drawn.append((title, line_chart(unit, lines)))
    return drawn


def _trouble(run: RunRecord) -> Rows:
    return [
        (event["time"], event["kind"], _value(event.get("step")), _value(event.get("rank")), _details(event))
        for event in reversed(run.events)
        if event["kind"] in _TROUBLE
    ]


def _settings(runs: Sequence[RunRecord]) -> tuple[Rows, list[int], Rows]:
    """Return rows (name, value per run) of given settings, indices of those that differ, and rows of defaults."""
    given, differing, by_default = Rows(), list[int](), Rows()
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        found = [run.settings.get(name) for run in runs]
        row = (name, *("" if one is None else f"{_value(one.get('value'))} ({one.get('origin')})" for one in found))
        differs = len({None if one is None else _value(one.get("value")) for one in found}) > 1
        if differs:
            differing.append(len(given))
        is_given = differs or any(one is not None and one.get("origin") != "default" for one in found)
        (given if is_given else by_default).append(row)
    return given, differing, by_default


def _environment(runs: Sequence[RunRecord]) -> Rows:
    names = dict.fromkeys(name for run in runs for name in run.environment)
    return [(name, *(_value(run.environment.get(name)) for run in runs)) for name in names]


def _details(event: dict[str, Any]) -> str:
    known = ("time", "kind", "rank", "host", "pid", "step", "message")
    further = ", ".join(f"{name} {_value(value)}" for name, value in event.items() if name not in known)
    return ": ".join(part for part in (further, _value(event.get("message"))) if part)


def _value(value: object) -> str:
    """Return the text of a value from a file. Python refuses to format integers with thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a huge number"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
