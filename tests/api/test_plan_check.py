"""`fullshard launch --check_plan`: a running job compared with its plan, in real launches.

pytest tests/api/test_plan_check.py            # -m full for all
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import launch

SCRIPT = """
import sys
import torch
from torch import nn
from fullshard import Accelerator, accelerate, fully_shard, shard_model

way, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def loss_of(model):
    return model(torch.arange(8).reshape(2, 4)).square().mean()


models = [Model() for _ in range(2 if way == "two" else 1)]
if way == "plain":
    torch.distributed.init_process_group("gloo")
    fully_shard(models[0])
    optimizer = torch.optim.AdamW(models[0].parameters())
    for _ in range(steps):
        loss_of(models[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
elif way == "loop":
    model, optimizer, _ = accelerate(models[0], torch.optim.SGD(models[0].parameters(), lr=0.1))
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
else:
    accelerator = Accelerator()
    made = [torch.optim.AdamW(m.parameters()) for m in models]
    if way == "other":
        made = [torch.optim.RMSprop(models[0].parameters())]
    prepared = accelerator.prepare(*made, *models)  # in any order
    optimizers, models = prepared[: len(made)], prepared[len(made) :]
    for _ in range(steps * accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(*models):
            for model, optimizer in zip(models, optimizers):
                silent = accelerator.no_sync(model) if way == "silent" else accelerator.autocast()
                with silent:
                    accelerator.backward(loss_of(model))
                optimizer.step()
                optimizer.zero_grad()
"""


def checked(tmp_path: Path, way: str, steps: int, *flags: str) -> list[str]:
    """The lines about the plan, in order."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    arguments = ["--config_file", "none", "--cpu", "--num_processes", "2", "--check_plan", *flags]
    done = launch(*arguments, "script.py", way, str(steps), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    first = next((i for i, line in enumerate(lines) if "check_plan" in line), len(lines))
    return lines[first:]


@pytest.mark.full
def test_a_launched_script_keeps_to_its_plan(tmp_path: Path) -> None:
    """Said once, by rank 0, with every category; accumulation is that of the launch."""
    lines = checked(tmp_path, "accelerator", 4, "--gradient_accumulation_steps", "2", "--strategy", "SHARD_GRAD_OP")
    assert lines[0] == "fullshard: check_plan: Model with AdamW, step 3: as planned"
    categories = {line.strip().partition(":")[0]: line for line in lines[1:]}
    assert {"events", "sent to unshard", "main weights", "unsharded at once", "gradients", "optimizer state"} <= {
        *categories
    }
    assert "0 B" not in categories["optimizer state"]
    assert len(lines) == 1 + len(categories)  # rank 1 says nothing


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "steps", "flags", "expected"),
    [
        ("accelerator", 2, [], ["Model: nothing was compared, because the run ended after 2 optimizer steps; step 3"]),
        ("loop", 3, ["--mixed_precision", "bf16"], ["Model with SGD, step 3: as planned"]),
        ("two", 3, [], ["Model with AdamW, step 3: as planned"] * 2),
        ("other", 3, [], ["Model with RMSprop, step 3: as planned", "optimizer state: not planned, found"]),
        ("plain", 3, [], ["check_plan had no effect: the script shards the model itself"]),
        ("accelerator", 3, ["--strategy", "NO_SHARD"], ["Model with AdamW, step 3: as planned"]),
    ],
)
def test_ways_to_train(tmp_path: Path, way: str, steps: int, flags: list[str], expected: list[str]) -> None:
    text = "\n".join(checked(tmp_path, way, steps, *flags))
    for line in expected:
        assert line in text, text
    assert text.count(": as planned") == sum("as planned" in line for line in expected)


@pytest.mark.full
def test_what_differs_is_named(tmp_path: Path) -> None:
    """A script that keeps gradients unsharded in every micro-batch does not reduce, and the plan says it would."""
    text = "\n".join(checked(tmp_path, "silent", 3))
    assert "categories differ" in text
    assert re.search(r"events: planned \d+, found \d+ .*; after them \w+ of .* was planned, and \w+ of .* came", text)
    assert "(-100.0%)" in text


TRAINER = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
config.use_cache = False
data = [{"input_ids": torch.arange(8) + i % 5, "labels": torch.arange(8) + i % 5} for i in range(64)]
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=int(sys.argv[2]), per_device_train_batch_size=2, gradient_accumulation_steps=2,
    report_to="none", save_strategy="no", max_grad_norm=1.0,
)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=data).train()
"""


@pytest.mark.full
def test_a_trainer_script(tmp_path: Path) -> None:
    """Unchanged; the micro-batches of a step are those of `TrainingArguments`."""
    (tmp_path / "script.py").write_text(TRAINER, encoding="utf-8")
    arguments = ["--config_file", "none", "--cpu", "--num_processes", "2", "--check_plan"]
    done = launch(*arguments, "script.py", str(tmp_path / "out"), "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "check_plan: LlamaForCausalLM with AdamW, step 3: as planned" in done.stderr


@pytest.mark.full
def test_train_recipe(tmp_path: Path) -> None:
    import subprocess
    import sys

    from tests.launching import environment

    data = tmp_path / "data.txt"
    data.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    options = ["--data", str(data), "--output-dir", str(tmp_path / "out"), "--nproc", "2", "--steps", "4"]
    options += ["--batch-size", "8", "--micro-batch-size", "2", "--seq-len", "16", "--no-plot", "--no-export"]
    options += ["--vocab-size", "300", "--check-plan", "--device", "cpu"]
    code = "from fullshard.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *options],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "with AdamW, step 3: as planned" in done.stdout
