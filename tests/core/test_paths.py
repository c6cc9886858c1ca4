"""A URL, or nothing, where a path is expected is refused everywhere, and `~` is one's home everywhere.

pytest tests/core/test_paths.py
"""

from __future__ import annotations

import inspect
import os
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fullshard
import fullshard.torchacc
from fullshard import checkpoint
from fullshard.api.calibration import calibrate
from fullshard.api.options import ProjectConfiguration
from fullshard.checkpoint.lease import let_go
from fullshard.checkpoint.offline import open_source
from fullshard.checkpoint.verify import verify_parts
from fullshard.checkpoint.weight_files import model_directory
from fullshard.cli.main import COMMANDS, app
from fullshard.cli.options import file_word, path_word
from fullshard.config.load import load_file
from fullshard.config.schema import LaunchConfig
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.paths import local_name, local_path, require_there
from fullshard.observe import JsonlSink
from fullshard.plan.hardware import find_device
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.sft_arguments import read_arguments

URL = "s3://bucket/run"
PLAIN = ("--report_to", "none", "--bf16", "False")
NAMED = ("--model_name_or_path", "org/name", "--dataset_name", "name", "--output_dir", "out")
WEB = "https://host/run"  # no store, even for checkpoints


@pytest.mark.parametrize(
    "written", [URL, "gs://b/x", "file:///data/x", "https://a.b/c", "hf://o/n", Path(URL), "S3:/x"]
)
def test_a_url_is_refused_with_its_scheme(written: str | Path) -> None:
    with pytest.raises(ConfigError, match="is a URL, but only paths on this host") as caught:
        local_path(written)
    assert f"{str(written).partition(':')[0].lower()}://" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("written", ["./x", "~/x", "/x.jsonl", "C:\\data", "D:/data", "rows.parquet", "a/b/c", "a\\b"])
