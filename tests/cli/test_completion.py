"""What a shell offers after `fullshard launch` and `fullshard sft`: flags, and the words that a value is one of.

pytest tests/cli/test_completion.py
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from fullshard.cli import launch
from fullshard.config.flags import FLAGS, OPTIONS, flag_choices
from fullshard.recipes.sft_arguments import OwnArguments

COMPLETE = "import sys; from fullshard.cli.main import main; sys.argv[0] = 'fullshard'; main()"


def _offered(line: str) -> list[str]:
    """What bash would be told when the tabulator is pressed at the end of this line."""
    words = line.split(" ")
    asked = {"_FULLSHARD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fullshard launch --num-m", ["--num-machines"]),
        ("fullshard launch --mixed_precision ", ["no", "fp32", "bf16", "fp16"]),
        ("fullshard launch --cpu --print k", ["kubernetes"]),
        ("fullshard launch train.py --num_m", []),
        ("fullshard sft --model_n", ["--model_name_or_path"]),
        ("fullshard sft run.yaml --model_n", []),
    ],
)
def test_a_shell_is_offered(line: str, offered: list[str]) -> None:
    assert _offered(line) == offered


def test_values_are_offered_where_they_are_known() -> None:
    assert flag_choices("--mixed-precision") == ("no", "fp32", "bf16", "fp16")
    assert flag_choices("--print") == ("slurm", "kubernetes", "trainjob")
    assert flag_choices("--log_dir") == flag_choices("--nonsense") == flag_choices("--role") == ()


def test_every_flag_of_launch_is_offered_with_its_help() -> None:
    found = launch.completions([])
    assert {f"--{option.name}" for option in OPTIONS} <= found.keys()
    assert {f"--{key.name}" for key in FLAGS.keys if key.target and key.status.name != "REFUSED"} <= found.keys()
    assert "--megatron_lm_tp_degree" not in found
    assert found["--num_machines"] == "Hosts."


def test_flags_of_sft_are_offered_without_importing_trl() -> None:
    from fullshard.cli import sft

    found = sft.completions([])
    assert {f"--{f.name}" for f in dataclasses.fields(OwnArguments)} <= found.keys()
    assert {"--use_peft", "--max_length", "--num_processes"} <= found.keys()
