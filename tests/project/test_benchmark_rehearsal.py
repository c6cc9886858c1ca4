"""The record of rehearsals on a GPU: what is measured when, and how it is summed up.

Run: pytest tests/project/test_benchmark_rehearsal.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rehearsal

FRESH: dict[str, Any] = {"commit": "a", "dirty": False, "machine": {"accelerators": ["H100"]}, "is_quick": True}


def _found(engine: str, step: float, exposed: float = 1.0) -> dict[str, Any]:
    return {
        "engine": engine, "step_seconds": step, "exposed_seconds": exposed, "allocated_nbytes": 30,
        "reserved_nbytes": 40, "losses": [1.0],
    }  # fmt: skip


def test_ratios_are_medians_of_pairs() -> None:
    turns = [_found("fullshard", 1), _found("fsdp2", 2), _found("fsdp2", 4), _found("fullshard", 3)]
    assert rehearsal.ratios(turns)["step_seconds"] == (1 / 2 + 3 / 4) / 2
    assert rehearsal.ratios(turns)["reserved_nbytes"] == 1
    failed = {"engine": "fsdp2", "error": "out of memory"}
    assert rehearsal.ratios([turns[0], failed, turns[1], turns[3]])["step_seconds"] == 3 / 2
    assert set(rehearsal.ratios([turns[0], failed]).values()) == {None}
    assert rehearsal.ratios([_found("fullshard", 1), _found("fsdp2", 1, 0.0)])["exposed_seconds"] is None


def test_a_record_is_filled_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engines take turns. A repeated command measures only what is missing."""
    path, asked = tmp_path / "record.json", list[tuple[str, int, str]]()

    def run(name: str, ranks: int, engine: str) -> dict[str, Any]:
        asked.append((name, ranks, engine))
        return _found(engine, 1.0 + (engine == "fsdp2"))

    record = rehearsal.opened(path, {**FRESH, "commands": ["first"], "rows": []})
    left = rehearsal.missing(record, ["llama-1b"], [8, 64])
    assert rehearsal.fill(record, path, left, run, repeats=1, until=-math.inf) == 2
    assert not asked
    assert rehearsal.fill(record, path, left[:1], run, repeats=2, until=math.inf) == 0
    assert [engine for _, _, engine in asked] == ["fullshard", "fsdp2", "fsdp2", "fullshard"]
    assert "llama-1b, 8 ranks, fullshard: step 1000.0 ms, exposed 1000.0 ms, " in capsys.readouterr().out
    record = rehearsal.opened(path, {**FRESH, "commands": ["second"], "rows": []})
    assert record["commands"] == ["first", "second"]
    assert rehearsal.missing(record, ["llama-1b"], [8, 64]) == [("llama-1b", 64)]
    [row] = json.loads(path.read_text())["rows"]
    assert (row["model"], row["ranks"], row["ratios"]["step_seconds"]) == ("Llama-3.2-1B", 8, 0.5)


@pytest.mark.parametrize(
    ("other", "said"),
    [({"commit": "b"}, "commit a, here it is b"), ({"machine": {"accelerators": []}}, r"\['H100'\], here it is \[\]")],
)
def test_a_record_of_another_commit_or_device_is_refused(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**FRESH, "commands": [], "rows": []}))
    with pytest.raises(SystemExit, match=said):
        rehearsal.opened(path, {**FRESH, **other, "commands": [], "rows": []})
