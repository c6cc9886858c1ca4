"""`fullshard watch` shows a run's state while it trains and ends with it.

pytest tests/cli/test_watch.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli import watch
from fullshard.cli.main import app
from fullshard.core.journal import Happening, Journal, read_journal
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
    facts = {"ranks": 2, "hosts": "one, three, two", "total_steps": 50}
    (tmp_path / "environment.json").write_text(json.dumps(facts))
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


def test_the_state_as_json(run: Path) -> None:
    code, text = watched(run, "--once", "--json")
    state = json.loads(text)
    assert code == 0 and set(state) == {"outcome", "lost", "step", "save", "trouble"}
    assert state["outcome"] == "unknown" and state["step"]["step"] == 30 and state["step"]["loss"] == 2.5
    assert state["save"]["path"] == "here/step-20" and state["trouble"]["message"] == "rank 1 is slow"
    note(run, Happening.END)
    assert json.loads(watched(run, "--json")[1])["outcome"] == "done"


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


def test_the_last_trouble_of_a_run(run: Path) -> None:
    """A wait names both ranks. A signal shows the rank that hung. Trouble before the last start is over at the end."""

    def shown() -> dict[str, str]:
        return {line[:16].strip(): line[16:] for line in watched(run, "--once")[1].splitlines()}

    journal = Journal(run / "events.jsonl", rank=0)
    journal.note(Happening.WAITING, "rank 2 is running, at a.py:3; rank 0 has waited 30 s", cause_rank=2)
    assert re.fullmatch(r"waiting at 20\S+Z: rank 2 is running, at a.py:3; rank 0 has .*", shown()["last trouble"])
    journal.note(Happening.PREEMPTION, "SIGTERM ended the run without a save\nrank 2 of 4 was running", cause_rank=2)
    assert shown()["ended"] == "stopped by a signal after step 30: SIGTERM ended the run without a save"
    assert shown()["last trouble"].endswith("Z: SIGTERM ended the run without a save; rank 2 of 4 was running")
    journal.note(Happening.START)
    journal.note(Happening.FAILURE, f"no answer {'words ' * 90}", rank=3, how="exit code 1", cause_rank=1)
    assert re.fullmatch(r"failure of rank 1, reported by rank 3 at 20\S+Z: exit code 1", shown()["last trouble"])
    journal.note(Happening.START)
    assert shown()["last trouble"].endswith(" words ...") and "ended" not in shown()
    journal.note(Happening.END)
    assert "last trouble" not in shown()


@pytest.mark.parametrize(
    ("kind", "message", "code", "ended"),
    [
        (Happening.END, "", 0, "done, 31 steps"),
        (Happening.FAILURE, "out of memory", 1, "failed after step 31: out of memory"),
        (Happening.PREEMPTION, "saved and stopped because of a signal", 0, "stopped by a signal after step 31\n"),
        (Happening.PREEMPTION, "SIGTERM ended the run without a save", 1, "stopped by a signal after step 31: SIGTERM"),
    ],
)
def test_it_ends_with_the_run(run: Path, kind: Happening, message: str, code: int, ended: str) -> None:
    note(run, Happening.PREEMPTION, "SIGTERM: asked to save and end")  # this does not end it

    def train() -> None:
        time.sleep(0.5)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(step(31))
        note(run, kind, message)

    training = threading.Thread(target=train)
    training.start()
    found, text = watched(run, "--every", "0.1")
    training.join()
    assert found == code and f"ended           {ended}" in text
    assert "30 of 50" in text and "31 of 50" in text


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    code, _ = watched(tmp_path, "--once")
    assert code != 0


def launched(run: Path, *, host: str, pid: int, ago: float, **more: object) -> None:
    """Let a run begin now, and let its files be of `ago` seconds before now."""
    event = {"time": datetime.now(UTC).isoformat(), "kind": "start", "host": host, "pid": pid} | more
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    for name in ("events.jsonl", "metrics.jsonl"):
        os.utime(run / name, (time.time() - ago, time.time() - ago))


@pytest.fixture
def ended() -> int:
    """A process id that no process has."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_run_whose_launcher_was_killed_is_lost(run: Path, ended: int) -> None:
    here = socket.gethostname()
    launched(run, host=here, pid=1, ago=30, launcher=ended)
    code, text = watched(run)
    assert code == 1 and re.match(
        r"ended           the run has written nothing since 20\d\d-\S+ \S+ UTC\nlauncher  ", text
    )
    assert f"launcher        process {ended} on {here} no longer runs\n" in text
    launched(run, host=here, pid=ended, ago=200)  # without a launcher
    assert watched(run)[0] == 1 and f"rank 0          process {ended} on {here} no longer runs\n" in watched(run)[1]


