"""Shells complete commands, options and names, through the protocol of each shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullshard.cli.main import app


def completed(line: str) -> list[str]:
    """What bash is told for a line whose last word, perhaps empty, is completed."""
    variables = {"_FULLSHARD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    return told(variables).split()


def told(variables: dict[str, str]) -> str:
    return CliRunner().invoke(app, prog_name="fullshard", env=variables).output


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fullshard l", ["launch"]),
        ("fullshard ckpt ex", ["export"]),
        ("fullshard ckpt export --con", ["--config-from"]),
        ("fullshard train --micro", ["--micro-batch-size"]),
        ("fullshard launch --num_p", ["--num_processes"]),
        ("fullshard launch --num-p", ["--num_processes"]),
        ("fullshard launch -n 2 --cpu_off", ["--cpu_offload"]),
        ("fullshard launch --help", ["--help", "--help_all"]),
        ("fullshard launch --print s", ["slurm"]),
        ("fullshard launch --quantize nf", ["nf4", "nf4-double"]),
        ("fullshard launch -n 2 ", []),  # files, which bash completes itself
        ("fullshard launch train.py --num", []),  # the script's own
        ("fullshard plan --model Llama-3.1-4", ["Llama-3.1-405B"]),
        ("fullshard simulate -m Llama-3.1-4", ["Llama-3.1-405B"]),
        ("fullshard plan --devices 8xB3", ["8xB300"]),
        ("fullshard simulate -d B3", ["B300"]),
        ("fullshard rehearse --as 64xL40", ["64xL40S", "64xL40"]),
        ("fullshard rehearse --links fr", ["free"]),
        ("fullshard recipe show qwen3-14b", ["qwen3-14b-qlora-2x24gb"]),
    ],
)
def test_bash(line: str, expected: list[str]) -> None:
    assert completed(line) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str) -> None:
    variables = {"_FULLSHARD_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "fullshard launch --num_p"}
    assert "--num_processes" in told({**variables, "_TYPER_COMPLETE_FISH_ACTION": "get-args"})


@pytest.mark.full
def test_bash_runs_the_script_that_is_installed(tmp_path: Path) -> None:
    command = tmp_path / "fullshard"
    command.write_text(f"#!{sys.executable}\nfrom fullshard.cli.main import main\nmain()\n")
    command.chmod(0o700)
    script = """eval "$(_FULLSHARD_COMPLETE=source_bash fullshard)"
COMP_WORDS=(fullshard launch --num_) COMP_CWORD=2
_fullshard_completion fullshard
echo "${COMPREPLY[@]}"
"""
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["--num_processes", "--num_machines", "--num_cpu_threads_per_process"]
