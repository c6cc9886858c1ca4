"""What strict mypy says of a user's script: misspelled names and arguments are found, and what is right is let through.

pytest tests/project/test_types.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fullshard

SOURCES = Path(fullshard.__file__).parents[1]
CONFIG = """[mypy]
strict = true
plugins =
# As where fullshard is installed: what is wrong inside is not reported.
[mypy-fullshard.*]
follow_imports = silent
# They are right or wrong without us, and take a minute.
[mypy-torch.*,transformers.*,accelerate.*]
follow_imports = skip
"""
RIGHT = """
import fullshard
from fullshard import Accelerator, notebook_launcher
from fullshard.integrations.transformers import SFTTrainer

def train(model: object) -> object:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    accelerator.wait_for_everyone()
    accelerator.log({"loss": accelerator.device.index})
    notebook_launcher(train, num_processes=2)
    return SFTTrainer, accelerator.state.num_processes
"""
WRONG = """
import fullshard
from fullshard import Acelerator
from fullshard.integrations.transformers import SFTTrainr

fullshard.fully_shardd(None)
accelerator = fullshard.Accelerator(mixed_precison="bf16")
fullshard.Accelerator(deepspeed_plugin=object())
accelerator.wait_for_everybody()
accelerator.state.num_procesess
"""


@pytest.mark.full
def test_misspelled_names_and_arguments_are_found(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "right.py", "wrong.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.split(": error: ") for line in done.stdout.splitlines() if ": error: " in line]
    assert [place for place, _ in found] == [f"wrong.py:{line}" for line in (3, 4, 6, 7, 8, 9, 10)], done.stdout
    for word, (_, text) in zip(
        ("Acelerator", "SFTTrainr", "fully_shardd", "mixed_precison", "deepspeed_plugin", "everybody", "procesess"),
        found,
        strict=True,
    ):
        assert word in text
