"""Muon where users ask for it: Trainer, `fullshard train`, `fullshard sft`, `fullshard plan`.

pytest tests/optim/test_muon_runs.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.core.dtypes import Dtypes
from fullshard.core.events import Event, EventKind
from fullshard.core.strategy import parse_strategy
from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.layout import lay_out
from fullshard.plan.library import load_model
from fullshard.plan.matrices import MatrixWork, matrix_work
from tests import trainers
from tests.distributed import run_ranks
from tests.matrices import balance
from tests.recipes.test_recipe_sft import place as place
from tests.recipes.test_recipe_train import inputs as inputs
from tests.trainers import OFFLINE, close

# -- Trainer ------------------------------------------------------------------------------------------------------


def train(output: str, way: str) -> dict[str, Any]:
    from fullshard.optim import Muon

    model, options = trainers.build("tied"), dict[str, Any]()
    if way == "factory":  # Transformers calls the first for what it gives the model to
        options["optimizer_cls_and_kwargs"] = (lambda: Muon, {"lr": 1e-2, "adjust_lr_fn": "match_rms_adamw"})
    else:
        options["optimizers"] = (Muon(model, lr=1e-2, adjust_lr_fn="match_rms_adamw"), None)
    made = trainers.trainer(model, trainers.arguments(output), **options)
    made.train()
    optimizer = made.optimizer.optimizer
    assert type(optimizer) is Muon
    assert optimizer.rule is not None
    assert len(optimizer.rule.matrices) == 14
    return trainers.result(made)


def test_trainer(tmp_path: Path) -> None:
    """The losses of one rank on two, whoever makes the optimizer."""
    [alone] = run_ranks(train, 1, str(tmp_path), "factory")
    for way in ("factory", "own"):
        two = run_ranks(train, 2, str(tmp_path), way)[0]
        assert two["own"] < two["total"]
        assert close(two["losses"], alone["losses"], 1e-3)  # half-precision iterations of gradients in another order


# -- commands -----------------------------------------------------------------------------------------------------


def fullshard(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from fullshard.cli.main import main; main()", *map(str, words)]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]  # for scripts elsewhere
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.mark.full
def test_train(inputs: Path, tmp_path: Path) -> None:
    """It says what Muon updates, and goes on at another number of ranks."""
    words = ["train", "--model", inputs / "config.json", "--data", inputs / "data.txt", "--output-dir", tmp_path,
             "--steps", 6, "--save-every", 3, "--batch-size", 6, "--seq-len", 32, "--vocab-size", 320,
             "--device", "cpu", "--no-plot", "--no-export", "--optimizer", "muon",
             "--log-every", 1]  # fmt: skip
    done = fullshard(*words, "--nproc", 2)
    assert done.returncode == 0, done.stderr
    assert "optimizer: Muon updates 14 matrices of" in done.stdout
    assert "; AdamW 1 embeddings of" in done.stdout
    shutil.rmtree(tmp_path / "checkpoints" / "step-000006")
    again = fullshard(*words, "--nproc", 3)
    assert again.returncode == 0, again.stderr
    assert "after step 3" in again.stdout
    losses = [line.split("loss")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("step ")]
    resumed = [line.split("loss")[1].split()[0] for line in again.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 6
    assert len(resumed) == 3
    assert float(losses[-1]) < float(losses[0])


def tune(words: list[str]) -> list[str]:
    from fullshard.recipes.sft import make_trainer
    from fullshard.recipes.sft_arguments import read_arguments

    trainer = make_trainer(read_arguments(words, print))
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    groups = [group for group in optimizer.param_groups if group["algorithm"] == "muon"]
    assert groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    return [p.name for group in groups for p in group["params"]]


def test_sft(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--optim muon`, which Transformers does not name: the adapters are its matrices."""
    for variable, value in OFFLINE.items():
        monkeypatch.setenv(variable, value)
    words = ["--model_name_or_path", str(place / "model"), "--dataset_name", str(place / "data"), "--splits", "train",
             "--output_dir", str(tmp_path), "--report_to", "none", "--chat_template_format", "chatml", "--max_steps",
             "2", "--use_peft_lora", "True", "--lora_target_modules", "q_proj,v_proj", "--optim", "muon",
             "--per_device_train_batch_size", "2", "--save_strategy", "no", "--fsdp",
             "full_shard auto_wrap"]  # fmt: skip
    names = run_ranks(tune, 2, words)[0]
    assert len(names) == 8
    assert all("lora_" in name for name in names)
    with pytest.raises(RuntimeError, match="--optim_args is only for Transformers' own optimizers"):
        run_ranks(tune, 1, [*words, "--optim_args", "x=1"])