def test_a_run_that_may_still_write_is_not_lost(run: Path, ended: int) -> None:
    here = socket.gethostname()
    for state in (
        {"pid": 1, "launcher": ended, "ago": 1},  # the launcher of another container has the same host name
        {"pid": 1, "launcher": os.getppid(), "ago": 500},
        {"pid": ended, "ago": 30},  # torchrun may start it again
    ):
        launched(run, host=here, **state)
        assert watched(run, "--once")[0] == 0, state
    launched(run, host="elsewhere", pid=ended, launcher=ended, ago=1000)  # its clock may differ
    assert watched(run, "--once")[0] == 0


def test_another_host_is_lost_without_heartbeats(run: Path, ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_SILENT_SECONDS", 0.5)
    launched(run, host="elsewhere", pid=ended, launcher=7, ago=0)
    beats = [threading.Timer(at / 5, os.utime, [run / "events.jsonl"]) for at in range(1, 6)]
    began = time.monotonic()
    for beat in beats:
        beat.start()
    code, text = watched(run, "--every", "0.1")
    assert code == 1 and time.monotonic() - began > 1.4
    assert "launcher        process 7 on elsewhere has sent no heartbeat for" in text


def test_memory_of_one_rank_is_said_to_be_of_one(run: Path) -> None:
    (run / "environment.json").write_text(json.dumps({"ranks": 2, "measures_rank_0": True}))
    assert "2.00 GiB on rank 0\n" in watched(run, "--once")[1]


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_killed_launcher_ends_the_watch(tmp_path: Path) -> None:
    """The launcher shows that it lives, also while no rank writes, until it is killed."""
    script = "import sys, time, fullshard; fullshard.record_events(sys.argv[1]); time.sleep(100)"
    (tmp_path / "train.py").write_text(script)
    words = [sys.executable, "-m", "fullshard", "launch", "--num_processes", "2", "--cpu", "train.py", "out"]
    journal = tmp_path / "out" / "events.jsonl"
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL) as launcher:
        while not (journal.exists() and journal.read_text()):
            time.sleep(0.1)
        wrote = json.loads(journal.read_text().splitlines()[0])
        assert wrote["launcher"] == launcher.pid
        before = journal.stat().st_mtime
        time.sleep(7)
        assert journal.stat().st_mtime > before and watched(tmp_path / "out", "--once")[0] == 0
        launcher.send_signal(signal.SIGKILL)
    code, text = watched(tmp_path / "out", "--every", "0.5")
    assert code == 1 and f"launcher        process {launcher.pid} on " in text


@pytest.mark.full
@pytest.mark.timeout(120)
def test_the_launcher_records_the_end_of_a_script(tmp_path: Path) -> None:
    """Only if the script has not recorded it."""
    words = [sys.executable, "-m", "fullshard", "launch", "--num_processes", "2", "--cpu", "train.py"]
    for end, pids in ((".end_training()", 1), ("", 2)):
        script = "import fullshard; fullshard.Accelerator(cpu=True, project_dir='out')" + end
        (tmp_path / "train.py").write_text(script)
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=100)
        events = list(read_journal(tmp_path / "out"))
        assert [event["kind"] for event in events] == ["start", "end"] and len({e["pid"] for e in events}) == pids
        (tmp_path / "out" / "events.jsonl").unlink()


def test_the_step_of_a_run_that_records_no_metrics_is_unknown(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "environment.json").unlink()
    note(run, Happening.PREEMPTION, "saved and stopped because of a signal")
    _, text = watched(run, "--once")
    assert re.search("^step +unknown$", text, re.MULTILINE), text
    assert re.search("^ended +stopped by a signal$", text, re.MULTILINE), text
