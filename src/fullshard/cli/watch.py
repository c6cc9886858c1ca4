"""The `fullshard watch` command, which follows a run in the terminal."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import textwrap
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from fullshard.cli.options import path_word
from fullshard.core.errors import plural
from fullshard.core.sizes import format_nbytes

if TYPE_CHECKING:
    from fullshard.observe.record import RunRecord

_TROUBLE = ("failure", "skip", "slow", "shrink", "waiting")
_LONGEST = 300
_TYPICAL_STEPS = 20
"""The number of last steps whose median time predicts the end of the run."""
_SILENT_SECONDS, _GONE_SECONDS = 180.0, 10.0
"""How long no file changes until a run counts as lost: on another host, and on this one if its process is gone. A
launcher's heartbeat comes every 5 s, but a shared disk may show it a minute later."""


def watch(
    run: Annotated[
        Path, typer.Argument(help="The --output-dir of the run, on this host or a shared disk.", parser=path_word)
    ],
    *,
    every: Annotated[float, typer.Option(help="Seconds between two looks at the run's files.", min=0.1)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON whenever the state changes.")] = False,
) -> None:
    """Follow a run in the terminal: steps, loss, speed and trouble.

    Another terminal, job or host trains it. The command ends with the run, with
    exit code 1 if the run failed, a signal ended it before it saved, or its
    launcher was killed. Ctrl-C ends only the command.
    """
    from rich.live import Live

    from fullshard.observe.record import read_runs

    screen, shown, written, changed = Live(auto_refresh=False), "", 0.0, time.monotonic()
    with screen if screen.console.is_terminal and not as_json else contextlib.nullcontext():
        while True:
            (record,) = read_runs([run])
            if record.written != written:
                written, changed = record.written, time.monotonic()
            lost = _lost(record, time.monotonic() - changed) if record.outcome == "unknown" else {}
            rows = {**lost, **_rows(record), **lost}  # first, and instead of its names
            lines = (f"{name:16}{value}" for name, value in rows.items() if value)
            text = json.dumps(_state(record, lost.get("ended"))) if as_json else "\n".join(lines)
            if screen.is_started:
                screen.update(text, refresh=True)
            elif text != shown:
                typer.echo(text)
            if once or lost or record.outcome != "unknown":
                break
            shown = text
            time.sleep(every)
    if lost or record.outcome == "failed" or (record.outcome == "stopped" and not record.is_saved):
        raise typer.Exit(1)


def _lost(run: RunRecord, watched: float) -> dict[str, str]:
    """Return lines that say why the run writes no more, or none. Its files have not changed for `watched` seconds."""
    start: dict[str, Any] = next((event for event in reversed(run.events) if event["kind"] == "start"), {})
    kind, host, silent = "launcher" if start.get("launcher") else "pid", start.get("host"), watched
    is_here, is_gone = host == socket.gethostname(), kind == "launcher"  # only a launcher sends heartbeats
    if is_here:
        silent, is_gone = time.time() - run.written, not _is_running(start.get(kind), start["time"])
    if not is_gone or silent < (_GONE_SECONDS if is_here and kind == "launcher" else _SILENT_SECONDS):
        return {}
    since = f"{datetime.fromtimestamp(run.written, UTC):%Y-%m-%d %H:%M:%S} UTC"
    how = "no longer runs" if is_here else f"has sent no heartbeat for {silent:.0f} s"
    whose = {"pid": "rank 0"}.get(kind, kind), f"process {start.get(kind)} on {host} {how}"
    return dict([("ended", f"the run has written nothing since {since}"), whose, ("time left", "")])


def _is_running(pid: Any, at: str) -> bool:
    """Return whether the process that had this id at a time (ISO 8601) still runs on this host."""
    try:
        process, latest = psutil.Process(pid), datetime.fromisoformat(at) + timedelta(minutes=1)  # clocks are adjusted
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.create_time() < latest.timestamp())
    except (psutil.NoSuchProcess, TypeError, ValueError, OverflowError):
        return False


def _state(run: RunRecord, lost: str | None) -> dict[str, Any]:
    """Return the outcome, the last line of `metrics.jsonl`, and the last save and trouble in `events.jsonl`."""
    state = {"outcome": run.outcome, "lost": lost, "step": run.steps[-1] if run.steps else None}
    saves = [event for event in run.events if event["kind"] == "save"]
    return state | {"save": saves[-1] if saves else None, "trouble": _trouble(run)}


def _trouble(run: RunRecord) -> dict[str, Any] | None:
    """Return the last event that is trouble, or None. What came before the last start is over if the run is done."""
    events = run.events[run.begun if run.outcome == "done" else 0 :]
    return next((one for one in reversed(events) if one["kind"] in _TROUBLE or "cause_rank" in one), None)


def _rows(run: RunRecord) -> dict[str, str]:
    """Return the name and the text of each line about a run."""
    last: dict[str, Any] = run.steps[-1] if run.steps else {}
    done, wanted, seconds = last.get("step", 0), run.recorded.total_steps, run.series("step_seconds")[1]
    rows = {"ended": "" if run.outcome == "unknown" else run.state}
    rows["step"] = f"{done} of {wanted}" if wanted else str(done) if run.steps else "unknown"
    if wanted and seconds and done < wanted:
        left = (wanted - done) * statistics.median(seconds[-_TYPICAL_STEPS:])
        rows["time left"] = f"{timedelta(seconds=round(left))}, without saves and evaluations"
    named = {"loss": run.series("loss")[1], "held-out loss": run.series("held_out_loss")[1]}
    rows |= {name: f"{losses[-1]:.4f}" for name, losses in named.items() if losses}
    if speeds := run.series("tokens_per_second")[1]:
        rows["tokens/s"] = f"{speeds[-1]:,.0f}"
    if memory := run.series("memory_nbytes", run.recorded.resumed_after)[1]:
        ranks = run.environment.get("ranks", "?")
        of = "rank 0" if run.recorded.measures_rank_0 else f"the fullest of {plural(ranks, 'rank')}"
        rows["memory"] = f"{format_nbytes(round(memory[-1]))} on {of}"
    saves = [event for event in run.events if event["kind"] == "save"]
    rows["last checkpoint"] = f"{saves[-1].get('path', '')}, {saves[-1]['time']}" if saves else "none yet"
    rows["hosts"] = str(run.environment.get("hosts", ", ".join(sorted({str(event["host"]) for event in run.events}))))
    if (event := _trouble(run)) is not None:
        rank, cause = (event.get(name) if event["kind"] == "failure" else None for name in ("rank", "cause_rank"))
        by = f", reported by rank {rank}" if cause not in (None, rank) else ""
        rank = "" if rank is None else f" of rank {rank if cause is None else cause}{by}"
        names = ("how",) if event is run.failure else ("how", "message")  # `ended` shows the message of a failure
        said = [str(event[name]).replace("\n", "; ") for name in names if event.get(name)]
        text = ": ".join([f"{event['kind']}{rank} at {event['time']}", *said])
        rows["last trouble"] = textwrap.shorten(text, _LONGEST, placeholder=" ...")
    rows["restarts"] = str(sum(event["kind"] == "restart" for event in run.events) or "")
    return rows
