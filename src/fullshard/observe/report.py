"""A report of one run or several: one HTML file that needs no network, for light and dark screens and for paper."""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullshard.core.files import write_text
from fullshard.core.sizes import GIB, MIB, format_count, format_nbytes
from fullshard.core.version import __version__
from fullshard.observe.charts import COLORS, Chart, Line, owners_svg, stack_svg
from fullshard.observe.record import RunRecord, read_runs

_TROUBLE = ("failure", "restart", "rollback", "skip", "preemption", "shrink", "growth", "replica", "slow")
_MOST_ROWS = 200
_STYLE = """
:root { color-scheme: light dark; --text: #1d232b; --back: #ffffff; --soft: #5b6673; --line: #d8dee6; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e9ef; --back: #14181d; --soft: #9aa7b5; --line: #313a45; --card: #1b2128; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 1.2rem; color: var(--text); background: var(--back);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .6rem; background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  break-inside: avoid; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .3rem; }
svg { display: block; width: 100%; max-width: 640px; height: auto; margin: 0 auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word; }
th { color: var(--soft); font-weight: 600; } .differs td { font-weight: 600; }
details { margin: .6rem 0; } summary { cursor: pointer; }
@media print {
  :root { --text: #000; --back: #fff; --soft: #444; --line: #bbb; --card: #fff; }
  body { max-width: none; padding: 0; font-size: 11px; } h2 { break-after: avoid; } tr { break-inside: avoid; }
  .charts { grid-template-columns: 1fr 1fr; } details > * { display: block; }
}
"""


def write_report(paths: Sequence[Path], output: Path) -> None:
    """Read runs from their directories and write the report of them.

    Args:
        paths: of `fullshard train`, `fullshard sft` or Trainer.
        output: the HTML file, written whole or not at all.

    Raises:
        DataError: a directory holds no run.
        MissingExtraError: matplotlib is not installed.
    """
    write_text(output, render(read_runs(list(paths))))


