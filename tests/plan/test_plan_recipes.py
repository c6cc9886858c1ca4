"""Recipes: what the planner writes, the commands that read it, and the files that come with fullshard.

pytest tests/plan/test_plan_recipes.py
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fullshard.config.document import read_document
from fullshard.config.load import load_file, recipe_arguments
from fullshard.config.resolve import resolve
from fullshard.core.errors import ConfigError
from fullshard.core.sizes import GIB
from fullshard.plan.evaluate import evaluate
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import load_config, load_model
from fullshard.plan.report import as_run_config
from fullshard.recipes.arguments import TrainArguments, read_recipe
from tests.commands import run_here
from tests.recipe_files import PAGE, RECIPES, ROOT, plan_of, table, text_of, written

FILES = sorted(ROOT.glob("recipes/*.yaml"))
FIGURES = ("memory_gib", "host_memory_gib", "tokens_per_second")
COUNTED = ("vit", "whisper", "t5")
"""Recipes of models that Transformers must build, which takes seconds."""


def section(path: Path, name: str) -> dict[str, Any]:
    return next((entry.plain for entry in read_document(path) if entry.key == name), {})


COMMAND = str(Path(sys.executable).with_name("fullshard"))


def run(*words: str, timeout: int = 280) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)


def test_there_is_a_file_for_each_question() -> None:
    assert [path.stem for path in FILES] == sorted(RECIPES)
    assert len(FILES) >= 20


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.full] * p.stem.startswith(COUNTED)) for p in FILES]
)
def test_the_figures_of_a_recipe_are_those_of_its_settings(path: Path) -> None:
    asked = section(path, "plan")
    model, devices = asked.pop("model"), asked.pop("devices")
    memory, host, speed = (asked.pop(name) for name in FIGURES)
    plan = evaluate(load_model(model)[0], Job.of(asked), parse_cluster(devices))
    assert plan.is_within(0.92)
    assert memory == round(plan.memory.needed / GIB, 1)
    assert host == round(max(plan.memory.host_load, plan.memory.host_steady) / GIB, 1)
    assert speed == round(plan.time.tokens_per_second)
    assert resolve([load_file(path)]).config == as_run_config(plan)
    assert f"| `{path.stem}` | {memory:.1f} of" in written()


@pytest.mark.full
def test_the_files_are_what_the_planner_writes() -> None:
    """If not, run `python -m tests.recipe_files`."""
    plans = {name: plan_of(name) for name in RECIPES}
    assert {path.stem: path.read_text() for path in FILES} == {name: text_of(name, plans[name]) for name in RECIPES}
    assert PAGE.is_file() and written() == table(plans)


def test_recipes_are_listed_shown_and_copied(tmp_path: Path) -> None:
    listed = run_here("recipe", "list").stdout
    assert all(path.stem in listed for path in FILES) and max(map(len, listed.splitlines())) <= 80
    [first, *_] = FILES
    [entry, *others] = json.loads(run_here("recipe", "list", "--json").stdout)
    assert len(others) == len(FILES) - 1 and entry["recipe"] == first.stem
    assert {"model", "devices", "memory_gib", "tokens_per_second"} <= entry.keys()
    assert run_here("recipe", "show", first.stem).stdout == first.read_text()
    copied = tmp_path / "my.yaml"
    assert run_here("recipe", "copy", first.stem, str(copied)).returncode == 0
    assert "fullshard sft my.yaml" in copied.read_text()
    assert resolve([load_file(copied)]).config == resolve([load_file(first)]).config
    again = run_here("recipe", "copy", first.stem, str(copied))
    assert again.returncode == 2 and "--overwrite" in again.stderr
    assert run_here("recipe", "copy", first.stem, str(tmp_path)).returncode == 0 and (tmp_path / first.name).is_file()
    wrong = run_here("recipe", "show", first.stem[:-1])
    assert wrong.returncode == 2 and f"did you mean {first.stem!r}" in wrong.stderr


def write(path: Path, *words: str) -> Path:
    done = run_here("plan", *words, "--write", str(path), "--overwrite")
    assert done.returncode == 0, done.stderr
    assert f"wrote {path}" in done.stderr
    return path


def test_train_reads_a_recipe(tmp_path: Path) -> None:
    """The settings of its sections and its arguments, of which flags replace some."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(load_config("GPT-2")))
    words = ("--seq-len", "512", "--micro-batch", "2", "--accumulation", "4", "--loss", "fused", "--optimizer", "muon")
    more = ("--checkpointing", "selective", "--strategy", "HYBRID_SHARD", "--shard-size", "2", "--precision", "fp32")
    path = write(tmp_path / "r.yaml", "-m", str(config), "-d", "4xCPU", *words, *more)
    values, run_config = read_recipe(path, {"seq_len": 128})
    arguments = TrainArguments.of(values)
    assert (arguments.model, arguments.seq_len, arguments.batch_size, arguments.micro_batch_size) == (
        str(config), 128, 32, 2,
    )  # fmt: skip
    assert (arguments.optimizer, arguments.loss_chunk, arguments.device) == ("muon", 1024, "cpu")
    assert (arguments.strategy, arguments.shard_size, arguments.precision) == ("HYBRID_SHARD", 2, "fp32")
    assert (arguments.activation_checkpointing, arguments.activation_checkpointing_mode) == (True, "selective")
    assert run_config.launch.num_processes == 4
    kept, _ = read_recipe(write(path, "-m", str(config), "-d", "2xCPU", "--reshard-after-forward", "auto"), {})
    assert TrainArguments.of(kept).reshard_after_forward == "auto"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {sequence_len: 4}\nlaunch: {device: cpu}\n", "r.yaml:1:9: .* no argument 'sequence_len'"),
        ("train: {seq_len: 4}\nparallelism:\n  cp_size: 2\n", "r.yaml:3:3: .* no setting parallelism.cp_size"),
        ("sft: {max_length: 4}\n", "r.yaml:1:1: this recipe has no section 'train'"),
        ("sharding: {strategy: FULL_SHARD}\n", "r.yaml has no section 'train'"),
    ],
)  # fmt: skip
def test_what_train_cannot_do_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_recipe(tmp_path / "r.yaml", {})


