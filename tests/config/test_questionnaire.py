"""The questionnaire: its questions as data, and the whole of it in a real terminal.

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

from fullshard.config import hardware as detection
from fullshard.config.hardware import DetectedDevice, Hardware, detect_hardware
from fullshard.config.load import load_file
from fullshard.config.questions import BACK, QUESTIONS, Interview, hardware_words
from fullshard.config.resolve import resolve
from fullshard.config.schema import RunConfig
from fullshard.core.errors import ConfigError
from fullshard.core.sizes import GIB

LAPTOP = Hardware(cpu_count=4, memory_nbytes=16 * GIB)
SERVER = Hardware(64, 512 * GIB, (DetectedDevice("NVIDIA H200", 140 * GIB, 9.0),) * 8)
OLD_SERVER = Hardware(64, 512 * GIB, (DetectedDevice("Tesla V100", 16 * GIB, 7.0),) * 4)


def interview(hardware: Hardware, **answers: Any) -> tuple[Interview, list[str]]:
    """Answer as given, else with the recommendation; returns the names of all that was asked."""
    asking, asked = Interview(hardware), []
    while (question := asking.next()) is not None:
        asked.append(question.name)
        if question.name in answers:
            answer = answers.pop(question.name)
        elif question.choices is not None:
            answer = question.choices(asking.answers)[0].value
        else:
            answer = question.default(asking.answers)
        asking.answer(question, answer)
    assert not answers, f"never asked: {sorted(answers)}"
    return asking, asked


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_recommendations_on_a_laptop() -> None:
    asking, asked = interview(LAPTOP)
    config = asking.config()
    assert (config.launch.device, config.launch.num_processes) == ("cpu", 2)
    assert (config.sharding.strategy, config.precision.mode, config.sharding.wrap) == ("FULL_SHARD", "fp32", "auto")
    assert not {"main_process_ip", "shard_size", "wrap_classes", "max_restarts", "overwrite"} & set(asked)
    assert len(asked) <= 11


def test_recommendations_on_a_server() -> None:
    asking, _ = interview(SERVER)
    config = asking.config()
    assert (config.launch.device, config.launch.num_processes, config.precision.mode) == ("cuda", 8, "bf16")
    assert interview(OLD_SERVER)[0].config().precision.mode == "fp16"


def test_hosts_and_hybrid() -> None:
    asking, asked = interview(SERVER, num_machines="2", main_process_ip=" 10.0.0.1 ", strategy="HYBRID_SHARD")
    config = asking.config()
    assert config.launch.num_processes == 16
    assert (config.launch.main_process_ip, config.launch.main_process_port) == ("10.0.0.1", 29500)
    assert config.sharding.shard_size == 8  # one host
    assert asked.index("shard_size") == asked.index("strategy") + 1


def test_one_process_is_not_asked_how_to_divide() -> None:
    _, asked = interview(LAPTOP, num_processes="1")
    assert not {"strategy", "shard_size", "state_dict_type"} & set(asked)


def test_the_number_may_be_left_to_the_launcher() -> None:
    assert interview(SERVER, num_processes="auto")[0].config().launch.num_processes is None


@pytest.mark.parametrize(
    ("given", "name", "answer", "words"),
    [
        ({}, "num_machines", "none", "expected a whole number, got 'none'"),
        ({}, "num_machines", "0", "expected 1 or more, got 0"),
        ({"num_machines": "2"}, "num_processes", "15", "15 is not a multiple of that"),
        ({"num_machines": "2"}, "main_process_ip", "http://a b", "expected one host name or IP address"),
        ({"num_machines": "2"}, "main_process_port", "99999", "expected a port from 1 to 65535"),
        ({"strategy": "HYBRID_SHARD"}, "shard_size", "3", "3 does not divide the 8 processes; use one of 1, 2, 4, 8"),
        ({"strategy": "HYBRID_SHARD"}, "shard_size", "four", "expected a whole number"),
        ({"wrap": "class"}, "wrap_classes", "", "expected class names such as LlamaDecoderLayer"),
        ({"wrap": "class"}, "wrap_classes", "A, b.c!", "expected class names"),
        ({"wrap": "size"}, "wrap_min_numel", "many", "expected a whole number, got 'many'"),
        ({}, "path", "nowhere/fullshard.yaml", "there is no folder nowhere"),
        ({}, "path", "fullshard", "expected a name that ends in .yaml"),
    ],
)
def test_a_wrong_answer_is_explained_and_not_kept(given: dict[str, Any], name: str, answer: str, words: str) -> None:
    asking = Interview(SERVER)
    while (question := asking.next()) is not None and question.name != name:
        default = question.default(asking.answers) if question.choices is None else None
        choice = question.choices(asking.answers)[0].value if question.choices is not None else default
        asking.answer(question, given.get(question.name, choice))
    assert question is not None
    assert words in (asking.fault(question, answer) or "")
    with pytest.raises((ConfigError, ValueError)):
        asking.answer(question, answer)
    assert asking.next() is question


def test_offered_texts_are_answers_and_1e8_is_a_number() -> None:
    config = interview(SERVER, wrap="size")[0].config()
    assert config.sharding.wrap_min_numel == 10**8
    assert interview(SERVER, wrap="class", wrap_classes="A, B")[0].config().sharding.wrap_classes == ("A", "B")


def test_no_wrap_is_not_offered_with_checkpointing() -> None:
    asking, _ = interview(SERVER, activation_checkpointing=True)
    wrap = next(question for question in QUESTIONS if question.name == "wrap")
    assert wrap.choices is not None
    assert "none" not in [choice.value for choice in wrap.choices(asking.answers)]


def test_back_takes_answers_back_one_by_one() -> None:
    asking, asked = interview(SERVER, advanced=True)
    assert set(asked) > {"compile", "debug", "form"}
    for name in reversed(asked):
        assert asking.back()
        question = asking.next()
        assert question is not None
        assert question.name == name
    assert not asking.back()
    assert asking.config() == RunConfig()


def test_an_existing_file_is_asked_about() -> None:
    Path("fullshard.yaml").write_text("mine")
    asking, asked = interview(SERVER, overwrite=True)
    assert asked[-1] == "overwrite"
    choices = QUESTIONS[-1].choices
    assert choices is not None
    assert choices(asking.answers)[0].value is BACK


def test_every_choice_leads_to_a_valid_configuration() -> None:
    for hardware in (LAPTOP, SERVER):
        for question in QUESTIONS:
            if question.choices is None or question.name == "overwrite":
                continue
            asking, asked = interview(hardware, advanced=True)
            if question.name in asked:
                for choice in question.choices(asking.answers):
                    given = {"advanced": True, question.name: choice.value}
                    if choice.value == "class":
                        given["wrap_classes"] = "Block"
                    assert interview(hardware, **given)[0].config() is not None


def test_hardware_is_described_and_detected() -> None:
    assert hardware_words(SERVER) == "8 x NVIDIA H200 (140 GiB); 64 processors, 512 GiB of memory"
    assert hardware_words(Hardware(1, None)) == "no accelerator of NVIDIA or AMD; 1 processor"
    found = detect_hardware()
    assert found.cpu_count == len(os.sched_getaffinity(0))
    assert found.memory_nbytes
    assert found.memory_nbytes > 2**28


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
    found = detect_hardware().accelerators
    assert [device.name for device in found] == names
    if names == ["A", "B"]:
        assert found == (DetectedDevice("A", 81559 * 2**20, 9.0), DetectedDevice("B", None, 7.0))
    program.write_text("#!/bin/sh\necho 'driver mismatch'; exit 9\n")
    assert "driver mismatch" in (detect_hardware().failure or "")


def test_accelerators_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the drivers list them, in files of their form."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    files = {
        "nvidia/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-aa11\nDevice Minor: \t 1\n",
        "nvidia/0000:02:00.0/information": "Model: \t\t NVIDIA H100 NVL\nGPU UUID: \t GPU-bb22\nDevice Minor: \t 0\n",
        "nvidia/0000:03:00.0/information": "Model: \t\t of another\nGPU UUID: \t GPU-cc33\nDevice Minor: \t 2\n",
        **dict.fromkeys(("dev/nvidia0", "dev/nvidia1", "dev/kfd"), ""),
        "amd/0/properties": "cpu_cores_count 64\nsimd_count 0\n",
        "amd/1/properties": "cpu_cores_count 0\nsimd_count 304\n",
        "amd/2/properties": "cpu_cores_count 16\nsimd_count 8\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(detection, "_NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(detection, "_AMD", tmp_path / "amd")
    monkeypatch.setattr(detection, "_DEVICES", tmp_path / "dev")
    names = ["NVIDIA H200", "NVIDIA H100 NVL", "AMD GPU"]
    assert [device.name for device in detect_hardware().accelerators] == names
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert [device.name for device in detect_hardware().accelerators] == names[1:2]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(detection, "_DEVICES", tmp_path / "none")
    assert not detect_hardware().accelerators, "a container was given none"


# -- in a terminal ------------------------------------------------------------------------------------------------

ENTER, DOWN, UP, CTRL_C = "\r", "\x1b[B", "\x1b[A", "\x03"
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


def test_in_a_terminal_to_the_end_and_back_once(tmp_path: Path) -> None:
    with terminal(tmp_path) as child:
        child.expect("This host has no accelerator of NVIDIA or AMD; ")
        reply(child, "What will the job run on?", ENTER)
        reply(child, "How many hosts?", ENTER)
        reply(child, "How many processes over all hosts?", CTRL_U, "eight", ENTER)
        child.expect("expected a whole number, got 'eight'")
        child.send(CTRL_U + "8" + ENTER)
        reply(child, "Which precision?", DOWN, ENTER)  # bf16
        reply(child, "How shall the model be divided?", DOWN, ENTER)  # SHARD_GRAD_OP
        reply(child, "Recompute activations in backward?", UP, ENTER)  # the last choice: back
        reply(child, "How shall the model be divided?", DOWN, DOWN, ENTER)  # HYBRID_SHARD
        reply(child, "Ranks per shard group?", CTRL_U, "3", ENTER)
        child.expect("use one of 1, 2, 4, 8")  # the terminal redraws only what differs from the last message
        child.send(CTRL_U + "4" + ENTER)
        reply(child, "Recompute activations in backward?", DOWN, ENTER)  # yes
        reply(child, "Which modules are the units", DOWN, DOWN, ENTER)  # by size
        reply(child, "Parameters a unit has at least? (for example 1e8)", CTRL_U, "back", ENTER)
        reply(child, "Which modules are the units", DOWN, DOWN, ENTER)
        reply(child, "Parameters a unit has at least? (for example 1e8)", CTRL_U, "1e8", ENTER)
        reply(child, "What shall a saved model be?", ENTER)
        reply(child, "Micro-batches per optimizer step?", CTRL_U, "4", ENTER)
        reply(child, "See the advanced questions?", ENTER)
        reply(child, "Which file shall be written?", CTRL_U, "mine.yaml", ENTER)
        child.expect("strategy: HYBRID_SHARD")
        assert not (tmp_path / "mine.yaml").exists()
        reply(child, "Is it right?", ENTER)
        child.expect("wrote mine.yaml")
        child.expect_exact("start: fullshard launch --config_file mine.yaml script.py")
        finish(child)
        assert child.exitstatus == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]
    text = (tmp_path / "mine.yaml").read_text()
    assert "## Parameters a unit has at least." in text
    config = resolve([load_file(tmp_path / "mine.yaml")]).config
    assert (config.launch.device, config.launch.num_processes) == ("cpu", 8)
    assert config.precision.mode == "bf16"
    assert (config.sharding.strategy, config.sharding.shard_size) == ("HYBRID_SHARD", 4)
    assert (config.sharding.wrap, config.sharding.wrap_min_numel) == ("size", 10**8)
    assert config.sharding.activation_checkpointing
    assert config.training.gradient_accumulation_steps == 4


def test_in_a_terminal_ctrl_c_writes_nothing(tmp_path: Path) -> None:
    with terminal(tmp_path) as child:
        reply(child, "What will the job run on?", ENTER)
        reply(child, "How many hosts?", CTRL_C)
        child.expect("nothing was written")
        finish(child)
        assert child.exitstatus == 130
    assert list(tmp_path.iterdir()) == []
