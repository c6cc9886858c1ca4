"""Complete, unchanged programs of other projects around torch's `fully_shard`, under `fullshard.take`.

    PROGRAMS_PYTHON=ENV/bin/python[:OTHER/bin/python] pytest tests/others/test_taken_programs.py -m full

Each program runs on two ranks over Gloo, with fullshard's engine and with torch's. It runs in the first of these
Pythons that has its package; the default is this Python. The packages are torchtune 0.6.1 with torchao 0.10, torchtitan
0.2.2 with triton, verl 0.9.1 with Transformers 5.9 and TRL 0.27, diffusers and Lightning. `scripts/taken/on_cpu.py`
replaces what programs expect of an accelerator, for both engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.launching import environment, launch

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
PARTS = Path(__file__).parents[1] / "scripts" / "taken"
SOURCE = Path(__file__).parents[2] / "src"
PYTHONS = os.environ.get("PROGRAMS_PYTHON", sys.executable).split(os.pathsep)
RUN = ["-m", "torch.distributed.run", "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", "--nproc_per_node"]
TAKE = {"torch": [], "fullshard": ["-m", "fullshard.take"]}
ON_CPU = str(PARTS / "on_cpu.py")
SAID = "fullshard: in this program, "
VARIABLES = {
    **{"PYTHONPATH": f"{SOURCE}{os.pathsep}{PARTS}", "HF_HUB_OFFLINE": "1"},
    **{"VERL_USE_EXTERNAL_MODULES": "verl_platform", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"},
}


def python_with(package: str) -> str:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    for python in PYTHONS:
        if subprocess.run([python, "-c", code], check=False).returncode == 0:
            return python
    pytest.skip(f"{package} is in none of the Pythons that PROGRAMS_PYTHON names")


def run(python: str, *words: object, cwd: Path, package: str = "") -> tuple[int, str]:
    """Run a process to its end. Return its exit code and its output."""
    variables = {name: value for name, value in VARIABLES.items() if package == "verl" or "VERL" not in name}
    command = [python, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=600, check=False
    )
    return done.returncode, done.stdout + done.stderr


def run_ranks(python: str, engine: str, *words: object, cwd: Path, count: int = 2, package: str = "") -> None:
    code, said = run(python, *RUN, count, *TAKE[engine], *words, cwd=cwd, package=package)
    # Without fullshard, torch's Gloo threads sometimes abort a process that has done everything.
    aborted = engine == "torch" and "terminate called without an active exception" in said
    assert code == 0 or aborted, said[-6000:]
    assert (SAID in said) == (engine == "fullshard")


def leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(f"{name}.{key}", inner)
    elif isinstance(value, torch.Tensor | float):
        yield name, torch.as_tensor(value)


def read(path: Path) -> Any:
    if path.name == ".metadata":
        with tempfile.TemporaryDirectory() as place:
            dcp_to_torch_save(path.parent, f"{place}/whole.pt")
            return torch.load(f"{place}/whole.pt", weights_only=False)
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)


def saved(place: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the files of weights and results below a directory, by file and name."""
    files = [path for path in place.rglob("*") if path.suffix in (".pt", ".bin", ".safetensors", ".metadata")]
    files += list(place.rglob(".metadata"))
    files = [path for path in files if not path.name.startswith(("data_", "extra_state", "recipe_state"))]
    return dict(leaf for path in sorted(files) for leaf in leaves(str(path.relative_to(place)), read(path)))


def check(place: Path, close: float) -> dict[str, torch.Tensor]:
    """Both engines have saved the same tensors, within `close`; those of torch's."""
    theirs, ours = saved(place / "torch"), saved(place / "fullshard")
    assert theirs and theirs.keys() == ours.keys()
    pairs = {name: (value.double(), ours[name].double()) for name, value in theirs.items() if value.numel()}
    far = {name: (one - other).abs().max().item() for name, (one, other) in pairs.items()}
    assert max(far.values()) <= close, sorted(far.items(), key=lambda item: -item[1])[:5]
    return theirs


@pytest.mark.parametrize(
    ("script", "package"),
    [("diffusion", "diffusers"), ("lightning_program", "lightning"), ("self_distillation", "torch")],
)
def test_scripts_in_the_style_of_public_ones(tmp_path: Path, script: str, package: str) -> None:
    python = python_with(package)
    for engine in TAKE:
        (tmp_path / engine).mkdir()
        program = ["-m", script] if script == "self_distillation" else [PARTS / f"{script}.py"]
        run_ranks(python, engine, *program, tmp_path / engine, cwd=tmp_path)
    assert any("losses" in name for name in check(tmp_path, 2e-6))


