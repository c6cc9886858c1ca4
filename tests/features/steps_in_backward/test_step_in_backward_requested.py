"""The optimizer's step in backward where others make the optimizer: Trainer, launcher, recipe.

pytest tests/features/steps_in_backward/test_step_in_backward_requested.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.config.handover import hand_over
from fullshard.config.schema import RunConfig
from fullshard.core.errors import ConfigError
from fullshard.observe import read_metrics
from tests.distributed import run_ranks
from tests.trainers import run as run_trainer


def check_trainer(directory: str) -> tuple[Any, Any]:
    found = []
    for wanted in (False, True):
        config = RunConfig.model_validate({"training": {"step_in_backward": wanted}, "launch": {"device": "cpu"}})
        os.environ.update(hand_over(config, Path(directory) / f"{dist.get_rank()}.json"))
        if wanted:
            with pytest.raises(ConfigError, match=r"max_grad_norm = 1\.0 clips \(1\.0 is its default\)"):
                run_trainer(directory)
        found.append(run_trainer(directory, options={"max_grad_norm": 0, "gradient_accumulation_steps": 2}))
    return found[0], found[1]


@pytest.mark.full
def test_trainer(tmp_path: Path) -> None:
    for ordinary, early in run_ranks(check_trainer, 2, str(tmp_path)):
        assert ordinary["losses"] == early["losses"] and len(early["losses"]) == 4
        assert len(ordinary["norms"]) == 4 and early["norms"] == []
        assert all(torch.equal(early["weights"][name], value) for name, value in ordinary["weights"].items())


CLI = "from fullshard.cli.main import main; main()"
SCRIPT = """
import torch, fullshard
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
fullshard.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
"""


@pytest.mark.full
def test_a_script_that_takes_no_notice(tmp_path: Path) -> None:
    for line, said in (("", True), ("fullshard.step_in_backward(optimizer)", False)):
        (tmp_path / "script.py").write_text(SCRIPT.replace("model(torch", f"{line}\nmodel(torch"))
        flags = ["--config_file", "none", "--cpu", "--num_processes", "1", "--step_in_backward"]
        command = [sys.executable, "-c", CLI, "launch", *flags, str(tmp_path / "script.py")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert (
            "step_in_backward had no effect: no optimizer was prepared to step in backward" in done.stderr
        ) == said, done.stderr


@pytest.mark.full
def test_recipe(tmp_path: Path) -> None:
    """The same losses with and without, and clipping refused."""
    common = ["--steps", "4", "--batch-size", "4", "--micro-batch-size", "1", "--seq-len", "32", "--max-data-mb", "0.2"]
    common += ["--vocab-size", "400", "--no-plot", "--no-export", "--nproc", "2"]
    command = [sys.executable, "-c", CLI, "train", *common, "--device", "cpu"]

    def run(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
        whole = [*command, "--output-dir", str(tmp_path / name), *flags]
        return subprocess.run(whole, capture_output=True, text=True, timeout=300, check=False)

    refused = run("refused", "--step-in-backward")
    assert refused.returncode != 0 and "add --max-grad-norm 0" in refused.stderr
    refused = run("refused", "--step-in-backward", "--max-grad-norm", "0")
    assert refused.returncode != 0 and "add --optimizer adamw" in refused.stderr
    records = []
    for name, flags in (("ordinary", []), ("early", ["--step-in-backward"])):
        done = run(name, "--max-grad-norm", "0", "--optimizer", "adamw", *flags)
        assert done.returncode == 0, done.stderr
        assert ("grad norm" in done.stdout) == (name == "ordinary")
        records.append(list(read_metrics(tmp_path / name / "metrics.jsonl")))
    assert [r.loss for r in records[0]] == [r.loss for r in records[1]]
    assert [r.grad_norm for r in records[1]] == [None] * 4
