"""What `train` goes on from, what it refuses to go on from, and what it leaves alone until it is sure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from fullshard.checkpoint import save_checkpoint
from fullshard.checkpoint.format import encode_manifest, read_manifest
from fullshard.core.errors import ConfigError
from fullshard.observe import StepMetrics, read_metrics
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.train import look_ahead, train

Run = Callable[..., list[StepMetrics]]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Of a run of two steps of a tiny Llama."""
    (tmp_path / "data.txt").write_text("".join(f"line {i} is {i * i % 17} long\n" for i in range(300)))
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=64,
    )
    (tmp_path / "config.json").write_text(config.to_json_string())
    return {
        "model": str(tmp_path / "config.json"),
        "data": str(tmp_path / "data.txt"),
        "output_dir": tmp_path / "out",
        "steps": 2,
        "batch_size": 4,
        "seq_len": 16,
        "save_every": 1,
        "held_out": 0,
        "vocab_size": 320,
        "export": False,
        "plot": False,
        "device": "cpu",
    }


@pytest.fixture
def run(settings: dict[str, Any], tmp_path: Path) -> Run:
    """Train in this process into a directory of that name and return the steps; settings are given by name."""

    def run(output: str = "out", **changes: Any) -> list[StepMetrics]:
        train(TrainArguments.of(settings | {"output_dir": tmp_path / output} | changes))
        return list(read_metrics(tmp_path / output / "metrics.jsonl"))

    return run


def test_the_newest_has_most_steps_behind_it(run: Run, settings: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the clock was when each was saved; steps are compared as numbers, and what a user renamed is not one."""
    run(save_every=1, keep_checkpoints=3, steps=3)
    checkpoints = tmp_path / "out" / "checkpoints"
    older, newer, kept = (checkpoints / name for name in ("step-999999", "step-1000000", "kept"))
    for path, written in ((older, "step-000001"), (newer, "step-000002"), (kept, "step-000003")):
        (checkpoints / written).rename(path)
    for hours, path in enumerate((newer, older)):
        later = read_manifest(path).model_copy(update={"saved_at": 3600.0 * (1 + hours)})
        (path / "manifest.json").write_bytes(encode_manifest(later))
    assert look_ahead(TrainArguments.of(settings)) == [newer, older]


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(run: Run, tmp_path: Path) -> None:
    """Its settings too; and it goes on when the data is as it was again."""
    run()
    output, data = tmp_path / "out", tmp_path / "data.txt"
    text, before = data.read_text(), _contents(output)
    for changes, message in (
        ({"vocab_size": 300}, "another run: --vocab-size was 320 and is 300\nhint"),
        ({"max_data_mb": 0.003}, "another run: --max-data-mb was None and is 0.003\nhint"),
        ({"seed": 3}, "another run: --seed was 0 and is 3\nhint"),
        ({"steps": 1}, "is of step 2, but --steps is 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(**{"steps": 3} | changes)
        assert _contents(output) == before
    data.write_text(text + "and more\n")
    with pytest.raises(ConfigError, match="another run: the data or the tokenizer has changed since\n"):
        run(steps=3)
    assert _contents(output) == before
    data.rename(tmp_path / "moved.txt").write_text(text)
    run(steps=3, data=str(tmp_path / "moved.txt"))  # the same text, in a file of another name and time


def _contents(directory: Path) -> dict[Path, bytes]:
    """Of all files but the journal, which says that somebody has tried, and tokens of other data."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "events.jsonl"]
    return {path: path.read_bytes() for path in files if not path.relative_to(directory).parts[0].startswith("data-")}


def test_a_checkpoint_that_train_has_not_written_is_refused(run: Run, tmp_path: Path) -> None:
    """Before anything is loaded."""
    save_checkpoint(tmp_path / "out" / "checkpoints" / "step-000001", model=torch.nn.Linear(2, 2), extra={"step": 1})
    with pytest.raises(ConfigError, match="step-000001 is not a checkpoint of `fullshard train`"):
        run()


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.full)])
def test_settings_that_may_change_count_from_a_resume_on(run: Run, tmp_path: Path, optimizer: str) -> None:
    """The weight decay too, which checkpoints hold for each parameter group."""
    run(weight_decay=0, optimizer=optimizer)
    losses = [record.loss for record in run(weight_decay=0.5, steps=4, optimizer=optimizer)]
    saved = read_manifest(tmp_path / "out" / "checkpoints" / "step-000004").optimizer
    assert saved is not None and {group.options["weight_decay"] for group in saved.groups} == {0, 0.5}
    kept = [record.loss for record in run("kept", weight_decay=0, optimizer=optimizer)]
    assert losses[:2] == kept
    run("kept", weight_decay=0, steps=4, optimizer=optimizer)
    kept = [record.loss for record in read_metrics(tmp_path / "kept" / "metrics.jsonl")]
    assert losses[2] == kept[2] and losses[3] != kept[3]


def test_a_run_goes_on_in_another_precision(run: Run) -> None:
    """In fp16 with a loss scale of its own, since there was none before."""
    run(precision="bf16", steps=1)
    run(precision="fp16", steps=2)
    metrics = run(precision="fp32", steps=3)
    assert [record.step for record in metrics] == [1, 2, 3]