def test_under_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    run_ranks(sys.executable, "torch", PARTS / "self_distillation.py", tmp_path / "torch", cwd=tmp_path)
    (tmp_path / "fullshard").mkdir()
    words = ["--cpu", "--num_processes", "2", "--take", "fully_shard", str(PARTS / "self_distillation.py")]
    done = launch(*words, str(tmp_path / "fullshard"), cwd=tmp_path)
    assert done.returncode == 0 and done.stderr.count(SAID) == 1, done.stderr
    assert "no model was sharded" not in done.stderr
    check(tmp_path, 2e-6)


def recipe_settings(recipe: str, out: Path, start: Path) -> dict[str, Any]:
    """The configuration of one of torchtune's recipes, which is YAML, and so may be JSON."""
    checkpointer = {
        **{"_component_": "torchtune.training.FullModelTorchTuneCheckpointer", "checkpoint_dir": str(start)},
        **{"checkpoint_files": ["model.pt"], "recipe_checkpoint": None, "output_dir": str(out)},
        "model_type": "LLAMA3_2",
    }
    adapters = "lora" in recipe or "distillation" in recipe
    pairs = "dpo" in recipe
    model: dict[str, Any] = {"_component_": "torchtune_parts.model"}
    if adapters:
        ranks = {"lora_attn_modules": ["q_proj", "v_proj"], "lora_rank": 4, "lora_alpha": 8, "apply_lora_to_mlp": True}
        model = {"_component_": "torchtune_parts.lora", **ranks}
        checkpointer["adapter_checkpoint"] = None
    loss: dict[str, Any] = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    schedule = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    logger = "torchtune.training.metric_logging.DiskLogger"
    optimizer = {"_component_": "torch.optim.SGD" if "qat" in recipe else "torch.optim.AdamW", "lr": 1e-3}
    settings = {
        **{"output_dir": str(out), "tokenizer": {"_component_": "torchtune_parts.Tokenizer"}, "seed": 1},
        **{"dataset": {"_component_": "torchtune_parts.Data", "pairs": pairs}, "shuffle": True, "model": model},
        **{"checkpointer": checkpointer, "resume_from_checkpoint": False, "save_adapter_weights_only": False},
        **{"batch_size": 2, "epochs": 1, "optimizer": optimizer, "max_steps_per_epoch": None},
        **{"lr_scheduler": {"_component_": schedule, "num_warmup_steps": 1}, "gradient_accumulation_steps": 2},
        **{"device": "cpu", "enable_activation_checkpointing": True, "enable_activation_offloading": False},
        **{"clip_grad_norm": 1.0, "compile": False, "optimizer_in_bwd": False, "dtype": "fp32"},
        **{"metric_logger": {"_component_": logger, "log_dir": str(out / "logs")}, "log_every_n_steps": 1},
        **{"log_peak_memory_stats": False, "fsdp_cpu_offload": False},
        "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1} if pairs else loss,
    }
    if "dpo" in recipe:
        settings["ref_checkpointer"] = checkpointer
    if "distillation" in recipe:
        settings |= {"teacher_model": {"_component_": "torchtune_parts.model"}, "teacher_checkpointer": checkpointer}
        settings |= {"kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"}}
        settings |= {"kd_ratio": 0.5}
    if "qat" in recipe:
        quantizer = "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"
        settings["quantizer"] = {"_component_": quantizer, "groupsize": 32}
    return settings


RECIPES = ["full_finetune", "lora_finetune", "qat", "qat_lora_finetune", "full_dpo", "lora_dpo"]


