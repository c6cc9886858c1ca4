"""The `fullshard watch` command, which follows a run in the terminal."""

from __future__ import annotations

import contextlib
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.options import path_word
from fullshard.core.errors import plural
from fullshard.core.sizes import format_nbytes

if TYPE_CHECKING:
    from fullshard.observe.record import RunRecord

_TYPICAL_STEPS = 20
"""The number of last steps whose median time predicts the end of the run."""


def watch(
    run: Annotated[
        Path, typer.Argument(help="The --output-dir of the run, on this host or a shared disk.", parser=path_word)
    ],
    *,
    every: Annotated[float, typer.Option(help="Seconds between two looks at the run's files.", min=0.1)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state and exit.")] = False,
) -> None:
    """Follow a run in the terminal: steps, loss, speed and trouble.

    Another terminal, job or host trains it. The command ends with the run, with
    exit code 1 if the run failed. Ctrl-C ends only the command.
    """
    from rich.live import Live

    from fullshard.observe.record import read_runs

    screen, shown = Live(auto_refresh=False), ""
    with screen if screen.console.is_terminal else contextlib.nullcontext():
        while True:
            (record,) = read_runs([run])
            text = "\n".join(f"{name:16}{value}" for name, value in _rows(record).items() if value)
            if screen.is_started:
                screen.update(text, refresh=True)
            elif text != shown:
                typer.echo(text)
            if once or record.outcome != "unknown":
                break
            shown = text
            time.sleep(every)
    if record.outcome == "failed":
        raise typer.Exit(1)


def _rows(run: RunRecord) -> dict[str, str]:
    """Return the name and the text of each line about a run."""
    settings = {name.lstrip("-").replace("-", "_"): entry.get("value") for name, entry in run.settings.items()}
    last: dict[str, Any] = run.steps[-1] if run.steps else {}
    done, wanted, seconds = last.get("step", 0), settings.get("steps"), run.series("step_seconds")[1]
    rows = {"ended": "" if run.outcome == "unknown" else run.state}
    rows["step"] = f"{done} of {wanted}" if isinstance(wanted, int) else str(done)
    if isinstance(wanted, int) and seconds and done < wanted:
        left = (wanted - done) * statistics.median(seconds[-_TYPICAL_STEPS:])
        rows["time left"] = f"{timedelta(seconds=round(left))}, without saves and evaluations"
    named = {"loss": run.series("loss")[1], "held-out loss": run.series("held_out_loss")[1]}
    rows |= {name: f"{losses[-1]:.4f}" for name, losses in named.items() if losses}
    if speeds := run.series("tokens_per_second")[1]:
        rows["tokens/s"] = f"{speeds[-1]:,.0f}"
    if memory := run.series("memory_nbytes", run.recorded.resumed_after)[1]:
        ranks = run.environment.get("ranks", "?")
        rows["memory"] = f"{format_nbytes(round(memory[-1]))} on the fullest of {plural(ranks, 'rank')}"
    saves = [event for event in run.events if event["kind"] == "save"]
    rows["last checkpoint"] = f"{saves[-1].get('path', '')}, {saves[-1]['time']}" if saves else "none yet"
    rows["hosts"] = str(run.environment.get("hosts", ", ".join(sorted({str(event["host"]) for event in run.events}))))
    trouble = [event for event in run.events if event["kind"] in ("failure", "skip", "slow", "shrink")]
    if trouble:
        event = trouble[-1]
        rank, cause = (event.get(name) if event["kind"] == "failure" else None for name in ("rank", "cause_rank"))
        by = f", reported by rank {rank}" if cause not in (None, rank) else ""
        rank = "" if rank is None else f" of rank {rank if cause is None else cause}{by}"
        said = [str(event[name]) for name in ("how", "message") if event.get(name)]
        rows["last trouble"] = ": ".join([f"{event['kind']}{rank} at {event['time']}", *said])[:300]
    rows["restarts"] = str(sum(event["kind"] == "restart" for event in run.events) or "")
    return rows