def test_a_recipe_of_several_hosts_says_how_to_start_it(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("train: {seq_len: 4}\nlaunch: {num_machines: 2, num_processes: 4}\n")
    done = run_here("train", str(tmp_path / "r.yaml"))
    assert done.returncode == 2 and "for 2 hosts" in done.stderr and "--no_python fullshard train" in done.stderr


def test_a_plan_that_cannot_be_fine_tuned_has_no_such_section(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "-m", "Llama-2-7B", "-d", "8xA100-80", "--tp", "2")
    assert not section(path, "sft") and not section(path, "train")
    with pytest.raises(ConfigError, match="has no section 'sft'"):
        recipe_arguments(read_document(path), "sft")
    path = write(path, "-m", "GPT-2", "-d", "2xCPU", "--method", "lora", "--lora-rank", "4", "--lora-targets", "c_attn")
    assert section(path, "sft")["lora_r"] == 4 and section(path, "sft")["lora_target_modules"] == ["c_attn"]
    assert not section(path, "train")


@functools.cache
def tiny(kind: str, directory: Path) -> Path:
    """A model of the type with random weights, and a tokenizer whose tokens are bytes."""
    from transformers import AutoTokenizer

    from tests.tiny_models import EXCEPTIONS, build, class_names

    sys.path.insert(0, str(ROOT / "examples"))
    small = importlib.import_module("small")
    tokenizer = AutoTokenizer.from_pretrained(small.model())
    name = next(name for name in class_names(kind) if name.endswith("ForCausalLM"))
    with mock.patch.dict(EXCEPTIONS, {"gpt_oss": {"hidden_size": 64, "intermediate_size": 64}}):
        model: Any = build(kind, name)  # grouped products in bfloat16 take sizes that are multiples of 8
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size))
    model.save_pretrained(directory / kind)
    tokenizer.save_pretrained(directory / kind)
    return directory / kind


def with_section(name: str) -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in FILES if section(path, name)]


def kind_of(path: Path) -> str:
    """The type of the model that a recipe trains."""
    config = load_config(section(path, "plan")["model"]) or {}
    return str((config.get("text_config") or config)["model_type"])


def launched(path: Path, *words: str) -> str:
    """What the command of a recipe prints on two ranks of a CPU."""
    launch = ["--config_file", str(path), "--num_processes", "2", "--num_machines", "1", "--cpu"]
    launch += ["--shard_size", "2"] if resolve([load_file(path)]).config.sharding.shard_size else []
    done = run("launch", *launch, *words)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"text": f"{n} and {n + 1} make {2 * n + 1}. " * 4}) + "\n" for n in range(64)))
    return file


@pytest.mark.full
@pytest.mark.parametrize("path", with_section("sft"))
def test_sft_runs_a_recipe_with_a_small_model_of_its_type(
    path: Path, data: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tiny(kind_of(path), tmp_path_factory.getbasetemp())
    small = ["--model_name_or_path", str(model), "--dataset_name", str(data.parent), "--max_length", "64"]
    small += ["--per_device_train_batch_size", "2", "--max_steps", "3", "--logging_steps", "1", "--report_to", "none"]
    small += ["--output_dir", str(tmp_path / "out"), "--save_strategy", "no"]
    assert "'loss'" in launched(path, "-m", "fullshard.recipes.sft", str(path), *small)


@pytest.mark.full
@pytest.mark.parametrize("path", with_section("train"))
def test_train_runs_a_recipe_with_a_small_model_of_its_type(
    path: Path, data: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tiny(kind_of(path), tmp_path_factory.getbasetemp())
    small = ["--model", str(model), "--data", str(data), "--steps", "3", "--batch-size", "4", "--seq-len", "32"]
    small += ["--micro-batch-size", "1", "--device", "cpu", "--output-dir", str(tmp_path / "out"), "--held-out", "0"]
    launched(path, "--no_python", COMMAND, "train", str(path), *small)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [record["step"] for record in map(json.loads, lines)] == [1, 2, 3]


SCRIPT = """
import sys

import torch
from fullshard import Accelerator
from tests.tiny_inputs import batches, loss_of, trained_class, without_noise
from tests.tiny_models import build

model = without_noise(build(sys.argv[1], trained_class(sys.argv[1])))
batch = batches(model)(0)
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
losses = []
for _ in range(3):
    with accelerator.autocast():
        loss = loss_of(model(**batch))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0]
"""


@pytest.mark.full
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in FILES if not section(path, "sft")])
def test_a_script_runs_a_recipe_with_a_small_model_of_its_type(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what `fullshard sft` cannot train."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "script.py").write_text(SCRIPT)
    said = launched(path, str(tmp_path / "script.py"), kind_of(path))
    assert f"sharded over 2 ranks ({section(path, 'plan')['strategy']}, " in said