@pytest.mark.parametrize("recipe", [*RECIPES, "knowledge_distillation"])
def test_recipe_of_torchtune(tmp_path: Path, recipe: str) -> None:
    python = python_with("torchtune")
    (tmp_path / "start").mkdir()
    run(python, PARTS / "torchtune_parts.py", tmp_path / "start" / "model.pt", cwd=tmp_path)
    code = "import importlib.util as u; print(u.find_spec('torchtune').origin)"
    where = Path(run(python, "-c", code, cwd=tmp_path)[1].split()[0]).parents[1]
    for engine in TAKE:
        out = tmp_path / engine
        out.mkdir()
        (out / "settings.json").write_text(json.dumps(recipe_settings(recipe, out, tmp_path / "start")))
        program = [ON_CPU, where / "recipes" / f"{recipe}_distributed.py", "--config", out / "settings.json"]
        run_ranks(python, engine, *program, cwd=out)
    found = check(tmp_path, 1e-6)
    start = torch.load(tmp_path / "start" / "model.pt")
    moved = [
        name
        for name, value in found.items()
        for key in start
        if name.endswith(f".{key}") and not torch.equal(value, start[key])
    ]
    assert moved


@pytest.mark.parametrize("model", ["llama3", "deepseek_v3", "llama4"])
def test_debug_model_of_torchtitan(tmp_path: Path, model: str) -> None:
    """Two of them are mixtures of experts. From a seed checkpoint four steps, and two more after a restart."""
    python = python_with("torchtitan")
    run(python, PARTS / "small_files.py", "titan", tmp_path / "files", cwd=tmp_path)

    def train(engine: str, count: int, *words: str) -> None:
        files = ["--model.hf_assets_path", "files/tokens", "--training.dataset_path", "files/c4_test"]
        sizes = ["--training.local_batch_size", "2", "--training.seq_len", "64", "--debug.seed", "1"]
        named = ["--model.name", model, "--model.flavor", "debugmodel", "--training.dataset", "c4_test"]
        program = [ON_CPU, "-m", "torchtitan.train", *named, *files, *sizes, "--checkpoint.enable", *words]
        run_ranks(python, engine, *program, cwd=tmp_path, count=count)

    train("torch", 1, "--job.dump_folder", "seed", "--checkpoint.create_seed_checkpoint", "--training.steps", "1")
    for engine in TAKE:
        for steps in ("4", "6"):
            start = ["--checkpoint.initial_load_path", "seed/checkpoint/step-0", "--checkpoint.no_last_save_model_only"]
            often = ["--checkpoint.interval", "2", "--training.steps", steps, "--lr_scheduler.warmup_steps", "1"]
            exact = ["--training.mixed_precision_param", "float32"]
            train(engine, 2, "--job.dump_folder", engine, *start, *often, *exact)
    names = check(tmp_path, 2e-6)
    assert {f"checkpoint/step-{step}/.metadata" for step in (2, 4, 6)} == {
        name.partition(".metadata")[0] + ".metadata" for name in names
    }


VERL = {
    "full": [],
    "lora": ["model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=[q_proj,v_proj]"],
}


@pytest.mark.parametrize("kind", [*VERL, "pickled"])
def test_trainer_of_verl(tmp_path: Path, kind: str) -> None:
    """Its checkpoints of Hugging Face's format are equal; those that pickle each rank's part are refused by name."""
    python = python_with("verl")
    run(python, PARTS / "small_files.py", "verl", tmp_path / "files", cwd=tmp_path)
    files = ["data.train_files=files/train.parquet", "model.path=files/model", "data.num_workers=0"]
    sizes = ["data.train_batch_size=8", "data.micro_batch_size_per_gpu=2", "data.max_length=64"]
    exact = ["+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"]
    plain = ["data.use_dynamic_bsz=False", "model.use_remove_padding=False", "engine.use_torch_compile=False"]
    plain += ["+model.override_config.attn_implementation=sdpa", "engine.strategy=fsdp2", "trainer.device=cpu"]
    long = ["trainer.logger=[console]", "trainer.total_epochs=1", "trainer.save_freq=2", "trainer.n_gpus_per_node=2"]
    program = [ON_CPU, "-m", "verl.trainer.sft_trainer", *files, *sizes, *exact, *plain, *long, *VERL.get(kind, [])]
    if kind == "pickled":
        code, said = run(python, *RUN, 2, *TAKE["fullshard"], *program, cwd=tmp_path, package="verl")
        assert code != 0 and "cannot pickle model.embed_tokens.weight, because this rank holds only elements" in said
        return
    for engine in TAKE:
        words = [f"trainer.default_local_dir={tmp_path / engine}", "checkpoint.save_contents=[hf_model,extra]"]
        run_ranks(python, engine, *program, *words, cwd=tmp_path, package="verl")
    check(tmp_path, 1e-5)
