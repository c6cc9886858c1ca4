"""Ctrl-C ends every command at once, with one line and exit code 130."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fullshard.core.sizes import GIB
from tests.cli.test_chat import model as model

COMMAND = """from fullshard.cli import main as cli
run = cli.app
cli.app = lambda *words: (print("up", flush=True), run(*words))
cli.main()"""
SLEEPS = "import time\nprint('sleeping', flush=True)\ntime.sleep(100)\n"


def _interrupted(code: str, *words: str, cwd: Path, after: str = "up", seconds: float = 0.0) -> tuple[float, str]:
    """Send Ctrl-C to a command and its processes, as a terminal does. Return how long it takes to end, and its output.

    The signal comes `seconds` after the line `after`.
    """
    command = [sys.executable, "-c", code, *words]
    environ = {**os.environ, "PYTHONPATH": str(cwd), "HF_HUB_OFFLINE": "1"}
    piped: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process: Any
    with subprocess.Popen(command, cwd=cwd, env=environ, text=True, start_new_session=True, **piped) as process:
        try:
            for line in process.stdout:
                if line.strip() == after:
                    break
            time.sleep(seconds)
            os.killpg(process.pid, signal.SIGINT)
            begin = time.monotonic()
            output, _ = process.communicate(timeout=60)
            took = time.monotonic() - begin
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    return took, output


def test_an_import_does_not_swallow_ctrl_c(tmp_path: Path) -> None:
    """As torch's does, which imports NumPy and continues without it if that raises an exception."""
    swallows = (
        "import time\nprint('importing', flush=True)\ntry: time.sleep(50)\nexcept KeyboardInterrupt: time.sleep(50)"
    )
    (tmp_path / "swallows.py").write_text(swallows)
    code = "from fullshard.cli import main as cli\ncli.app = lambda: __import__('swallows')\ncli.main()"
    _, output = _interrupted(code, cwd=tmp_path, after="importing", seconds=0.2)  # when it sleeps
    assert output == "fullshard: interrupted\n"


def test_ctrl_c_while_the_command_line_is_imported(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(50)")
    entry = tomllib.loads(Path("pyproject.toml").read_text())["project"]["scripts"]["fullshard"]
    module, name = entry.split(":")  # as pip's script does it
    _, output = _interrupted(f"from {module} import {name}; {name}()", cwd=tmp_path, after="importing", seconds=0.2)
    assert output == "fullshard: interrupted\n"


@pytest.mark.full
def test_the_rehearsed_script_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    _, output = _interrupted(COMMAND, "rehearse", "--as", "8xH100", "sleeps.py", cwd=tmp_path, after="sleeping")
    assert output == "fullshard: interrupted\n"


OPENED = "weights: Hugging Face directory"


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seconds", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(
    ("words", "after"),
    [
        ("ckpt diff weights again", OPENED),
        ("ckpt import weights out", OPENED),
        ("ckpt export weights out --to safetensors", "up"),
        ("ckpt export weights out --to safetensors", OPENED),
        ("launch -n 2 -q sleeps.py", "up"),
        ("launch -n 2 -q sleeps.py", "sleeping"),
        ("sft --model_name_or_path weights --dataset_name d", "up"),
        ("train --device cpu", "up"),
        ("watch run", "up"),
        ("rehearse --as 8xH100 sleeps.py", "up"),
        ("doctor --run -n 2", "up"),
        ("simulate -m Llama-3-8B --world-size 64", "up"),
    ],
)
def test_ctrl_c_ends_each_command(tmp_path: Path, words: str, after: str, seconds: float) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    (tmp_path / "run").mkdir()
    sizes = dict.fromkeys(("learning_rate", "grad_norm", "step_seconds", "tokens_per_second"), 1.0)
    sizes |= dict.fromkeys(("data_wait_seconds", "checkpoint_seconds"), 0.0)
    step = {"step": 1, "loss": 2.0, **sizes, "memory_nbytes": [1], "skipped_steps": 0, "held_out_loss": None}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    for name in ("weights", "again"):
        _write_weights(tmp_path / name, nbytes=8 * GIB)
    took, output = _interrupted(COMMAND, *words.split(), cwd=tmp_path, after=after, seconds=seconds)
    said = [line for line in output.splitlines() if line.startswith("fullshard: ")]
    assert said[:-1] == [line for line in said if "starting 2 processes" in line]
    assert said[-1] in ("fullshard: interrupted", "fullshard: SIGINT: 2 processes on this host ended")
    assert took < 5  # on an idle machine, less than one
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.parametrize("seconds", [0.0, 0.2])  # it ends within two
def test_ctrl_c_ends_a_plan(tmp_path: Path, seconds: float) -> None:
    words = ["plan", "-m", "Llama-3.1-405B", "-d", "1024xH100", "--auto"]
    _, output = _interrupted(COMMAND, *words, cwd=tmp_path, seconds=seconds)
    assert output.endswith("fullshard: interrupted\n")


def _write_weights(directory: Path, *, nbytes: int) -> None:
    """Write a tensor of zeros that takes no space on the disk and seconds to read."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}).encode()
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)


@pytest.mark.full
def test_ctrl_c_ends_a_chat(model: Path, tmp_path: Path) -> None:
    waits = f"{model} has no chat template and continues the text that you enter; an empty line ends the chat"
    _, output = _interrupted(COMMAND, "chat", str(model), cwd=tmp_path, after=waits)
    assert output == "fullshard: interrupted\n"