def render(runs: Sequence[RunRecord]) -> str:
    """The page."""
    title = " and ".join(run.name for run in runs)
    parts = [
        f"<h1>{_text(title)}</h1>",
        *(f"<p>{_text(_state_of(run))}</p>" for run in runs),
        _section("Overview", _overview(runs)),
        _section("Course", _charts(runs)),
        *(_section(_of("Memory against plan", run, runs), _memory(run)) for run in runs),
        *(_section(_of("Who owns what", run, runs), _owners(run)) for run in runs),
        *(_section(_of("Failures, restarts and steps left out", run, runs), _trouble(run)) for run in runs),
        *(_section(_of("Checkpoints", run, runs), _checkpoints(run)) for run in runs),
        _section("Settings, and where they came from", _settings(runs)),
        _section("Environment", _environment(runs)),
        f'<p class="soft">fullshard {_text(__version__)}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</p>',
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _state_of(run: RunRecord) -> str:
    """How a run stands, in a sentence."""
    kinds = [event["kind"] for event in run.events]
    last = run.steps[-1]["step"] if run.steps else 0
    begun = max((number for number, kind in enumerate(kinds) if kind == "start"), default=0)
    failed = next((event for event in run.events[begun:] if event["kind"] == "failure"), None)
    if kinds and kinds[-1] == "end":
        state = f"done, {last} steps"
    elif failed is not None:
        what = str(failed.get("message") or failed.get("how") or "").partition("\n")[0]
        state = f"failed after step {last}: {what}"
    elif kinds and kinds[-1] == "preemption":
        state = f"stopped by a signal after step {last}"
    else:
        state = f"{last} steps; whether it goes on is not noted" if kinds else f"{last} steps"
    return f"{run.name}: {state}"


# -- sections ------------------------------------------------------------------------------------------------------


def _overview(runs: Sequence[RunRecord]) -> str:
    rows: list[tuple[str, Callable[[RunRecord], str]]] = [
        ("model", _model),
        ("ranks", _ranks),
        ("steps", lambda run: str(run.steps[-1]["step"]) if run.steps else ""),
        ("loss at the end", _final_loss),
        ("tokens per second, median", lambda run: _median(run, "tokens_per_second", "{:,.0f}")),
        ("MFU, median", lambda run: _median(run, "mfu", "{:.1%}")),
        ("memory of the fullest rank", lambda run: _most(run.memory()[1])),
        ("planned", lambda run: _most(run.series("planned_nbytes")[1])),
        ("waited for data", lambda run: _total(run, "data_wait_seconds")),
        ("stood still for checkpoints", lambda run: _total(run, "checkpoint_seconds")),
        ("steps left out", lambda run: f"{max(run.series('skipped_steps')[1], default=0):.0f}"),
        ("from first to last event", lambda run: "" if (s := run.seconds()) is None else f"{s:,.0f} s"),
    ]
    filled = [(name, [value(run) for run in runs]) for name, value in rows]
    return _table(["", *(run.name for run in runs)], [(name, *cells) for name, cells in filled if any(cells)])


def _charts(runs: Sequence[RunRecord]) -> str:
    wanted = [
        ("Loss", "nats per token", "loss"),
        ("Throughput", "tokens per second", "tokens_per_second"),
        ("Gradient norm", "2-norm before clipping", "grad_norm"),
        ("Learning rate", "", "learning_rate"),
        ("Time of a step", "seconds", "step_seconds"),
        ("Wait for data", "seconds", "data_wait_seconds"),
    ]
    charts = [
        Chart(title, unit, [Line(run.name, x, y, i) for i, run in enumerate(runs) for x, y in [run.series(name)] if x])
        for title, unit, name in wanted
    ]
    memory = Chart("Memory of the fullest rank", "GiB")
    for number, run in enumerate(runs):
        (x, y), (planned_x, planned) = run.memory(), run.series("planned_nbytes")
        if x:
            memory.lines.append(Line(f"{run.name}, measured", x, [value / GIB for value in y], number))
        if planned_x:
            line = Line(f"{run.name}, planned", planned_x, [value / GIB for value in planned], number, dashed=True)
            memory.lines.append(line)
    charts.insert(2, memory)
    figures = (_figure(chart.title, chart.svg()) for chart in charts if chart.lines)
    return f'<div class="charts">{"".join(figures)}</div>'


def _memory(run: RunRecord) -> str:
    memory = run.plan.get("memory")
    if not memory:
        return ""
    process = run.plan.get("process", 0)
    before = {"before the model": process} if process else {}
    phases = {name: before | sizes for name, sizes in memory["phases"].items()}
    stacks = [(name, {c: n / GIB for c, n in sizes.items() if n}) for name, sizes in phases.items()]
    measured = run.memory()[1]
    limit = ("measured, most", max(measured) / GIB) if measured else None
    title = f"The fullest moment of each phase as planned, {run.name}"
    categories = list(dict.fromkeys(name for sizes in phases.values() for name in sizes if any(sizes.values())))
    rows = [(c, *(format_nbytes(s[c]) if s.get(c) else "" for s in phases.values())) for c in categories]
    rows = [row for row in rows if any(row[1:])]
    rows.append(("all", *(format_nbytes(sum(sizes.values())) for sizes in phases.values())))
    return f"<p>{_text(run.plan['verdict'])}</p>{_figure(title, stack_svg(title, stacks, limit=limit))}" + _table(
        ["planned, per rank", *phases], rows
    )


def _owners(run: RunRecord) -> str:
    units = run.plan.get("units")
    if not units:
        return ""
    ranks = run.plan["devices"]["count"]
    shared = min(round(bucket["elements"] / bucket["per_rank"]) or 1 for unit in units for bucket in unit["buckets"])
    groups = _alike([(u["name"] or "root", sum(b["bytes"] for b in u["buckets"]), u["buckets"]) for u in units])
    title = f"Units, cut into what each rank owns, {run.name}"
    bars = [(name, nbytes / MIB) for name, nbytes, _, _ in groups]
    colors = f"{min(shared, len(COLORS))} colours, in turn" if shared > len(COLORS) else "a colour each"
    rows = [
        (name, str(count), ", ".join(_bucket(bucket) for bucket in buckets), format_nbytes(nbytes))
        for name, nbytes, buckets, count in groups
    ]
    words = f"{ranks} ranks; {shared} share a unit ({colors}), and each owns one interval of every bucket."
    return f"<p>{_text(words)}</p>{_figure(title, owners_svg(title, bars, min(shared, 64)))}" + _table(
        ["unit", "how many", "buckets: elements, stored and computed in", "unsharded"], rows
    )


def _bucket(bucket: dict[str, Any]) -> str:
    frozen = "" if bucket["trainable"] else ", frozen"
    return f"{format_count(bucket['elements'])} {bucket['dtype']} / {bucket['compute_dtype']}{frozen}"


def _alike(units: Sequence[tuple[str, int, Any]]) -> list[tuple[str, int, Any, int]]:
    """Neighbours that are alike as one row, with their count."""
    groups: list[tuple[str, int, Any, int]] = []
    for name, nbytes, buckets in units:
        if groups and groups[-1][1:3] == (nbytes, buckets):
            first, _, _, count = groups[-1]
            groups[-1] = (f"{first.partition(' to ')[0]} to {name.rpartition('.')[2]}", nbytes, buckets, count + 1)
        else:
            groups.append((name, nbytes, buckets, 1))
    return groups


def _trouble(run: RunRecord) -> str:
    if not run.events:
        return ""
    found = [event for event in run.events if event["kind"] in _TROUBLE]
    if not found:
        return "<p>None.</p>"
    rows = [
        (event["time"], event["kind"], _value(event.get("step")), _value(event.get("rank")), _details(event))
        for event in found[-_MOST_ROWS:]
    ]
    return _table(["time", "what", "step", "rank", "details"], rows) + _left_out(found)


def _checkpoints(run: RunRecord) -> str:
    saves = {Path(str(event.get("path", ""))).name: event for event in run.events if event["kind"] == "save"}
    present = {one["name"]: one for one in run.checkpoints}
    names = list(dict.fromkeys([*saves, *present]))
    rows = []
    for name in names[-_MOST_ROWS:]:
        one, save = present.get(name), saves.get(name, {})
        seconds = f"{save['seconds']:.2f} s" if isinstance(save.get("seconds"), int | float) else ""
        size = "removed since" if one is None else f"{format_nbytes(one['bytes'])} in {one['files']} files"
        rows.append((name, _value(save.get("step")), save.get("time", ""), seconds, size))
    return _table(["checkpoint", "step", "complete at", "written in", "size"], rows) + _left_out(names) if rows else ""


def _settings(runs: Sequence[RunRecord]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    if not names:
        return ""
    given: list[tuple[bool, tuple[str, ...]]] = []
    rest: list[tuple[bool, tuple[str, ...]]] = []
    for name in names:
        found = [run.settings.get(name, (None, "")) for run in runs]
        cells = [f"{_value(value)} ({origin})" if origin else "" for value, origin in found]
        differs = len({_value(value) for value, _ in found}) > 1
        is_given = differs or any(origin not in ("default", "") for _, origin in found)
        (given if is_given else rest).append((differs, (name, *cells)))
    heads = ["setting", *(run.name for run in runs)]
    shown = _table(heads, [row for _, row in given], marked=[differs for differs, _ in given])
    return f"{shown}<details><summary>{len(rest)} by default</summary>{_table(heads, [r for _, r in rest])}</details>"


def _environment(runs: Sequence[RunRecord]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.environment))
    rows = [(name, *(_value(run.environment.get(name)) for run in runs)) for name in names]
    return _table(["", *(run.name for run in runs)], rows) if rows else ""


# -- cells ---------------------------------------------------------------------------------------------------------


def _model(run: RunRecord) -> str:
    model = run.plan.get("model")
    return f"{model['name']}, {format_count(model['parameters'])} parameters" if model else ""


def _ranks(run: RunRecord) -> str:
    if run.environment:
        return f"{run.environment['ranks']} x {run.environment['device']}"
    started = [event.get("world_size") for event in run.events if event["kind"] == "start"]
    return _value(started[-1]) if started else ""


def _final_loss(run: RunRecord) -> str:
    losses = run.series("loss")[1]
    if not losses:
        return ""
    last = losses[-max(1, len(losses) // 10) :]
    return f"{sum(last) / len(last):.4f}, mean of the last {len(last)}"


def _median(run: RunRecord, name: str, form: str) -> str:
    values = run.series(name)[1]
    return form.format(statistics.median(values)) if values else ""


def _most(values: Sequence[float]) -> str:
    return format_nbytes(round(max(values))) if values else ""


def _total(run: RunRecord, name: str) -> str:
    values = run.series(name)[1]
    return f"{sum(values):.1f} s" if values else ""


def _details(event: dict[str, Any]) -> str:
    known = ("time", "kind", "rank", "host", "pid", "step", "message")
    further = ", ".join(f"{name} {_value(value)}" for name, value in event.items() if name not in known)
    return ": ".join(part for part in (further, str(event.get("message", ""))) if part)


def _value(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _left_out(rows: Sequence[Any]) -> str:
    more = len(rows) - _MOST_ROWS
    return f'<p class="soft">{more} older ones are left out.</p>' if more > 0 else ""


def _of(title: str, run: RunRecord, runs: Sequence[RunRecord]) -> str:
    return title if len(runs) == 1 else f"{title}: {run.name}"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>" if body else ""


def _figure(title: str, svg: str) -> str:
    return f"<figure><figcaption>{_text(title)}</figcaption>{svg}</figure>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, marked: Sequence[bool] = ()) -> str:
    body = "".join(
        f"<tr{' class=differs' if number < len(marked) and marked[number] else ''}>"
        + "".join(f"<td>{_text(cell)}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: str) -> str:
    return html.escape(value)
