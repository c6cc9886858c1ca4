"""What `train` goes on from, what it refuses to go on from, and what it leaves alone until it is sure."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig

from fullshard.checkpoint import save_checkpoint
from fullshard.checkpoint.format import encode_manifest, read_manifest
from fullshard.checkpoint.objects import ObjectPath, location
from fullshard.core.errors import ConfigError
from fullshard.observe import StepMetrics, read_metrics
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.resume import find_checkpoints
from fullshard.recipes.train import train

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
        "sample_tokens": 0,
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


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_overwrite_removes_checkpoints_and_nothing_else(run: Run, tmp_path: Path) -> None:
    """In a directory that the user has named, through a link, too."""
    there, link = tmp_path / "there", tmp_path / "link"
    there.mkdir()
    link.symlink_to(there)
    run(checkpoint_dir=str(link))
    (there / "thesis.txt").write_text("mine")
    (there / "step-by-step").mkdir()
    shutil.copytree(there / "step-000002", there / "kept")
    (there / "step-000001").rename(there / ".old-step-000001-0123456789abcdef")  # as by a save that was killed
    run(checkpoint_dir=str(link), overwrite=True, steps=1)
    assert _names(there) == ["LATEST", "kept", "step-000001", "step-by-step", "thesis.txt"]
    assert [event.step for event in read_metrics(tmp_path / "out" / "metrics.jsonl")] == [1]


def test_overwrite_in_an_object_store(settings: dict[str, Any]) -> None:
    there = location("memory://bucket/run")
    for name in ("step-000003/manifest.json", "step-000003/part", "mine/model", "step-by-step/1", "step-000004"):
        (there / name).write_bytes(b"")
    arguments = TrainArguments.of(settings | {"checkpoint_dir": "memory://bucket/run", "overwrite": True})
    assert find_checkpoints(arguments) == []
    assert sorted(cast("ObjectPath", there).beneath()) == ["mine/model", "step-000004", "step-by-step/1"]


def test_a_checkpoint_from_elsewhere_is_not_mixed_with_what_is_there(run: Run, tmp_path: Path) -> None:
    """Whatever the numbers of steps are: neither replaced, nor pruned as the older ones of this run."""
    run()
    run("elsewhere", seed=1)
    checkpoints = tmp_path / "out" / "checkpoints"
    before = {name: (checkpoints / name / "manifest.json").read_bytes() for name in ("step-000001", "step-000002")}
    for name in before:
        with pytest.raises(ConfigError, match=r"an earlier run .*: step-000001, step-000002\nhint: .*--resume auto"):
            run(resume=str(tmp_path / "elsewhere" / "checkpoints" / name), steps=4, seed=1)
    assert {name: (checkpoints / name / "manifest.json").read_bytes() for name in before} == before
    run("elsewhere", resume=str(tmp_path / "elsewhere" / "checkpoints" / "step-000002"), steps=3, seed=1)


def test_steps_are_compared_as_numbers(
    run: Run, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    older, newer = (tmp_path / "out" / "checkpoints" / name for name in ("step-999999", "step-1000000"))
    for path, written in ((older, "step-000001"), (newer, "step-000002")):
        path.with_name(written).rename(path)
    with pytest.raises(ConfigError, match=r"an earlier run .*: step-1000000\nhint"):
        find_checkpoints(TrainArguments.of(settings | {"resume": str(older)}))
    assert find_checkpoints(TrainArguments.of(settings | {"resume": str(newer)})) == [newer]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find_checkpoints(TrainArguments.of(settings | {"resume": str(older)})) == [newer, older]


def test_the_newest_has_most_steps_behind_it(
    run: Run, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock was when each was saved."""
    run()
    paths = [tmp_path / "out" / "checkpoints" / f"step-{step:06d}" for step in (2, 1)]
    for hours, path in enumerate(paths):
        later = read_manifest(path).model_copy(update={"saved_at": 3600.0 * (1 + hours)})
        (path / "manifest.json").write_bytes(encode_manifest(later))
    assert find_checkpoints(TrainArguments.of(settings | {"resume": "auto"})) == paths
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find_checkpoints(TrainArguments.of(settings)) == paths


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(run: Run, tmp_path: Path) -> None:
    """Its tokenizer, tokens and settings too: without them it could not go on when the data is as it was again."""
    run()
    output, data = tmp_path / "out", tmp_path / "data.txt"
    text, before = data.read_text(), _contents(output)
    for changes, message in (
        ({"vocab_size": 300}, r"the tokens of the data are different \(--vocab-size was 320 and is 300\)\nhint"),
        ({"max_data_mb": 0.003}, r"different \(--max-data-mb was None and is 0.003\)\nhint"),
        ({"seed": 3}, "another run: --seed was 0 and is 3\nhint"),
        ({"steps": 1}, "is 2 steps in, more than --steps 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(**{"steps": 3} | changes)
        assert _contents(output) == before
    data.write_text(text + "and more\n")
    with pytest.raises(ConfigError, match=r"\(what --data names, or the tokenizer, has changed since\)\n"):
        run(steps=3)
    assert _contents(output) == before
    data.rename(tmp_path / "moved.txt").write_text(text)
    run(steps=3, data=str(tmp_path / "moved.txt"))  # the same text, in a file of another name and time


def _contents(directory: Path) -> dict[Path, bytes]:
    """Of all files but the journal, which says that somebody has tried."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "events.jsonl"]
    return {path: path.read_bytes() for path in files}


def test_a_checkpoint_that_train_has_not_written_is_refused(settings: dict[str, Any], run: Run, tmp_path: Path) -> None:
    """Before the data is prepared, not after everything was loaded."""
    model = torch.nn.Linear(2, 2)
    for number, extra in enumerate((None, {"step": torch.ones(1)})):
        path = tmp_path / f"mine-{number}"
        save_checkpoint(path, model=model, extra=extra)
        with pytest.raises(ConfigError, match=r"is no checkpoint of `fullshard train`: its `extra` does not hold arg"):
            run(resume=str(path))
    assert not (tmp_path / "out" / "tokenizer").exists()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_settings_that_may_change_count_from_a_resume_on(
    run: Run, tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weight decay too, which checkpoints hold for each parameter group; and a line says so."""
    run(weight_decay=0, optimizer=optimizer)
    assert "from here on" not in capsys.readouterr().out
    losses = [record.loss for record in run(weight_decay=0.5, steps=4, optimizer=optimizer)]
    assert (
        "resume: from here on --steps was 2 and is 4, --weight-decay was 0.0 and is 0.5; the learning rate follows "
        "another schedule\n"
    ) in capsys.readouterr().out
    saved = read_manifest(tmp_path / "out" / "checkpoints" / "step-000004").optimizer
    assert saved is not None and {group.options["weight_decay"] for group in saved.groups} == {0, 0.5}
    kept = [record.loss for record in run("kept", weight_decay=0, optimizer=optimizer)]
    assert losses[:2] == kept
    run("kept", weight_decay=0, steps=4, optimizer=optimizer)
    kept = [record.loss for record in read_metrics(tmp_path / "kept" / "metrics.jsonl")]
    assert losses[2] == kept[2] and losses[3] != kept[3]


def test_a_run_goes_on_in_another_precision(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """In fp16 with a loss scale of its own, since there was none before."""
    run(precision="bf16", steps=1)
    run(precision="fp16", steps=2)
    assert "--precision was bf16 and is fp16" in capsys.readouterr().out
    metrics = run(precision="fp32", steps=3)
    assert [record.step for record in metrics] == [1, 2, 3]
