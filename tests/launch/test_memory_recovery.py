"""`fullshard train` goes on when a rank or a whole host is killed: from what it has saved, or from copies in memory.

pytest tests/launch/test_memory_recovery.py
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from fullshard.core.journal import read_journal
from fullshard.observe import read_metrics
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.train import train
from tests.differential import TOLERANCE
from tests.launching import LAUNCH, read, started, wait_until
from tests.namespaces import can_have_namespaces, namespaces


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Data and a tiny Llama without dropout, whose steps leave time for something to happen."""
    (tmp_path / "data.txt").write_text("".join(f"line {i} is {i * i % 17} long\n" for i in range(1500)))
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, vocab_size=320, max_position_embeddings=64, **sizes)
    (tmp_path / "config.json").write_text(config.to_json_string())
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


SLOW = """
import time
from fullshard.cli.main import main
from fullshard.recipes.train import Run

step = Run.step
Run.step = lambda *arguments: time.sleep(0.3) or step(*arguments)
main()
"""


def _settings(run: Path, output: Path) -> dict[str, Any]:
    """Of a run that writes no checkpoint before its end."""
    return {
        "model": str(run / "config.json"),
        "data": str(run / "data.txt"),
        "output_dir": str(output),
        "steps": 40,
        "batch_size": 8,
        "seq_len": 16,
        "lr": 3e-3,
        "save_every": 0,
        "log_every": 1,
        "vocab_size": 320,
        "export": False,
        "plot": False,
        "device": "cpu",
    }


def _train_words(values: dict[str, Any]) -> list[str]:
    words = ["slow.py", "train"]
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        words += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    return words


def _check_run(output: Path, reference: Path) -> list[dict[str, Any]]:
    """Losses are those of a run in which nothing happened; the events."""
    found, right = (list(read_metrics(path / "metrics.jsonl")) for path in (output, reference))
    assert [record.step for record in found] == list(range(1, 41))
    assert [record.loss for record in found] == pytest.approx([record.loss for record in right], rel=TOLERANCE, abs=0)
    events = list(read_journal(output))
    saved = [event["step"] for event in events if event["kind"] == "save"]
    assert saved == [40], "no checkpoint was written that could have been read"
    assert not (output / "checkpoints").exists() or [p.name for p in (output / "checkpoints").glob("step-*")] == [
        "step-000040"
    ]
    return events


def test_a_run_that_is_started_again_before_its_first_copy_begins_anew(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights of its seed: where a copy was expected, none were made at first."""
    train(TrainArguments.of(_settings(run, run / "alone") | {"steps": 3}))
    for name, value in (("TORCHELASTIC_MAX_RESTARTS", "1"), ("TORCHELASTIC_RESTART_COUNT", "1")):
        monkeypatch.setenv(name, value)
    (run / "copies").mkdir()
    monkeypatch.setenv("FULLSHARD_COPIES_DIR", str(run / "copies"))
    train(TrainArguments.of(_settings(run, run / "out") | {"steps": 3, "max_lost_steps": 2}))
    found, right = (list(read_metrics(run / name / "metrics.jsonl")) for name in ("out", "alone"))
    assert [record.loss for record in found] == [record.loss for record in right]


@pytest.mark.full
def test_fullshard_train_goes_on_from_memory(run: Path) -> None:
    """A rank of `fullshard train` is killed."""
    train(TrainArguments.of(_settings(run, run / "alone")))
    output = run / "out"
    words = _train_words(_settings(run, output) | {"max_restarts": 1, "max_lost_steps": 6, "nproc": 2})
    with started(sys.executable, *words, cwd=run) as process:
        wait_until(lambda: _steps_done(output) > 10, 200, "the first steps")
        pid = next(event["pid"] for event in read_journal(output) if event["kind"] == "start")
        before = _steps_done(output)
        os.kill(pid, signal.SIGKILL)
        said = process.communicate(timeout=280)[0]
        assert process.returncode == 0, said
    events = _check_run(output, run / "alone")
    assert [event["kind"] for event in events if event["kind"] in ("failure", "restart", "load")] == [
        "failure",
        "restart",
        "load",
    ]
    (step,) = map(int, re.findall(r"resume: from copies in host memory, after step (\d+)", said))
    assert before - 6 <= step <= before + 1


needs_namespaces = pytest.mark.skipif(
    not can_have_namespaces(), reason="network namespaces need root and the program `ip`"
)


@needs_namespaces
@pytest.mark.full
@pytest.mark.parametrize("comes_back", [False, True])
def test_a_host_is_killed(run: Path, comes_back: bool) -> None:
    """Two hosts of two ranks each: one is killed, and the other goes on alone; or with another in its place."""
    train(TrainArguments.of(_settings(run, run / "alone")))
    output = run / "out"
    hosts = ["--num_machines", "2", "--max_restarts", "1"] if comes_back else ["--nnodes", "1:2"]
    count = ["--num_processes", "4"] if comes_back else ["--nproc_per_node", "2"]
    flags = [*LAUNCH, *hosts, *count, "--main_process_ip", "10.77.0.1", "--cpu"]
    words = [*flags, *_train_words(_settings(run, output) | {"max_lost_steps": 6})]
    with namespaces(2) as names, contextlib.ExitStack() as processes:
        first, second = (
            processes.enter_context(started("ip", "netns", "exec", name, *words, cwd=run)) for name in names
        )
        try:
            wait_until(lambda: _steps_done(output) > 10, 250, "the first steps")
        except AssertionError as error:
            os.killpg(first.pid, signal.SIGKILL)
            error.add_note(first.communicate()[0])
            raise
        before = _steps_done(output)
        os.killpg(second.pid, signal.SIGKILL)
        if comes_back:
            processes.enter_context(started("ip", "netns", "exec", names[1], *words, cwd=run))
        said = first.communicate(timeout=280)[0]
        assert first.returncode == 0, said
    events = _check_run(output, run / "alone")
    (step,) = map(int, re.findall(r"resume: from copies in host memory, after step (\d+)", said))
    assert before - 6 <= step <= before + 1
    ranks = [event["world_size"] for event in events if event["kind"] == "start"]
    assert ranks == ([4, 4] if comes_back else [4, 2])


def _steps_done(output: Path) -> int:
    return read(output / "metrics.jsonl").count("\n")


@pytest.mark.full
def test_one_process_is_started_again_too(run: Path) -> None:
    settings = _settings(run, run / "out") | {"steps": 6, "save_every": 1, "max_restarts": 1, "nproc": 1}
    with started(sys.executable, *_train_words(settings), cwd=run) as process:
        wait_until(lambda: _steps_done(run / "out") > 2, 100, "the first steps")
        os.kill(next(event["pid"] for event in read_journal(run / "out") if event["kind"] == "start"), signal.SIGKILL)
        said = process.communicate(timeout=100)[0]
    assert process.returncode == 0, said
    assert [event["kind"] for event in read_journal(run / "out")].count("restart") == 1
    assert _steps_done(run / "out") == 6