def test_what_can_only_be_a_path_is_not_asked_of_the_hub(written: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        require_there(written)
    for option in ("data", "model"):
        with pytest.raises(ConfigError, match=f"--{option}: the file or directory .* does not exist"):
            TrainArguments.of({option: written})
    for name in ("model_name_or_path", "dataset_name"):
        with pytest.raises(ConfigError, match=f"--{name}: the file or directory .* does not exist"):
            read_arguments([*PLAIN, *NAMED, f"--{name}", written], print)
    with pytest.raises(CheckpointError, match=r"the directory .* does not exist"):
        model_directory(written)


@pytest.mark.parametrize(
    "written", ["org/name", "name", "org/name-v1.5", "org/name:main", pytest.param(__file__, id="file")]
)
def test_names_of_the_hub_and_what_is_there_are_taken(written: str) -> None:
    require_there(written)


@pytest.mark.parametrize(
    "written", ["out", "out/x", "/abs/x", "./s3:/x", "a:b", "org/name", "C:x", Path("x"), ".", "a/b://c"]
)
def test_everything_else_is_left_as_it_is(written: str | Path) -> None:
    assert local_name(written) == os.fspath(written)
    assert local_path(written) == Path(written)


@pytest.mark.parametrize("written", ["", " "])
def test_nothing_is_not_the_current_folder(written: str) -> None:
    for border in (
        local_path,
        lambda text: TrainArguments.of({"output_dir": text}),
        lambda text: checkpoint.save_checkpoint(text, model=_model()),
        lambda text: checkpoint.latest_checkpoint(text),
        lambda text: LaunchConfig(log_dir=text),
    ):
        with pytest.raises(ConfigError, match=rf"the path '{written}' is empty"):
            border(written)


def test_a_name_that_no_file_can_have() -> None:
    with pytest.raises(ConfigError, match=r"'a.x00b' contains a NUL character"):
        local_path("a\0b")
    with pytest.raises(
        ConfigError, match="contains a name of 300 characters, but file systems allow at most 255 bytes"
    ):
        local_path("/tmp/" + "n" * 300 + "/x")
    assert local_path("n" * 255) == Path("n" * 255)


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert local_path("~/x") == Path("/home/somebody/x") == local_path(Path("~/x"))
    assert local_name("~") == "/home/somebody"


def test_a_home_that_this_host_does_not_know() -> None:
    with pytest.raises(
        ConfigError, match=r"'~0/x' cannot be expanded: this host has no home directory for ~0"
    ) as caught:
        local_path("~0/x")
    assert "./~0" in str(caught.value.hint)
    assert LaunchConfig(log_dir="~0/x").log_dir == "~0/x"  # read by the host that starts the processes


def _model() -> nn.Module:
    return nn.Linear(2, 2)


_LIBRARY: dict[str, Callable[[], Any]] = {
    "save_checkpoint": lambda: checkpoint.save_checkpoint(WEB, model=_model()),
    "load_checkpoint": lambda: checkpoint.load_checkpoint(WEB, model=_model()),
    "AsyncSaver.save": lambda: checkpoint.AsyncSaver().save(WEB, model=_model()),
    "export_hf": lambda: checkpoint.export_hf(URL, model=_model()),
    "from_pretrained": lambda: checkpoint.from_pretrained(None, URL),
    "load_pretrained": lambda: checkpoint.load_pretrained(URL, _model()),
    "latest_checkpoint": lambda: checkpoint.latest_checkpoint(WEB),
    "verify_checkpoint": lambda: checkpoint.verify_checkpoint(WEB),
    "verify_parts": lambda: verify_parts(WEB),
    "open_source": lambda: open_source(WEB).__enter__(),
    "load_file": lambda: load_file(URL + ".yaml"),
    "log_dir": lambda: LaunchConfig(log_dir=URL),
    "find_device": lambda: find_device(URL + ".json"),
    "calibrate": lambda: calibrate(Path(URL + ".json")),
    "JsonlSink": lambda: JsonlSink(Path(URL)),
    "project_dir": lambda: fullshard.Accelerator(project_dir=URL),
    "ProjectConfiguration": lambda: ProjectConfiguration(project_dir=URL),
    "logging_dir": lambda: ProjectConfiguration(logging_dir=URL),
    "save_state": lambda: _prepared().save_state(WEB),
    "load_state": lambda: _prepared().load_state(WEB),
    "save_model": lambda: _prepared().save_model(_model(), URL),
    "save": lambda: fullshard.Accelerator().save({}, URL),
    "torchacc.Config": lambda: fullshard.torchacc.Config.of(URL),
    "torchacc.save": lambda: fullshard.torchacc.save({}, URL),
    "torchacc consolidate": lambda: fullshard.torchacc.dist.fsdp.consolidate_sharded_model_checkpoints(URL),
    "train model": lambda: TrainArguments.of({"model": URL}),
    "train data": lambda: TrainArguments.of({"data": URL}),
    "train checkpoint_dir": lambda: TrainArguments.of({"checkpoint_dir": WEB}),
    "train output_dir": lambda: TrainArguments.of({"output_dir": Path(URL)}),
}


def _prepared() -> Any:
    accelerator = fullshard.Accelerator()
    model = _model()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Somewhere to stand, in which nothing may appear."""
    for name in list(os.environ):
        if name.startswith(("FSDP_", "ACCELERATE_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("border", _LIBRARY)
def test_every_border_of_the_library_refuses_a_url(border: str) -> None:
    with pytest.raises(ConfigError, match="is a URL"):
        _LIBRARY[border]()


_COMMANDS = [
    ["train", "--output-dir", URL],
    ["train", "--model", URL],
    ["train", "--data", URL],
    ["train", "--checkpoint-dir", WEB],
    ["sft", URL + ".yaml"],
    ["launch", "--config_file", URL, "-m", "antigravity"],
    ["launch", "--log_dir", URL, "-m", "antigravity"],
    ["merge", URL, "adapter", "out"],
    ["merge", "base", URL, "out"],
    ["merge", "base", "adapter", URL],
    ["plan", "--model", URL],
    ["plan", "--model", "7B", "--config", URL],
    ["plan", "--model", "7B", "--devices", "8xH100", "--write", URL],
    ["plan", "--model", "7B", "--devices", f"2x{URL}.json"],
    ["plan", "--calibrate", URL + ".json"],
    ["simulate", "--model", URL, "--world-size", "2"],
    ["config", "default", "--output", URL],
    ["config", "schema", "--output", URL],
    ["config", "check", URL],
    ["config", "convert", URL],
    ["config", "explain", URL],
    ["ckpt", "inspect", WEB],
    ["ckpt", "verify", WEB],
    ["ckpt", "diff", WEB, "b"],
    ["ckpt", "diff", "a", WEB],
    ["ckpt", "export", WEB, "out"],
    ["ckpt", "export", "a", "out", "--config-from", URL],
    ["ckpt", "export", "a", URL],
    ["ckpt", "reshard", "a", WEB, "--world-size", "2"],
    ["ckpt", "import", WEB, "out"],
    ["ckpt", "prune", WEB, "--keep", "1"],
]  # fmt: skip


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("words", _COMMANDS, ids=" ".join)
def test_every_command_refuses_a_url(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
    said = f"{done.output} {done.exception}"
    assert "is a URL" in " ".join(said.replace("│", " ").split()), said


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("words", [words for words in _COMMANDS if "--log_dir" not in words], ids=" ".join)
def test_every_command_refuses_an_empty_path(words: list[str]) -> None:
    """`--output-dir "$OUT"` of a variable that is not set, with --overwrite perhaps. No `--log_dir` is none."""
    done = CliRunner().invoke(app, ["" if "://" in word else word for word in words])
    assert done.exit_code != 0
    said = " ".join(f"{done.output} {done.exception}".replace("│", " ").split())
    assert re.search("is empty|got ''", said), said


def test_every_path_of_a_command_is_parsed_by_the_rule() -> None:
    import importlib

    wrong = []
    for name in COMMANDS:
        module = importlib.import_module(f"fullshard.cli.{name}")
        for function in (value for _, value in inspect.getmembers(module, inspect.isfunction)):
            if function.__module__ != module.__name__ or function.__name__.startswith("_"):
                continue
            for parameter, hint in typing.get_type_hints(function, include_extras=True).items():
                options = getattr(hint, "__metadata__", ())
                if "Path" in str(getattr(hint, "__origin__", "")) and any(
                    o.parser not in (path_word, file_word) for o in options
                ):
                    wrong.append(f"{name}: {function.__name__}({parameter})")
    assert wrong == []


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("flag", ["model_name_or_path", "dataset_name", "output_dir", "resume_from_checkpoint"])
def test_sft_refuses_a_url(flag: str) -> None:
    with pytest.raises(ConfigError, match="is a URL"):
        read_arguments([*PLAIN, *NAMED, f"--{flag}", URL], print)


@pytest.mark.parametrize("where", ["output_dir", "save_model", "resume"])
def test_trainer_refuses_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    from tests.trainers import arguments, build, trainer

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is a URL"):
        made = trainer(build(), arguments(URL if where == "output_dir" else tmp_path / "out"))
        made.save_model(URL) if where == "save_model" else made.train(resume_from_checkpoint=URL)
    assert not list(tmp_path.glob("s3*"))


def test_home_is_the_same_at_every_border(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    accelerator = fullshard.Accelerator(project_dir="~/project")
    model = _model()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert accelerator.save_state("~/state") == str(home / "state")
    accelerator.load_state("~/state")
    accelerator.save_model(model, "~/weights")
    checkpoint.export_hf(Path("~/exported"), model=model)
    let_go()
    assert accelerator.project_dir == str(home / "project")
    assert sorted(path.name for path in home.iterdir()) == ["exported", "project", "state", "weights"]
    assert CliRunner().invoke(app, ["ckpt", "verify", "~/state"]).exit_code == 0
    assert CliRunner().invoke(app, ["ckpt", "export", "~/state", "~/whole", "--to", "safetensors"]).exit_code == 0
    assert (home / "whole" / "model.safetensors").is_file()
    assert TrainArguments.of({"output_dir": "~/run", "model": "~/whole"}).output_dir == home / "run"
    assert list(elsewhere.iterdir()) == []