# -- plans --------------------------------------------------------------------------------------------------------


def planned_and_sent() -> tuple[MatrixWork, list[int], int]:
    """The plan's dealing, from shapes alone; the engine's owners, and what this rank has sent."""
    from fullshard.api.planning import model_shape
    from fullshard.features import init_mesh, shard_model
    from fullshard.features.unit_selection import unit_modules
    from fullshard.optim import Muon
    from fullshard.wrap.policies import Auto
    from tests.matrices import sent_numel

    model, mesh, events = trainers.build("tied"), init_mesh(), list[Event]()
    units = unit_modules(model, Auto())
    layout = lay_out(
        shape := model_shape(model), strategy=parse_strategy("FULL_SHARD"), world_size=2, dtypes=Dtypes(None)
    )
    work = matrix_work(shape, layout, Dtypes(None))
    assert work is not None
    shard_model(model, unit_modules=units, event_sink=events.append)
    optimizer = Muon(model)
    model(input_ids=torch.ones(1, 5, dtype=torch.long), labels=torch.ones(1, 5, dtype=torch.long)).loss.backward()
    optimizer.step()
    sent = sum(event.nbytes for event in events if event.kind is EventKind.PIECES_SENT)
    assert sent == 2 * sum(sent_numel(work.dealing, 0, mesh.rank))
    return work, [rank for _, rank in optimizer._whole[0].dealing.owners], sent


def test_the_plans_dealing_is_the_engines() -> None:
    results = run_ranks(planned_and_sent, 2)
    work = results[0][0]
    for _, owners, _ in results:
        assert owners == [rank for _, rank in work.dealing.owners]
    assert sum(sent for _, _, sent in results) == 2 * work.sent_nbytes


def test_a_step_with_muon_costs_little_more() -> None:
    """Llama-3.1-8B on 64 H100: whole step against AdamW's; on 1,024 as even as whole matrices can be."""
    model, _ = load_model("Llama-3.1-8B")
    made = {"checkpointing": "full", "seq_len": 8192}
    adamw, muon = (
        evaluate(model, Job.of({**made, "optimizer": o}), parse_cluster("64xH100")) for o in ("adamw", "muon")
    )
    assert muon.time.total <= 1.03 * adamw.time.total
    work = muon.setting.matrices
    assert work is not None
    assert work.over_mean <= 1.15
    assert muon.memory.phases["forward"]["optimizer state"] == pytest.approx(
        (4 * work.numel + 8 * (model.numel - work.numel)) / 64, rel=1e-4
    )
    assert work.sent_nbytes * 64 <= 2 * 2 * work.numel * (1 + 1e-2)
    many = evaluate(model, Job.of({**made, "optimizer": "muon"}), parse_cluster("1024xH100")).setting.matrices
    assert many is not None
    assert balance(many.dealing) <= 1.15
    assert many.over_mean == pytest.approx(8.505, rel=1e-2)


def test_plan_prints_the_balance() -> None:
    words = [
        "plan",
        "--model",
        "Llama-3.1-8B",
        "--devices",
        "8xH100",
        "--optimizer",
        "muon",
        "--details",
        "--checkpointing",
        "full",
    ]
    done = fullshard(*words)
    assert "busiest computes 1.0" in re.sub(r"[\s│]+", " ", done.stdout)
    found = json.loads(fullshard(*words, "--json").stdout)["matrices"]
    assert found["count"] == 224
    assert found["over_mean"] <= 1.15
