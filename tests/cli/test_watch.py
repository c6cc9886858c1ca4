"""`fullshard watch` shows a run's state while it trains and ends with it.

pytest tests/cli/test_watch.py
"""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli.main import app
from fullshard.core.journal import Happening, Journal
from fullshard.core.sizes import GIB
from fullshard.observe import StepMetrics


def step(number: int) -> str:
    """A line of the metrics file."""
    held_out = 2.75 if number == 20 else None
    metrics = StepMetrics(number, 2.5, 1e-3, 1.0, 0.5, 1234.0, 0.0, (GIB, 2 * GIB), held_out_loss=held_out)
    return metrics.to_json() + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(map(step, range(1, 31))))
    (tmp_path / "settings.json").write_text(json.dumps({"--steps": {"value": 50, "origin": "given"}}))
    (tmp_path / "environment.json").write_text(json.dumps({"ranks": 2, "hosts": "one, three, two"}))
    journal = Journal(tmp_path / "events.jsonl", rank=0)
    journal.note(Happening.START, host="one")
    journal.note(Happening.SAVE, path="here/step-20", host="one")
    journal.note(Happening.SLOW, "rank 1 is slow", host="two")
    return tmp_path


def note(run: Path, kind: Happening, message: str = "") -> None:
    Journal(run / "events.jsonl", rank=0).note(kind, message)


def watched(run: Path, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["watch", str(run), *words])
    return done.exit_code, done.output


def test_a_run_that_trains(run: Path) -> None:
    code, text = watched(run, "--once")
    shown = {line[:16].strip(): line[16:] for line in text.splitlines()}
    assert code == 0 and "ended" not in shown
    assert shown["step"] == "30 of 50" and shown["time left"] == "0:00:10, without saves and evaluations"
    assert shown["loss"] == "2.5000" and shown["held-out loss"] == "2.7500" and shown["tokens/s"] == "1,234"
    assert shown["memory"] == "2.00 GiB on the fullest of 2 ranks"
    assert shown["last checkpoint"].startswith("here/step-20, 20")
    assert shown["hosts"] == "one, three, two"
    assert shown["last trouble"].startswith("slow at 20") and shown["last trouble"].endswith("rank 1 is slow")


def test_a_killed_rank_is_named(run: Path) -> None:
    journal = Journal(run / "events.jsonl", rank=0)
    journal.note(Happening.FAILURE, "x" * 400, rank=2, cause_rank=1, how="exit code 1")
    _, text = watched(run, "--once")
    assert re.search(r"^last trouble    failure of rank 1, reported by rank 2 at 20\S+Z: exit", text, re.MULTILINE), (
        text
    )
    journal.note(Happening.FAILURE, rank=1, how="SIGKILL")
    journal.note(Happening.RESTART, number=1, of=3)
    journal.note(Happening.START, world_size=2, attempt=1)
    _, text = watched(run, "--once")
    assert re.search(r"^last trouble    failure of rank 1 at 20\S+Z: SIGKILL$", text, re.MULTILINE), text
    assert re.search(r"^restarts +1$", text, re.MULTILINE), text


@pytest.mark.parametrize(
    ("kind", "code", "ended"),
    [
        (Happening.END, 0, "done, 31 steps"),
        (Happening.FAILURE, 1, "failed after step 31: out of memory"),
        (Happening.PREEMPTION, 0, "stopped by a signal after step 31"),
    ],
)
def test_it_ends_with_the_run(run: Path, kind: Happening, code: int, ended: str) -> None:
    def train() -> None:
        time.sleep(0.5)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(step(31))
        note(run, kind, "out of memory")

    training = threading.Thread(target=train)
    training.start()
    found, text = watched(run, "--every", "0.1")
    training.join()
    assert found == code and f"ended           {ended}" in text
    assert "30 of 50" in text and "31 of 50" in text


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    code, _ = watched(tmp_path, "--once")
    assert code != 0
