"""Write a report on one or more runs as a single HTML file, which can be opened without network access."""

import operator
import os
import stat
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullshard.core.files import write_text
from fullshard.core.imports import import_extra
from fullshard.core.sizes import format_nbytes
from fullshard.core.version import __version__
from fullshard.observe.plots import Line, line_chart, rehearsal_chart, require_plots
from fullshard.observe.record import RunRecord, read_runs

_TROUBLE = ("failure", "restart", "skip", "preemption", "shrink", "growth", "replica", "slow", "waiting")
_MOST_ROWS, _LONGEST = 200, 300
_COURSE = (
    ("Loss", "nats per token", "loss"),
    ("Throughput", "tokens per second", "tokens_per_second"),
    ("Gradient norm", "2-norm before clipping", "grad_norm"),
    ("Learning rate", "", "learning_rate"),
    ("Time of a step", "seconds", "step_seconds"),
    ("Wait for data", "seconds", "data_wait_seconds"),
)

Rows = list[tuple[str, ...]]


def _end(values: list[float]) -> float:
    return statistics.fmean(values[-max(1, len(values) // 10) :])


_NUMBERS: tuple[tuple[str, str, Callable[[list[float]], float], str], ...] = (
    ("loss at the end", "loss", _end, "{:.4f}, mean of the last {} of {} logged steps"),
    ("held-out loss", "held_out_loss", operator.itemgetter(-1), "{:.4f}"),
    ("tokens per second, median", "tokens_per_second", statistics.median, "{:,.0f}"),
    ("waited for data", "data_wait_seconds", sum, "{:.1f} s"),
    ("blocked by checkpoints", "checkpoint_seconds", sum, "{:.1f} s"),
    ("skipped steps", "skipped_steps", max, "{:.0f}"),
    ("peak memory of the fullest rank", "memory_nbytes", max, ""),
)
"""Each number's title, its name in `metrics.jsonl`, how it follows from the values of all steps, and its form."""


def write_report(paths: Sequence[Path], output: Path) -> None:
    """Write a report on some runs to a file, atomically. A link or pipe at `output` in a run's folder is replaced."""
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
    pages.filters |= {"nbytes": format_nbytes, "training_loss": _training_loss}
    pages.tests["differing"] = lambda row: len(set(row[1:])) > 1
    given, differing, by_default = _settings(runs)
    values: dict[str, Any] = {
        "runs": runs,
        "most": _MOST_ROWS,
        "names": [run.name for run in runs],
        "states": [f"{run.name}: {run.state}" if len(runs) > 1 else run.state for run in runs],
        "overview": _overview(runs),
        "charts": _charts(runs),
        "rehearsals": [(r.name, rehearsal_chart(r.rehearsal.model_dump())) for r in runs if r.rehearsal],
        "trouble": [(run.name, _trouble(run)) for run in runs if run.events],
        "given": given,
        "differing": differing,
        "changed": [given[number] for number in differing],
        "by_default": by_default,
        "environment": _environment(runs),
        "version": __version__,
        "now": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
    }
    return str(pages.get_template("report.html.j2").render(values))


def _overview(runs: Sequence[RunRecord]) -> Rows:
    steps = (str(run.steps[-1]["step"]) if run.steps else "" for run in runs)
    rows = [("ranks", *map(_ranks, runs)), ("steps", *steps)]
    shown = _NUMBERS if len(runs) > 1 else _NUMBERS[:-1]  # the memory of a single run has a section
    rows += [(title, *(_of(run, name, of, form) for run in runs)) for title, name, of, form in shown]
    return [row for row in rows if any(row[1:])]


def numbers(run: RunRecord) -> dict[str, Any]:
    """Return a run's outcome, its last step, and the numbers of `_NUMBERS` by their names in `metrics.jsonl`."""
    found: dict[str, Any] = {"run": run.name, "outcome": run.outcome}
    found["step"] = run.steps[-1]["step"] if run.steps else None
    return found | {name: of(values) for _, name, of, form in _NUMBERS if (values := _values(run, name, form))}


def _ranks(run: RunRecord) -> str:
    now = _value(run.environment.get("ranks"))
    counted = [] if run.recorded.measures_rank_0 else run.steps
    until = {len(step.get("memory_nbytes") or ()): _value(step["step"]) for step in counted}
    earlier = ", ".join(f"{ranks} until step {step}" for ranks, step in until.items() if ranks and str(ranks) != now)
    return f"{now} ({earlier})" if now and earlier else now


def _of(run: RunRecord, name: str, of: Callable[[list[float]], float], form: str = "") -> str:
    """Return the result of `of` for a series of metrics as text, by `form` or as the bytes of the last attempt."""
    if not (values := _values(run, name, form)):
        return ""
    return form.format(of(values), max(1, len(values) // 10), len(values)) if form else format_nbytes(round(of(values)))


def _values(run: RunRecord, name: str, form: str) -> list[float]:
    return run.series(name, -1 if form else run.recorded.resumed_after)[1]


def _training_loss(run: RunRecord) -> tuple[float, float] | None:
    """Return the mean training loss before the last evaluation, and two of its standard errors."""
    at, losses = run.series("held_out_loss")[0], zip(*run.series("loss"), strict=True)
    past = [loss for step, loss in losses if at and step <= at[-1]]
    if len(past) < 2:
        return None
    return _end(past), 2 * statistics.stdev(past[-max(10, len(past) // 10) :]) / max(1, len(past) // 10) ** 0.5


def _charts(runs: Sequence[RunRecord]) -> list[tuple[str, float, str]]:
    """Return the title, the weight of the smoothing (from 0.6, TensorBoard's default, to 0.9) and the image."""
    names, drawn = [run.name for run in runs] if len(runs) > 1 else [""], []
    for title, unit, name in _COURSE:
        lines = [Line(names[n] or "training", *run.series(name), n, marks=run.resumed) for n, run in enumerate(runs)]
        if name == "loss":  # of several runs, each has one color
            held = ((n, run.series("held_out_loss")) for n, run in enumerate(runs))
            lines += [Line(f"{names[n]} held out", *found, n + (not names[n]), "o--") for n, found in held]
        if lines := [line for line in lines if line.x]:
            weight = 0.0 if name == "learning_rate" else max(0.6, min(0.9, 1 - 50 / max(len(x) for _, x, *_ in lines)))
            drawn.append((title, weight, line_chart(unit, lines, weight)))
    return drawn


def _trouble(run: RunRecord) -> Rows:
    return [
        (event["time"], event["kind"], _value(event.get("step")), _value(_cause(event)), _details(event))
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


def _cause(event: dict[str, Any]) -> object:
    """Return the rank that caused an event, or else the rank that reported it."""
    return event.get("rank") if event.get("cause_rank") is None else event["cause_rank"]


def _details(event: dict[str, Any]) -> str:
    known = ("time", "kind", "rank", "host", "pid", "step", "message", "cause_rank", "how")
    reporter = event.get("rank") if event.get("rank") != _cause(event) else None
    told = {"": event.get("how"), "reported by rank ": reporter}
    told |= {f"{name} ": value for name, value in event.items() if name not in known}
    further = ", ".join(f"{name}{_value(value)}" for name, value in told.items() if value is not None)
    return ": ".join(part for part in (further, _value(event.get("message"))) if part)


def _value(value: object) -> str:
    """Return the text of a value from a file. Python refuses to format integers with thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a huge number"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
