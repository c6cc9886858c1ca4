"""Every setting of a training run acts: same losses where only the layout changes, other results where it should."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fullshard.checkpoint.lease import LEASE_NAME
from fullshard.config.trackers import PACKAGES
from fullshard.core.errors import ConfigError, DamagedError, DataError, NonFiniteError, WrapError
from fullshard.core.sizes import format_nbytes
from fullshard.features import describe
from fullshard.launch.preemption import PREEMPTED, exit_code
from fullshard.observe import StepMetrics, read_metrics
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.data import train_tokenizer
from fullshard.recipes.train import Run, learning_rate, train
from tests.checkpoint.test_lease import another_job
from tests.differential import TOLERANCE
from tests.distributed import run_ranks

STEPS = 4

Runner = Callable[..., list[StepMetrics]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a tiny Llama without dropout, so that losses do not depend on how ranks draw random numbers."""
    directory = tmp_path_factory.mktemp("inputs")
    (directory / "data.txt").write_text("".join(f"line {i} is {i * i % 17} long\n" for i in range(1500)))
    _write_config(directory / "config.json")
    return directory


def _write_config(path: Path, **changes: Any) -> None:
    settings = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 64,
    }
    path.write_text(LlamaConfig(**(settings | changes)).to_json_string())


def _arguments(inputs: Path, output: Path, **changes: Any) -> TrainArguments:
    settings = {
        "model": str(inputs / "config.json"),
        "data": str(inputs / "data.txt"),
        "output_dir": output,
        "steps": STEPS,
        "batch_size": 5,
        "seq_len": 16,
        "lr": 3e-3,
        "warmup_steps": 1,
        "save_every": 0,
        "log_every": 1,
        "vocab_size": 320,
        "export": False,
        "sample_tokens": 0,
        "plot": False,
        "device": "cpu",
    }
    return TrainArguments.of(settings | changes)


@pytest.fixture
def run(inputs: Path, tmp_path: Path) -> Runner:
    """Train in this process and return the steps; settings are given by name."""

    def run(output: str = "out", **changes: Any) -> list[StepMetrics]:
        arguments = _arguments(inputs, tmp_path / output, **changes)
        train(arguments)
        return list(read_metrics(arguments.output_dir / "metrics.jsonl"))

    return run


def _losses(metrics: list[StepMetrics]) -> list[float]:
    return [record.loss for record in metrics]


@pytest.fixture(scope="module")
def reference(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepMetrics]:
    """One process, one micro-batch, fp32."""
    arguments = _arguments(inputs, tmp_path_factory.mktemp("reference"))
    train(arguments)
    return list(read_metrics(arguments.output_dir / "metrics.jsonl"))


def _watched(arguments: TrainArguments) -> tuple[str, int]:
    """Train; what the model is in the last step, and how often a part of its first layer ran in it."""
    seen: list[tuple[str, int]] = []
    step = Run.step

    def watched(trainer: Run, number: int) -> Any:
        runs: list[int] = []
        part = trainer.model.get_submodule("model.layers.0.mlp")
        handle = part.register_forward_pre_hook(lambda *_: runs.append(number))
        result = step(trainer, number)
        handle.remove()
        seen.append((str(describe(trainer.model)), len(runs)))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "step", watched)
        train(arguments)
    return seen[-1]


SELECTIVE = {"activation_checkpointing": True, "activation_checkpointing_mode": "selective"}


