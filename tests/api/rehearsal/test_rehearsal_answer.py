"""The answer of a rehearsal: what is beside the measured numbers, from one run that all tests share.

pytest tests/api/rehearsal/test_rehearsal_answer.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fullshard.cli.rehearse import _lines
from tests.commands import run_here
from tests.distributed import preload

VALUES = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
preload("fullshard.api.rehearsal.stage", "fullshard.api.accelerator")


def _stage(options: dict[str, Any], script: str, words: list[str]) -> None:
    from fullshard.api.rehearsal import stage

    os.environ["OMP_NUM_THREADS"] = "1"
    with patch.object(sys, "argv", ["stage", json.dumps(options), "script", script, *words]):
        stage.main()


def rehearse_in_a_fork(folder: Path, script: Path, *words: str, **options: Any) -> dict[str, Any]:
    """Return the answer for a script. A fork of a process that has imported torch is quicker than the command."""
    answer = folder / "answer.json"
    given = {"devices": "8xH100", "rank": 0, "steps": None, "links": None, "answer": str(answer), **options}
    process = multiprocessing.get_context("forkserver").Process(target=_stage, args=(given, str(script), [*words]))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return {"as": "8 x H100 in 1 host", "rank": 0, **json.loads(answer.read_text())}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer for a model whose layers the planner knows."""
    return rehearse_in_a_fork(tmp_path_factory.mktemp("known"), SCRIPTS / "rehearsed_llama.py", json.dumps(VALUES))


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answer for a model that the planner does not know, on torch's engine."""
    return rehearse_in_a_fork(tmp_path_factory.mktemp("unknown"), SCRIPTS / "rehearsed.py", "fsdp2")


def test_the_plan_is_beside_each_phase(known: dict[str, Any], unknown: dict[str, Any]) -> None:
    """With what is left between the two; a script without a plan says why."""
    for phase, peak in known["phases"].items():
        assert peak["planned"] > 0
        line = next(line for line in _lines(known) if line.startswith(f"{phase}: "))
        assert ", plan " in line
    assert known["engine"] == "fullshard"
    assert known["planned"] > known["phases"]["backward"]["planned"]
    assert "(plan: " in "\n".join(_lines(known))
    assert {peak["planned"] for peak in unknown["phases"].values()} == {None}
    assert "no plan beside it: the script does not shard its model with fullshard" in _lines(unknown)
    assert unknown["engine"] == "torch"


def test_the_plan_is_that_of_the_command(known: dict[str, Any], tmp_path: Path) -> None:
    """The job is read from the sharded model as a user would describe it."""
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    words = ["--model", str(tmp_path), "--devices", "8xH100", "--precision", "no", "--micro-batch", "4"]
    done = run_here("plan", "--json", *words, "--seq-len", "64", "--attention", "flash")
    planned = json.loads(done.stdout)["memory"]
    assert known["planned"] == planned["needed"]
    device = planned["phases"]["load"]["framework"]
    assert known["phases"]["backward"]["planned"] == sum(planned["phases"]["backward"].values()) - device
