"""The questionnaire: what it asks and offers, and the whole of it in a real terminal.

Run: pytest tests/config/test_questionnaire.py
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest

from fullshard.cli.config_questions import Question, _path_fault, interview
from fullshard.config.hardware import DetectedDevice, Hardware, detect_hardware
from fullshard.config.load import load_file
from fullshard.config.resolve import resolve
from fullshard.config.schema import SETTINGS, RunConfig
from fullshard.config.settings import About
from fullshard.core.sizes import GIB

LAPTOP = Hardware(cpu_count=4, memory_nbytes=16 * GIB)
SERVER = Hardware(64, 512 * GIB, (DetectedDevice("NVIDIA H200", 140 * GIB, 9.0),) * 8)


def answered(hardware: Hardware, **answers: Any) -> tuple[RunConfig, dict[str, Question]]:
    """Answer as given, else with what is offered; returns the questions that were asked too."""
    asked: dict[str, Question] = {}

    def reply(question: Question) -> Any:
        name = question.path.partition(".")[2]
        asked[name] = question
        answer = answers.pop(name, question.default)
        answer = answer if question.choices or answer is None else str(answer)
        assert question.fault(answer) is None, question
        return answer

    config = interview(hardware, reply)
    assert not answers, f"never asked: {sorted(answers)}"
    return config, asked


def test_what_is_offered_is_the_default_but_for_the_accelerators_there_are() -> None:
    config, asked = answered(LAPTOP)
    assert config == RunConfig()
    assert not {"main_process_ip", "shard_size", "wrap_classes", "wrap_min_numel"} & set(asked)
    config, _ = answered(SERVER, num_machines="2", main_process_ip="10.0.0.1", main_process_port="29500")
    assert (config.launch.num_processes, config.precision.mode) == (16, "bf16")
    assert (config.launch.main_process_ip, config.launch.main_process_port) == ("10.0.0.1", 29500)


def test_every_question_of_the_schema_is_asked_where_it_matters() -> None:
    given: list[dict[str, Any]] = [
        {"num_machines": "2", "strategy": "HYBRID_SHARD", "shard_size": "4"},
        {"wrap": "size", "wrap_min_numel": "1e8"},
        {"wrap": "class", "wrap_classes": "A, B"},
    ]
    runs = [answered(SERVER, **answers) for answers in given]
    asked = {question.path for _, questions in runs for question in questions.values()}
    assert asked == {path for path, setting in SETTINGS.items() if About.of(setting).ask}
    assert (runs[0][0].sharding.shard_size, runs[1][0].sharding.wrap_min_numel) == (4, 10**8)
    assert runs[2][0].sharding.wrap_classes == ("A", "B")
    assert not {"strategy", "shard_size", "state_dict_type"} & set(answered(LAPTOP, num_processes="1")[1])


@pytest.mark.parametrize(
    ("given", "name", "answer", "words"),
    [
        ({}, "num_machines", "none", "expected a whole number, got 'none'"),
        ({}, "num_machines", "0", "greater than or equal to 1, got 0"),
        ({"num_machines": "2"}, "num_processes", "15", "num_processes = 15 is not a multiple"),
        ({"num_machines": "2"}, "main_process_port", "99999", "less than or equal to 65535"),
        ({"strategy": "HYBRID_SHARD", "shard_size": "4"}, "shard_size", "3", "3"),
        ({"strategy": "HYBRID_SHARD", "shard_size": "4"}, "shard_size", "", "without shard_size"),
        ({"wrap": "class", "wrap_classes": "A"}, "wrap_classes", "", "use wrap_classes together with wrap: class"),
        ({"wrap": "size", "wrap_min_numel": "1"}, "wrap_min_numel", "many", "expected a whole number, got 'many'"),
    ],
)
def test_a_wrong_answer_is_explained(given: dict[str, Any], name: str, answer: str, words: str) -> None:
    question = answered(SERVER, **given)[1][name]
    assert words in (question.fault(answer) or "")


def test_a_choice_that_does_not_go_with_the_others_is_not_offered() -> None:
    assert "none" in answered(SERVER)[1]["wrap"].choices
    assert "none" not in answered(SERVER, activation_checkpointing=True)[1]["wrap"].choices


def test_a_file_must_be_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _path_fault("fullshard.yaml") is True
    (tmp_path / "fullshard.yaml").write_text("mine")
    for name, words in (
        ("fullshard.yaml", "already exists"),
        ("no/such.yaml", "the folder no does not exist"),
        ("fullshard", "ends in .yaml"),
    ):
        assert words in str(_path_fault(name))


@pytest.mark.parametrize(("visible", "names"), [(None, ["A", "B"]), ("1", ["B"]), ("GPU-aa", ["A"]), ("", [])])
def test_accelerators_are_those_that_are_visible(
    visible: str | None, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in the place of nvidia-smi answers in its format."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aa11, A, 81559, 9.0'\necho '1, GPU-bb22, B, [N/A], 7.0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    hardware = detect_hardware()
    assert hardware.cpu_count == len(os.sched_getaffinity(0)) and (hardware.memory_nbytes or 0) > 2**28
    found = hardware.accelerators
    assert [device.name for device in found] == names
    if names == ["A", "B"]:
        assert found == (DetectedDevice("A", 81559 * 2**20, 9.0), DetectedDevice("B", None, 7.0))
    program.write_text("#!/bin/sh\necho 'driver mismatch'; exit 9\n")
    assert "driver mismatch" in (detect_hardware().failure or "")
    monkeypatch.setenv("PATH", "")
    assert detect_hardware().accelerators == ()


# -- in a terminal ------------------------------------------------------------------------------------------------

ENTER, DOWN, CTRL_C = "\r", "\x1b[B", "\x03"
CTRL_U = "\x15"  # empties the line


@contextmanager
def terminal(directory: Path) -> Iterator[Any]:
    """`fullshard config` in a pseudo-terminal of its own."""
    environment = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "PATH": "/usr/bin:/bin"}
    child = pexpect.spawn(
        sys.executable,
        ["-c", "from fullshard.cli.main import main; main()", "config"],
        cwd=str(directory),
        env=environment,
        encoding="utf-8",
        timeout=30,
        dimensions=(40, 160),
    )
    try:
        yield child
    finally:
        child.close(force=True)


def reply(child: Any, question: str, *keys: str) -> None:
    child.expect(re.escape(question))
    for key in keys:
        child.send(key)


def finish(child: Any) -> str:
    child.expect(pexpect.EOF)
    child.close()
    return str(child.before)


def test_in_a_terminal_to_the_end(tmp_path: Path) -> None:
    with terminal(tmp_path) as child:
        child.expect("This host has .* GPUs")
        reply(child, "How many hosts?", ENTER)
        reply(child, "How many processes over all hosts?", CTRL_U, "eight", ENTER)
        child.expect("expected a whole number, got 'eight'")
        child.send(CTRL_U + "8" + ENTER)
        reply(child, "What will the job run on?", ENTER)
        reply(child, "Which precision?", ENTER)
        reply(child, "How should the model be divided?", DOWN, DOWN, ENTER)  # HYBRID_SHARD
        reply(child, "Ranks per shard group?", CTRL_U, "3", ENTER)
        child.expect("8")  # the terminal redraws only what differs from the last message
        child.send(CTRL_U + "4" + ENTER)
        reply(child, "Recompute activations in backward?", DOWN, ENTER)  # yes
        reply(child, "Which modules are the units", DOWN, DOWN, ENTER)  # by size
        reply(child, "How many parameters must a unit have at least? (for example 1e8)", CTRL_U, "1e8", ENTER)
        reply(child, "How should a model be saved?", ENTER)
        reply(child, "Micro-batches per optimizer step?", CTRL_U, "4", ENTER)
        reply(child, "Which file should be written?", CTRL_U, "mine.yaml", ENTER)
        child.expect("strategy: HYBRID_SHARD")
        assert not (tmp_path / "mine.yaml").exists()
        reply(child, "Write mine.yaml?", ENTER)
        child.expect("wrote mine.yaml")
        child.expect_exact("start: fullshard launch --config_file mine.yaml script.py")
        finish(child)
        assert child.exitstatus == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]
    text = (tmp_path / "mine.yaml").read_text()
    assert "## Minimum number of parameters of a unit." in text
    config = resolve([load_file(tmp_path / "mine.yaml")]).config
    assert (config.launch.device, config.launch.num_processes) == ("auto", 8)
    assert config.precision.mode == "no"
    assert (config.sharding.strategy, config.sharding.shard_size) == ("HYBRID_SHARD", 4)
    assert (config.sharding.wrap, config.sharding.wrap_min_numel) == ("size", 10**8)
    assert config.sharding.activation_checkpointing
    assert config.training.gradient_accumulation_steps == 4


def test_in_a_terminal_ctrl_c_writes_nothing(tmp_path: Path) -> None:
    with terminal(tmp_path) as child:
        reply(child, "How many hosts?", ENTER)
        reply(child, "How many processes", CTRL_C)
        child.expect("nothing was written")
        finish(child)
        assert child.exitstatus == 130
    assert list(tmp_path.iterdir()) == []