@pytest.mark.parametrize(
    ("changes", "said", "runs"),
    [
        ({}, "(FULL_SHARD, 1 x 2)", 1),
        pytest.param({"strategy": "SHARD_GRAD_OP"}, "(SHARD_GRAD_OP, 1 x 2)", 1, marks=pytest.mark.full),
        pytest.param({"strategy": "NO_SHARD"}, "(NO_SHARD, 2 x 1)", 1, marks=pytest.mark.full),
        ({"strategy": "HYBRID_SHARD", "shard_size": 1}, "(NO_SHARD, 2 x 1)", 1),
        pytest.param({"micro_batch_size": 1}, "", 3, marks=pytest.mark.full),
        ({"micro_batch_size": 2, **SELECTIVE}, "", 4),
        pytest.param({"micro_batch_size": 2, "activation_checkpointing": True}, "", 4, marks=pytest.mark.full),
        (
            {"micro_batch_size": 2, "loss_chunk": 50, "reshard_after_forward": "auto", "unsharded_memory_gib": 0.001},
            "(SHARD_GRAD_OP, 1 x 2)",  # all of them are kept
            2,
        ),
        ({"wrap": "LlamaMLP, LlamaAttention"}, "in 5 units", 1),
        ({"wrap": "none"}, "in 1 unit,", 1),
        pytest.param({"compile": True}, "", 0, marks=pytest.mark.full),  # of which hooks inside see nothing
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*only the root.*")
def test_layout_does_not_change_the_training(
    inputs: Path, tmp_path: Path, reference: list[StepMetrics], changes: dict[str, Any], said: str, runs: int
) -> None:
    """Two ranks see the global batch of 5 that one process sees (3 and 2 sequences), however they are sharded."""
    arguments = _arguments(inputs, tmp_path, **changes)
    line, count = run_ranks(_watched, 2, arguments)[0]
    assert said in line and count == runs, (line, count)
    metrics = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert _losses(metrics) == pytest.approx(_losses(reference), rel=TOLERANCE)
    norms = [[record.grad_norm for record in records] for records in (metrics, reference)]
    assert norms[0] == pytest.approx(norms[1], rel=TOLERANCE)


def test_two_ranks_resume_what_one_began(
    inputs: Path, tmp_path: Path, run: Runner, reference: list[StepMetrics]
) -> None:
    """The world size may change at a resume; each sequence is still seen once, in the same order."""
    run(steps=2, min_lr_ratio=1.0)
    whole = run("whole", min_lr_ratio=1.0)
    run_ranks(train, 2, _arguments(inputs, tmp_path / "out", min_lr_ratio=1.0))
    metrics = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert [record.step for record in metrics] == [1, 2, 3, 4]
    assert _losses(metrics) == pytest.approx(_losses(whole), rel=TOLERANCE)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.02), ("fp16", 0.01)])
def test_precision_acts(run: Runner, reference: list[StepMetrics], precision: str, tolerance: float) -> None:
    """Close to fp32 and not equal to it."""
    metrics = run(precision=precision)
    assert _losses(metrics) == pytest.approx(_losses(reference), rel=tolerance)
    assert _losses(metrics) != _losses(reference)


@pytest.mark.parametrize(
    ("changes", "same_steps"),
    [
        ({"seed": 1}, 0),
        ({"batch_size": 4}, 0),
        ({"seq_len": 8}, 0),
        ({"vocab_size": 300}, 0),
        ({"max_data_mb": 0.01}, 0),
        ({"held_out": 0.3}, 0),
        ({"lr": 1e-3}, 1),
        ({"weight_decay": 0.5}, 1),
        ({"max_grad_norm": 0.01}, 1),
        ({"warmup_steps": 3}, 1),
        ({"min_lr_ratio": 0.9}, 3),
    ],
    ids=str,
)
def test_setting_changes_the_training(
    run: Runner, reference: list[StepMetrics], changes: dict[str, Any], same_steps: int
) -> None:
    """And not before it may: a learning rate, for one, cannot change the loss of the first step."""
    losses, expected = _losses(run(**changes)), _losses(reference)
    assert losses[:same_steps] == expected[:same_steps]
    assert all(one != other for one, other in zip(losses[same_steps:], expected[same_steps:], strict=True))


