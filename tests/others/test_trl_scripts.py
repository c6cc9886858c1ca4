"""A script that TRL ships, unchanged, as a file under `fullshard launch` on two processes.

pytest tests/others/test_trl_scripts.py -m full
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import trl.scripts

from tests.launching import environment, launch
from tests.trainers import close
from tests.trl_runs import rows, write_model

SCRIPTS = Path(trl.scripts.__file__).parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CI": "true", "ACCELERATE_USE_CPU": "true"}
COMMON = (
    "--max_steps 3 --logging_steps 1 --report_to none --learning_rate 0.01 --bf16 false --use_cpu true "
    "--gradient_checkpointing false --disable_tqdm true"
)
LORA = "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj"
# script: the samples it wants, and its flags
RUNS = {"dpo": ("pairs", LORA), "sft": ("text", "--dataset_text_field text")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and a directory of samples per kind."""
    directory = tmp_path_factory.mktemp("scripts")
    write_model(directory)
    for kind in {kind for kind, _ in RUNS.values()}:
        (directory / kind).mkdir()
        (directory / kind / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(kind)))
    return directory


def losses(output: Path) -> list[float]:
    history = json.loads((output / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    assert all(entry["grad_norm"] > 0 for entry in history if "grad_norm" in entry)
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.full
@pytest.mark.parametrize("script", RUNS)
def test_script(place: Path, tmp_path: Path, script: str) -> None:
    kind, flags = RUNS[script]
    command = [str(SCRIPTS / f"{script}.py"), "--model_name_or_path", str(place / "model")]
    command += ["--dataset_name", str(place / kind), *COMMON.split(), *flags.split()]
    here = {**OFFLINE, "HF_HOME": str(tmp_path / "home")}
    sharded = [*command, "--output_dir", str(tmp_path / "sharded"), "--per_device_train_batch_size", "2"]
    done = launch("--num_processes", "2", "--cpu", *sharded, cwd=tmp_path, timeout=280, **here)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sharded over 2 ranks" in done.stderr
    found = losses(tmp_path / "sharded")
    assert len(found) == 3
    saved = "adapter_model" if "--use_peft" in flags else "model"
    assert (tmp_path / "sharded" / f"{saved}.safetensors").is_file()
    alone = [sys.executable, *command, "--output_dir", str(tmp_path / "alone"), "--per_device_train_batch_size", "4"]
    subprocess.run(alone, cwd=tmp_path, env=environment(**here), check=True, timeout=280, capture_output=True)
    assert close(found, losses(tmp_path / "alone"))
