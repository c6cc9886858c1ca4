"""Which checkpoint is the newest does not depend on clocks: one may have gone back, and hosts' clocks differ.

pytest tests/checkpoint/test_checkpoint_clocks.py
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from torch import nn

from fullshard.checkpoint import MemoryCopies, latest_checkpoint, load_checkpoint, save_checkpoint, whole_checkpoints
from fullshard.checkpoint import stamps as stamps_module
from fullshard.checkpoint.catalog import prune
from fullshard.checkpoint.format import read_manifest
from fullshard.checkpoint.lease import let_go
from fullshard.checkpoint.objects import location
from fullshard.config.switches import COPIES_DIR
from fullshard.integrations.transformers.trainer import _bring_back_from_the_future, complete_checkpoints


def another_process(monkeypatch: pytest.MonkeyPatch, *, behind: float) -> None:
    """Forget what this process knows, and set its clock back."""
    monkeypatch.setattr(stamps_module, "_LATEST", [0.0])
    stamps_module.note_stamps_in.cache_clear()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - behind)


@pytest.mark.parametrize("store", ["directory", "memory://clocks"])
def test_the_newest_is_what_was_saved_last(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = location(tmp_path if store == "directory" else store), nn.Linear(2, 2)
    for step in (1, 2):
        save_checkpoint(folder / f"step-{step}", model=model)
    another_process(monkeypatch, behind=3600)
    for step in (3, 4):
        save_checkpoint(folder / f"step-{step}", model=model, total_limit=3)
        assert latest_checkpoint(folder) == folder / f"step-{step}"
    assert [path.name for path in whole_checkpoints(folder)] == ["step-4", "step-3", "step-2"]
    assert [path.name for path in prune(folder, keep=1).kept] == ["step-4"]
    let_go()


def test_a_checkpoint_that_was_loaded_is_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it lies elsewhere; and a copy in host memory compares the same stamp."""
    monkeypatch.setenv(COPIES_DIR.name, str(tmp_path / "memory"))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    (tmp_path / "memory").mkdir()
    model = nn.Linear(2, 2)
    first = save_checkpoint(tmp_path / "there" / "a", model=model)
    another_process(monkeypatch, behind=3600)
    load_checkpoint(first, model=model)
    with MemoryCopies(1) as copies:
        copies.after_step(1, model=model)
    newest = read_manifest(first).saved_at
    with MemoryCopies(1) as copies:
        assert copies.load(newer_than=newest, model=model) == {"step": 1}
    second = save_checkpoint(tmp_path / "here" / "b", model=model)
    with MemoryCopies(1) as copies:
        assert copies.load(newer_than=read_manifest(second).saved_at, model=model) is None


def test_transformers_removes_the_oldest_by_number(tmp_path: Path) -> None:
    """It goes by the time of change; of those that are not in the future that stays what it was."""
    now = time.time()
    times = {"checkpoint-5": now - 100, "checkpoint-20": now + 500, "checkpoint-100": now + 400}
    for name, changed in times.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").touch()
        os.utime(tmp_path / name, (changed, changed))
    _bring_back_from_the_future(tmp_path)
    by_time = sorted(complete_checkpoints(tmp_path), key=lambda path: path.stat().st_mtime)
    assert [path.name for path in by_time] == ["checkpoint-5", "checkpoint-20", "checkpoint-100"]
    assert by_time[-1].stat().st_mtime < time.time() and by_time[0].stat().st_mtime == times["checkpoint-5"]
