"""Accelerate's and TRL's programs for long sequences and several axes, on 2 and 4 ranks, against one plain process.

    ACCELERATE_CHECKOUT=DIR TRL_CHECKOUT=DIR pytest tests/others/test_parallelism_examples.py -m full

Each DIR is a checkout of the library's repository, because its packages hold no examples. All programs compute in
float32 instead of bfloat16, with a larger learning rate and few steps, on small local models and data.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.scripts

from tests.differential import EPS
from tests.launching import LAUNCH, environment
from tests.others.accelerate_examples import OBSERVED, OFFLINE
from tests.trainers import close
from tests.trl_runs import rows, words, write_model

ACCELERATE, TRL = os.environ.get("ACCELERATE_CHECKOUT"), os.environ.get("TRL_CHECKOUT")
pytestmark = pytest.mark.full
needs_accelerate = pytest.mark.skipif(ACCELERATE is None, reason="ACCELERATE_CHECKOUT names no checkout of Accelerate")
needs_trl = pytest.mark.skipif(TRL is None, reason="TRL_CHECKOUT names no checkout of TRL")
MODELS = ("NousResearch/Hermes-3-Llama-3.1-8B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "Qwen/Qwen2-0.5B")
TRAINER = [
    (r"bf16=True", 'max_steps=4, report_to="none", use_cpu=True'),
    (r"logging_steps=5", "logging_steps=1"),
    (r"5e-5", "1e-2"),
]
LOOP = [
    (r'log_with=\["wandb"\]', "log_with=None"),
    (r'default="wandb"', "default=None"),
    (r'mixed_precision="bf16"', 'mixed_precision="no"'),
    (r"    fsdp2_plugin.set_mixed_precision.*", ""),
    (r"torch.bfloat16", "torch.float32"),
    (r"AdamW(.*)lr=1e-5", rf"AdamW\1lr=1e-2, eps={EPS}"),
    (r"lr=1e-5", "lr=1e-1"),
    (r'"inductor"', '"aot_eager"'),
]
ULYSSES = [(r"lr=1e-5", f"lr=1e-3, eps={EPS}"), (r"init_kwargs=.*", "")]
ALONE = [  # DDP wraps the model, and there is no group of ranks
    (r"\(model, args.sequence_length\)", "(accelerator.unwrap_model(model), args.sequence_length)"),
    (r"    model.save_pretrained", "    accelerator.unwrap_model(model).save_pretrained"),
    (r"^parallelism_config = ParallelismConfig\($", "parallelism_config = None\nunused = dict("),
    (r"sp_size=4", "sp_size=1"),
    (r"fsdp_plugin=fsdp2_plugin,", ""),
    (r"dynamo_plugin=dynamo_plugin,", ""),
]


def of_batch(size: int) -> list[tuple[str, str]]:
    return [(r"batch_size=1,", f"batch_size={size},"), (r"train_batch_size=1", f"train_batch_size={size}")]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the programs load by name, as directories of these names."""
    place = tmp_path_factory.mktemp("hub")
    for name in MODELS:
        (place / name).parent.mkdir(exist_ok=True)
        write_model(place / name)
        (place / name / "model").rename(place / "moved")
        for other in ("teacher", "reward"):
            (place / name / other).rename(place / name.replace("/", other))
        (place / name).rmdir()
        (place / "moved").rename(place / name)
    chats = [message["messages"] for message in rows("chats", 24)]
    tables: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "roneneldan/TinyStories": ("train", [{"text": words(i, 12)} for i in range(600)]),
        "trl-lib/Capybara": ("train", [{"messages": chat} for chat in chats]),
        "pairs": ("train", rows("pairs")),
        "HuggingFaceH4/ultrachat_200k": (
            "train_sft",
            [{"prompt": "", "prompt_id": str(i), "messages": chat} for i, chat in enumerate(chats)],
        ),
    }
    for name, (split, lines) in tables.items():
        (place / name).mkdir(parents=True)
        (place / name / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        header = (
            f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: {split}\n    path: {split}.jsonl\n---\n"
        )
        (place / name / "README.md").write_text(header)
    return place


def run(script: Path, place: Path, hub: Path, changes: list[tuple[str, str]], command: list[str], *args: str) -> str:
    """Run a copy of a program whose text is changed, and return what it printed, or its error after `FAILED`."""
    place.mkdir()
    for entry in hub.iterdir():
        (place / entry.name).symlink_to(entry)
    for file in script.parent.glob("*.py"):
        text = file.read_text()
        for old, new in changes:
            text = re.sub(old, new, text, flags=re.MULTILINE)
        (place / file.name).write_text(text)
    (place / "observed").mkdir()
    done = subprocess.run(
        [*command, script.name, *args],
        cwd=place,
        env=environment(**OFFLINE, HF_HOME=str(place / "home")),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return done.stdout if done.returncode == 0 else f"FAILED\n{done.stderr}"


def observed(name: str, place: Path, hub: Path, ranks: int, changes: list[tuple[str, str]], *args: str) -> Any:
    """Return the mean losses of the ranks and the weights after a run of one of Accelerate's loops."""
    plain = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    command = plain if ranks == 1 else [*LAUNCH, "--num_processes", str(ranks), "--cpu"]
    own = [*ALONE, *changes] if ranks == 1 else [(r"^from accelerate import", "from fullshard import"), *changes]
    script = Path(str(ACCELERATE)) / "examples" / f"{name}.py"
    said = run(script, place, hub, own, [*command, str(OBSERVED), "observed"], *args)
    assert not said.startswith("FAILED"), said[-3000:]
    found = [torch.load(place / "observed" / f"rank{rank}.pt") for rank in range(ranks)]
    assert ranks == 1 or all(one["sharded"] for one in found)
    losses = torch.tensor([one["losses"] for one in found]).mean(0).tolist()
    return {"losses": losses, "weights": found[0]["weights"]}


def check(found: Any, alone: Any) -> None:
    assert len(found["losses"]) > 2 and close(found["losses"], alone["losses"], 1e-5), (found, alone)
    torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-5)


SHORT = ("--sequence-length", "32", "--num-steps", "4")


@needs_accelerate
@pytest.mark.parametrize(
    ("sizes", "ranks", "batches"),
    [
        ("dp-shard 2", 2, 2),
        ("cp 2", 2, 1),
        ("tp 2", 2, 1),
        ("dp-shard 2 dp-replicate 2", 4, 4),
        ("cp 2 dp-shard 2", 4, 2),
    ],
)
def test_nd_parallel(tmp_path: Path, hub: Path, sizes: str, ranks: int, batches: int) -> None:
    name, flags = "torch_native_parallelism/nd_parallel", re.sub(r"([a-z-]+) (\d)", r"--\1-size \2", sizes).split()
    more = [*LOOP, *of_batch(4 // batches)]
    found = observed(name, tmp_path / "found", hub, ranks, more, *SHORT, "--checkpoint-frequency", "2", *flags)
    check(found, observed(name, tmp_path / "alone", hub, 1, [*LOOP, *of_batch(4)], *SHORT))


@needs_accelerate
def test_float8_and_bfloat16_train(tmp_path: Path, hub: Path) -> None:
    name, flags = "torch_native_parallelism/fsdp2_fp8", (*SHORT, "--precision", "bf16")
    found = observed(name, tmp_path / "found", hub, 2, [*LOOP, *of_batch(2)], *flags)
    check(found, observed(name, tmp_path / "alone", hub, 1, [*LOOP, *of_batch(4)], *flags))
    rounded = observed(name, tmp_path / "rounded", hub, 2, [*LOOP, *of_batch(2)], *SHORT)
    assert found["losses"] != rounded["losses"] and close(rounded["losses"], found["losses"], 0.01), (rounded, found)


@needs_accelerate
def test_ulysses(tmp_path: Path, hub: Path) -> None:
    pytest.importorskip("deepspeed")
    name = "alst_ulysses_sequence_parallelism/sp-alst"
    found = observed(name, tmp_path / "found", hub, 4, ULYSSES)
    check(found, observed(name, tmp_path / "alone", hub, 1, ULYSSES))


def logged(said: str) -> list[dict[str, float]]:
    """Return what Trainer printed about each step, without times."""
    assert not said.startswith("FAILED"), said[-3000:]
    lines = [json.loads(line.replace("'", '"')) for line in re.findall(r"\{'loss'.*?\}", said)]
    assert len(lines) > 2
    return [{name: float(value) for name, value in line.items()} for line in lines]


def check_logged(found: str, alone: str) -> None:
    """Compare all that was printed, which has four digits."""
    torch.testing.assert_close(logged(found), logged(alone), rtol=1e-3, atol=1e-6)


@needs_accelerate
@pytest.mark.parametrize(
    ("file", "ranks", "sizes"),
    [("cp", 2, [("cp_size: 8", "cp_size: 2")]), ("tp_hsdp", 4, [("tp_size: 2", "tp_size: 1")])],
)
def test_nd_parallel_trainer(tmp_path: Path, hub: Path, file: str, ranks: int, sizes: list[tuple[str, str]]) -> None:
    folder = Path(str(ACCELERATE)) / "examples/torch_native_parallelism"
    config = tmp_path / "config.yaml"
    text = (folder / f"configs/{file}.yaml").read_text()
    for old, new in [*sizes, ("mixed_precision: bf16", "mixed_precision: no"), (" 8\n", f" {ranks}\n")]:
        text = text.replace(old, new)
    config.write_text(text)
    script, flags = folder / "nd_parallel_trainer.py", ("--sequence-length", "32", "--device-type", "cpu")
    command = [*LAUNCH, "--config_file", str(config), "--cpu"]
    of_ranks = [*TRAINER, *of_batch(4 if file == "cp" else 1)]
    found = run(script, tmp_path / "found", hub, of_ranks, command, *flags)
    check_logged(found, run(script, tmp_path / "alone", hub, [*TRAINER, *of_batch(4)], [sys.executable], *flags))


COMMON = (
    "--learning_rate 1e-2 --max_steps 3 --logging_steps 1 --report_to none --use_cpu true --bf16 false "
    "--gradient_checkpointing false --disable_tqdm true --save_strategy no --output_dir out --dtype float32 "
    "--attn_implementation sdpa"
)
PACKED = "--packing --packing_strategy wrapped --max_length 64"


@needs_trl
@pytest.mark.parametrize(
    ("script", "file", "ranks", "batches", "flags"),
    [
        ("sft", "context_parallel_2gpu", 2, 1, "--pad_to_multiple_of 4"),
        ("sft", "alst_ulysses_4gpu", 4, 2, "--pad_to_multiple_of 2"),
        ("sft", "alst_ulysses_4gpu", 4, 2, PACKED),
        ("dpo", "alst_ulysses_4gpu", 4, 2, "--pad_to_multiple_of 2"),
        ("dpo", "context_parallel_2gpu", 2, 1, "--pad_to_multiple_of 4"),
    ],
)
def test_recipes_of_trl(
    tmp_path: Path, hub: Path, script: str, file: str, ranks: int, batches: int, flags: str
) -> None:
    text = (Path(str(TRL)) / f"examples/accelerate_configs/{file}.yaml").read_text()
    text = text.replace("mixed_precision: bf16", "mixed_precision: no").replace("flash_attention_2", "sdpa")
    (tmp_path / "config.yaml").write_text(text)
    path = Path(trl.scripts.__file__).parent / f"{script}.py"
    data = "pairs" if script == "dpo" else "trl-lib/Capybara"
    args = ["--model_name_or_path", MODELS[2], "--dataset_name", data, *COMMON.split(), *flags.split()]
    sizes = [["--per_device_train_batch_size", str(4 // count)] for count in (batches, 1)]
    command = [*LAUNCH, "--config_file", str(tmp_path / "config.yaml"), "--cpu"]
    found = run(path, tmp_path / "found", hub, [], command, *args, *sizes[0])
    check_logged(found, run(path, tmp_path / "alone", hub, [], [sys.executable], *args, *sizes[1]))
