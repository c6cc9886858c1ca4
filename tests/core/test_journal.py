"""What happened to a job is in its directory: one test per kind of event.

pytest tests/core/test_journal.py
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.core.journal import JOURNAL, JOURNAL_NAME, Happening, Journal, read_journal
from tests.distributed import run_ranks
from tests.launching import LAUNCH, launch, started, wait_until
from tests.traps import rank_and_size

COMMON = {"time", "kind", "rank", "host", "pid", "step"}


@pytest.fixture(autouse=True)
def _journal_of_its_own() -> Iterator[None]:
    yield
    JOURNAL.close()


def kinds(directory: Path) -> list[str]:
    return [event["kind"] for event in read_journal(directory)]


def train_and_save(directory: str, how: str) -> None:
    """Two ranks: two steps, the second with a NaN, and a checkpoint after it."""
    rank, _ = rank_and_size()
    JOURNAL.path = None  # the process may have served another test
    fullshard.record_events(directory)
    fullshard.record_events(directory)  # the same again
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.set_nonfinite_gradients("skip")
    for step in range(2):
        x = torch.ones(2, 8)
        if how == "skip" and step == 1 and rank == 1:
            x[0, 0] = float("nan")
        model(x).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(Path(directory) / "step-2", model=model, optimizer=optimizer)


def load_again(directory: str) -> None:
    JOURNAL.path = None
    fullshard.record_events(directory)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    load_checkpoint(Path(directory) / "step-2", model=model, optimizer=optimizer)
    if rank_and_size()[1] == 3:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        save_checkpoint(Path(directory) / "step-3", model=model, optimizer=optimizer)


def make() -> Any:
    torch.manual_seed(0)
    return fullshard.fully_shard(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)))


def test_steps_left_out_saves_loads_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    run_ranks(train_and_save, 2, str(tmp_path), "skip")
    run_ranks(load_again, 1, str(tmp_path))
    run_ranks(load_again, 3, str(tmp_path))
    events = list(read_journal(tmp_path))
    assert [event["kind"] for event in events] == (
        ["start", "skip", "save", "start", "load", "shrink", "start", "load", "growth", "save"]
    )
    assert all(event.keys() >= COMMON and event["rank"] == 0 for event in events)
    start, skip, save = events[:3]
    assert start["world_size"] == 2 and start["attempt"] == 0
    assert skip["step"] == 2 and "rank 1" in skip["message"] and "NaN" in skip["message"] and skip["skipped"] == 1
    assert save["step"] == 2 and save["path"] == str(tmp_path / "step-2") and save["seconds"] > 0
    assert events[4]["path"] == save["path"] and events[4]["saved_by"] == 2
    assert (events[5]["before"], events[5]["now"], events[8]["now"]) == (2, 1, 3)
    assert [event["step"] for event in (*events[4:6], *events[7:])] == [2, 2, 2, 2, 3]  # of the run


FAILING = """
import os, sys, time
from pathlib import Path
import fullshard, torch
from fullshard.launch import init_process_group_from_environment

directory, how = Path(sys.argv[1]), sys.argv[2]
environment = init_process_group_from_environment(torch.device("cpu"))
fullshard.record_events(directory)
model = fullshard.fully_shard(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2000):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if step == 3 and environment.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "raise":
            raise ValueError("no more data")
    if how != "signal" and step == 6:
        break
    if how == "signal":
        if fullshard.should_stop():
            break
        if step > 0:  # so both listen
            (directory / "trains").touch()
        time.sleep(0.01)
"""


@pytest.mark.full
def test_failures_and_restarts(tmp_path: Path) -> None:
    """The launcher's part, in the file that its processes have chosen."""
    (tmp_path / "script.py").write_text(FAILING)
    out = tmp_path / "out"
    arguments = ["--num_processes", "2", "--cpu", "--max_restarts", "1", "script.py", "out", "kill"]
    done = launch(*arguments, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    events = list(read_journal(out))
    assert [event["kind"] for event in events] == ["start", "failure", "restart", "start", "end"]
    failure, restart = events[1:3]
    assert failure["rank"] == 1 and failure["how"] == "SIGKILL" and failure["pid"] != events[0]["pid"]
    assert failure["step"] == 4
    assert (restart["rank"], restart["number"], restart["of"]) == (None, 1, 1)
    assert restart["message"] == "rank 1: SIGKILL"
    assert events[3]["attempt"] == 1


@pytest.mark.full
def test_a_report_is_the_message(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    arguments = ["--num_processes", "2", "--cpu", "script.py", "again", "raise"]
    assert launch(*arguments, cwd=tmp_path).returncode == 1
    failure = list(read_journal(tmp_path / "again"))[-1]
    assert (failure["rank"], failure["how"], failure["step"]) == (1, "exit code 1", 4)
    assert failure["message"] == "ValueError: no more data"


@pytest.mark.full
def test_preemption(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    command = [*LAUNCH, "--num_processes", "2", "--cpu", "script.py", "out", "signal"]
    with started(*command, cwd=tmp_path) as launcher:
        wait_until((tmp_path / "out" / "trains").exists, 100, "a step")
        launcher.terminate()
        launcher.communicate(timeout=100)
    asked = list(read_journal(tmp_path / "out"))[1]
    assert asked["kind"] == "preemption" and asked["message"] == "SIGTERM: asked to save and end"


def test_every_kind_is_described() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert all(f"| `{kind}` |" in text for kind in Happening)


def test_what_is_no_event_is_left_out_and_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    journal = Journal(path=tmp_path / JOURNAL_NAME, rank=3)
    journal.note(Happening.SAVE, "\ud800 and a long text " * 1000, path=tmp_path, step=7)
    with (tmp_path / JOURNAL_NAME).open("a") as file:
        file.write('{"time": "2026')
    [event] = read_journal(tmp_path)
    assert event["step"] == 7 and event["rank"] == 3 and event["pid"] == os.getpid()
    assert len(json.dumps(event)) < 4096
    assert not list(read_journal(tmp_path / "nothing"))
    journal.path = tmp_path / "nothing" / JOURNAL_NAME
    journal.note(Happening.SAVE)
    assert journal.path is None
    journal.path = tmp_path  # a directory
    with pytest.warns(UserWarning, match="events cannot be written to"):
        journal.note(Happening.SAVE)
    journal.note(Happening.SAVE)


def test_a_run_that_ends_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    journal = Journal(path=tmp_path / JOURNAL_NAME)
    journal.tell(7)
    journal.close()
    assert journal == Journal()