def test_text_field_and_jsonl(inputs: Path, tmp_path: Path, run: Runner, reference: list[StepMetrics]) -> None:
    """The same text from a row gives the same run as from a file."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"body": (inputs / "data.txt").read_text()}) + "\n")
    assert _losses(run(data=str(path), text_field="body")) == _losses(reference)


def test_checkpoints_kept_and_every(run: Runner, tmp_path: Path) -> None:
    run(save_every=1, keep_checkpoints=3)
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*"))
    assert names == ["step-000002", "step-000003", "step-000004"]


def test_console_prints_every_and_reports(run: Runner, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metrics = run(log_every=3, held_out=0.1, eval_sequences=7, save_every=2)
    text = capfd.readouterr().out
    assert [step.held_out_loss is None for step in metrics] == [True, False, True, False]
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("step")] == ["step 3/4", "step 4/4"]
    assert f"held-out loss: {metrics[-1].held_out_loss:.4f} nats/token\n" in text
    run("without", held_out=0)
    assert "held-out" not in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_extras_are_written_when_wanted(run: Runner, tmp_path: Path) -> None:
    run(profile=True, steps=5, log_with="tensorboard", export=True, plot=True, sample_tokens=100)
    output = tmp_path / "out"
    assert list((output / "tensorboard").rglob("events.*"))
    names = [entry["name"] for entry in json.loads((output / "profile" / "profile_0.json").read_text())["traceEvents"]]
    units = ("model.layers.0", "model.layers.1")
    assert [names.count(f"fullshard: backward_begin {unit}") for unit in units] == [3, 3], "of three steps"
    assert (output / "sample.txt").read_text().strip()
    run("named", log_with="tensorboard")
    assert list((tmp_path / "named" / "tensorboard").rglob("events.*"))
    run("bare")
    present = {path.stem for path in (tmp_path / "bare").iterdir() if path.is_file()}
    kept = {"environment", "metrics", "settings", "events"}
    assert present == kept


def test_an_unreachable_hub_is_asked_once(inputs: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens on the port of `discard`
    with pytest.raises(ConfigError, match="someone/model"):
        train(_arguments(inputs, tmp_path / "out", model="someone/model"))
    said = capsys.readouterr().out
    assert said.count("http://127.0.0.1:9 cannot be reached, so only local and downloaded files are used") == 1
    assert constants.HF_HUB_OFFLINE


def test_trackers_that_cannot_be_had_are_refused_before_anything_is_done(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log_with: .*tensorbord"):
        train(_arguments(inputs, tmp_path / "out", log_with="tensorbord"))
    with pytest.raises(ConfigError, match=r"'dvclive' is not installed\nhint: pip install 'fullshard\[dvclive\]'"):
        train(_arguments(inputs, tmp_path / "out", log_with="dvclive"))
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_every_extra_of_a_tracker_is_one_of_the_project() -> None:
    written = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = written["project"]["optional-dependencies"]
    assert {extra for _, extra in PACKAGES.values()} <= extras.keys()


def test_a_run_says_its_plan_and_writes_down_where_it_runs(
    run: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run(save_every=2, lr=4e-3)
    text = capsys.readouterr().out
    assert metrics[0].checkpoint_seconds == metrics[1].checkpoint_seconds == 0
    assert metrics[2].checkpoint_seconds > 0
    environment = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert (environment["device"], environment["ranks"], environment["torch"]) == ("cpu", 1, torch.__version__)
    assert environment["model"] == "LlamaForCausalLM, 41.1 k parameters"
    assert environment["hosts"] == socket.gethostname()
    tensors = environment["planned_nbytes"] - environment["before_model_nbytes"]
    assert f"plan: the run needs {format_nbytes(tensors)} per rank\n" in text
    assert tensors < environment["planned_nbytes"] < environment["limit_nbytes"] and not environment["reserve_nbytes"]
    assert environment["resumed_after"] == 0


TRACKED = {
    "wandb": "wandb/offline-run-*/run-*.wandb",
    "trackio": "trackio/*.db",
    "mlflow": "mlruns/*/*/metrics/loss",
}


@pytest.mark.full
@pytest.mark.parametrize("name", TRACKED)
def test_other_trackers_get_every_step(
    name: str, run: Runner, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, through their own packages, which are no part of what the other tests need."""
    monkeypatch.chdir(tmp_path)
    for variable, value in {
        "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "out" / "trackio"), "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/out/mlruns",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    pytest.importorskip(name)  # now, because some read their variables as they are imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        losses = [record.loss for record in run(log_with=name)]
    (file,) = (tmp_path / "out").glob(TRACKED[name])
    if name == "mlflow":
        assert [float(line.split()[1]) for line in file.read_text().splitlines()] == losses
    elif name == "trackio":
        with sqlite3.connect(file) as database:
            rows = database.execute("select step, metrics from metrics order by step").fetchall()
        assert [json.loads(values)["loss"] for _, values in rows] == losses
        assert [step for step, _ in rows] == [1, 2, 3, 4]
    else:
        assert b"learning_rate" in file.read_bytes()


def test_weights_and_tokenizer_of_a_directory_are_used(run: Runner, tmp_path: Path) -> None:
    """Training goes on from an exported model with its own tokenizer: the loss begins where the export ended."""
    first = run(steps=40, export=True, lr=1e-2)
    second = run("second", model=str(tmp_path / "out" / "export"), seed=5)
    assert second[0].loss < 0.7 * first[0].loss
    assert not (tmp_path / "second" / "tokenizer").exists()


@pytest.mark.parametrize("highest", [370, 70_000])
def test_a_tokenizer_whose_ids_have_gaps(inputs: Path, run: Runner, tmp_path: Path, highest: int) -> None:
    """Its highest id is more than its size; ids that do not fit the model are refused."""
    directory = tmp_path / "model"
    tokenizer = train_tokenizer(iter([(inputs / "data.txt").read_text()]), vocab_size=320)
    last = max(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    tokenizer.save_pretrained(directory)
    description = json.loads((directory / "tokenizer.json").read_text())
    description["model"]["vocab"][last] = highest
    (directory / "tokenizer.json").write_text(json.dumps(description))
    _write_config(directory / "config.json", vocab_size=highest + 1, hidden_size=8)
    run(model=str(directory), steps=1)
    (tokens,) = (tmp_path / "out").glob("data-*/tokens.bin")
    assert highest in np.fromfile(tokens, "<u4")
    _write_config(directory / "config.json", vocab_size=highest)
    with pytest.raises(ConfigError, match=f"the tokenizer has ids up to {highest}, .* only {highest} embeddings"):
        run("small", model=str(directory))


def test_directory_without_weights_starts_at_random(
    inputs: Path, tmp_path: Path, run: Runner, reference: list[StepMetrics]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((inputs / "config.json").read_text())
    assert _losses(run(model=str(bare))) == _losses(reference)


def test_export_loads_at_any_settings(run: Runner, tmp_path: Path) -> None:
    run(export=True, precision="bf16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "export")
    assert model.dtype == torch.float32, "main weights are exported, not what was computed in"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"data": "./nowhere"}, ConfigError, r"--data: the file or directory './nowhere' does not exist"),
        ({"batch_size": 100_000}, DataError, r"fewer than one batch of 100000\nhint: use more data"),
        ({"held_out": 0.0001}, DataError, r"at least one sequence of 16"),
        ({"seq_len": 65}, ConfigError, r"--seq-len 65 is more than the 64 positions"),
        (
            {"model": "./nowhere/config.json"},
            ConfigError,
            r"--model: the file or directory './nowhere/con.*not exist",
        ),
        ({"model": "{inputs}/data.txt"}, ConfigError, r"cannot read the configuration of a model"),
        ({"wrap": "LlamaDecoderLayr"}, WrapError, r"LlamaDecoderLayer"),
        ({"device": "cuda"}, ConfigError, r"local rank 0 has no CUDA device: this host has 0"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(
    inputs: Path, run: Runner, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    changes = {name: str(v).format(inputs=inputs) if isinstance(v, str) else v for name, v in changes.items()}
    with pytest.raises(kind, match=message):
        run(**changes)


def test_resume_guards(inputs: Path, run: Runner, tmp_path: Path, reference: list[StepMetrics]) -> None:
    """A run is neither mixed with another one, nor removed without being asked for."""
    checkpoints = tmp_path / "out" / "checkpoints"
    run(save_every=2)
    with pytest.raises(ConfigError, match=r"--batch-size was 5 and is 4; --seed was 0 and is 3"):
        run(batch_size=4, seed=3)
    with pytest.raises(ConfigError, match=r"--max-data-mb was None and is 0\.02"):
        run(max_data_mb=0.02)
    with pytest.raises(ConfigError, match=r"is of step 4, but --steps is 3"):
        run(steps=3)
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-000002", "step-000004"]
    shutil.rmtree(checkpoints / "step-000004")
    assert _losses(run()) == _losses(reference), "from the one before"


def test_an_incomplete_checkpoint_is_passed_over(run: Runner, tmp_path: Path, reference: list[StepMetrics]) -> None:
    """It goes on from the newest complete one."""
    run(save_every=2)
    newest = tmp_path / "out" / "checkpoints" / "step-000004"
    (newest / next(path.name for path in newest.iterdir() if "model" in path.name)).unlink()
    assert _losses(run()) == _losses(reference)


def test_a_directory_that_another_job_uses_is_refused(run: Runner, tmp_path: Path) -> None:
    with another_job("folder", tmp_path / "out") as refused, pytest.raises(ConfigError, match=refused):
        run()
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == [LEASE_NAME]


def test_a_run_passes_over_what_is_damaged(
    run: Runner, tmp_path: Path, reference: list[StepMetrics], capsys: pytest.CaptureFixture[str]
) -> None:
    """One bit is another: it goes on from the checkpoint before, and says so; where all are damaged it is an error."""
    run(save_every=2)
    checkpoints = tmp_path / "out" / "checkpoints"

    def damage(name: str) -> None:
        path = checkpoints / name / "model-rank00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)

    damage("step-000004")
    assert _losses(run()) == _losses(reference)
    said = capsys.readouterr().out
    assert f"resume: {checkpoints}/step-000004 is skipped because it is damaged: " in said
    assert "is damaged between bytes" in said and f"resume: from {checkpoints}/step-000002, after step 2" in said
    assert json.loads((checkpoints.parent / "environment.json").read_text())["resumed_after"] == 2
    damage("step-000004")
    damage("step-000002")
    with pytest.raises(DamagedError, match="step-000002"):
        run()


def test_what_is_not_finite_stops_the_run(run: Runner, tmp_path: Path) -> None:
    """Before it gets into a checkpoint."""
    with pytest.raises(
        NonFiniteError, match=r"gradients are not finite: .* \(NaN\) .*; they came from rank 0"
    ) as error:
        run(lr=1e30, save_every=1)
    assert error.value.__notes__ == ["fullshard: this was step 2 of the run"]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*")] == ["step-000001"]


@pytest.fixture
def bad_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the third batch of the data is NaN."""
    loss_sum = Run._loss_sum
    batches: list[torch.Tensor] = []

    def spoiled(trainer: Run, micro_batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs = micro_batch[0]
        if not any(torch.equal(inputs, known) for known in batches):
            batches.append(inputs)
        loss = loss_sum(trainer, micro_batch)
        return loss * math.nan if torch.equal(inputs, batches[min(2, len(batches) - 1)]) and len(batches) > 2 else loss

    monkeypatch.setattr(Run, "_loss_sum", spoiled)


@pytest.mark.usefixtures("bad_batch")
def test_a_step_that_is_not_finite_is_left_out(run: Runner, reference: list[StepMetrics]) -> None:
    with pytest.warns(UserWarning, match=r"step 3 of this process: .*; the step is skipped \(1 so far\)"):
        losses = _losses(run(nonfinite_gradients="skip", held_out=0))
    assert math.isnan(losses[2]) and all(map(math.isfinite, losses[:2] + losses[3:]))


def test_a_signal_saves_and_ends(
    run: Runner, monkeypatch: pytest.MonkeyPatch, reference: list[StepMetrics], tmp_path: Path
) -> None:
    """After the step in which it came; the same command goes on from there. Afterwards signals do what they did."""
    before, loss_sum = signal.getsignal(signal.SIGTERM), Run._loss_sum

    def signaled(trainer: Run, micro_batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if not (tmp_path / "sent").exists() and trainer.optimizer.state:
            (tmp_path / "sent").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return loss_sum(trainer, micro_batch)

    monkeypatch.setattr(Run, "_loss_sum", signaled)
    assert _losses(run()) == _losses(reference)[:2]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*")] == ["step-000002"]
    assert exit_code() == PREEMPTED and signal.getsignal(signal.SIGTERM) == before
    assert _losses(run()) == _losses(reference)
    assert exit_code() == 0


def test_learning_rate_rises_then_falls() -> None:
    arguments = TrainArguments.of({"steps": 100, "warmup_steps": 10, "lr": 1.0, "min_lr_ratio": 0.1})
    rates = [learning_rate(step, arguments) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10 + 89 // 2] == pytest.approx(0.55, abs=0.02)
    assert TrainArguments.of({"steps": 50}).warmup == 5
    single = TrainArguments.of({"steps": 1})
    assert learning_rate(1, single) == single.lr
