"""Trackers, profiles and what is prepared a second time.

pytest tests/api/test_reporting.py
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import ProfileKwargs, tracking
from accelerate.tracking import GeneralTracker
from ruamel.yaml import YAML
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fullshard.api import Accelerator
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.core.journal import JOURNAL, read_journal
from fullshard.core.stopping import STOPPING
from fullshard.features import shard_model
from fullshard.observe import read_metrics
from fullshard.observe.record import read_runs
from fullshard.observe.report import render
from tests.distributed import preload, run_ranks

preload("accelerate.tracking")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("FSDP_", "ACCELERATE_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    yield


class Kept(GeneralTracker):
    """Keeps what it is told."""

    name = "kept"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.told

    def start(self) -> None:
        self.told.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **further: Any) -> None:
        self.told.append((values, step, further))

    def finish(self) -> None:
        self.told.append("finish")


def _track(directory: str) -> tuple[list[Any], list[str], Any]:
    kept = Kept()
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", kept], project_dir=directory)
    accelerator.init_trackers("run", {"lr": 0.5})
    accelerator.log({"loss": 1.5}, step=3, log_kwargs={"kept": {"tag": "a"}})
    names = [tracker.name for tracker in accelerator.trackers]
    found = accelerator.get_tracker("kept", unwrap=True)
    if accelerator.is_main_process:
        with pytest.raises(ValueError, match="wandb is not an available tracker"):
            accelerator.get_tracker("wandb")
    accelerator.end_training()
    return kept.told, names, found is kept.told


def test_trackers_run_on_the_main_process(tmp_path: Path) -> None:
    (told, names, found), (others, none, blank) = run_ranks(_track, 2, str(tmp_path))
    assert told == ["start", {"lr": 0.5}, ({"loss": 1.5}, 3, {"tag": "a"}), "finish"]
    assert names == ["tensorboard", "kept"] and found
    assert others == none == [] and not blank
    assert len(list((tmp_path / "run").rglob("events.*"))) >= 1, "project_dir is where tensorboard writes"


class Unfinished(Kept):
    """Cannot send the rest."""

    def finish(self) -> None:
        raise OSError("no network")


def _end_without_network() -> tuple[str, bool]:
    accelerator = Accelerator(cpu=True, log_with=[Unfinished()])
    accelerator.init_trackers("run")
    error = ""
    try:
        accelerator.end_training()
    except OSError as caught:
        error = str(caught)
    return error, dist.is_initialized()


def test_a_tracker_that_cannot_finish_is_an_error_where_it_is() -> None:
    """The others do not wait for that rank, nor find it gone."""
    assert run_ranks(_end_without_network, 2, timeout=60) == [("no network", False), ("", False)]


class Registered(Kept):
    """Made by its name."""

    name = "registered"

    def __init__(self, project: str, tag: str = "") -> None:
        super().__init__()
        self.told.append((project, tag))


def test_tensorboard_holds_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Accelerate's own tests: a tensor of one element is a number, text is text, settings are in a file.

    TensorBoard takes no nested settings.
    """
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    module = "tensorboard.backend.event_processing.event_accumulator"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        event_accumulator = importlib.import_module(module)
        accelerator = Accelerator(cpu=True, log_with=["tensorboard", kept := Kept()], project_dir=tmp_path)
        config = {"lr": 0.5, "text": "t", "adam": {"betas": [0.9, 0.95], "eps": {"root": 1e-8}}}
        accelerator.init_trackers("run", config, {"tensorboard": {"flush_secs": 60}})
        accelerator.log({"loss": 0.25, "tensor": torch.tensor(1), "my_text": "some_value"}, step=7)
        accelerator.end_training()
        events = event_accumulator.EventAccumulator(str(tmp_path / "run"))
        events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(7, 0.25)]
    assert [event.value for event in events.Scalars("tensor")] == [1.0]
    assert "my_text/text_summary" in events.Tags()["tensors"]
    (hparams,) = (tmp_path / "run").rglob("hparams.yml")
    stored = {"lr": 0.5, "text": "t", "adam.betas": "[0.9, 0.95]", "adam.eps.root": 1e-8}
    assert YAML(typ="safe").load(hparams) == stored
    assert config in kept.told  # other trackers get it as it is


def test_values_that_no_tracker_takes_are_not_dropped_without_a_word(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    with pytest.warns(UserWarning, match="log: tensorboard has not been started: call init_trackers first"):
        accelerator.log({"loss": 1.0})
    with pytest.raises(ConfigError, match=r"unknown tracker 'tensorbord'\nhint: did you mean 'tensorboard'"):
        accelerator.init_trackers("run", init_kwargs={"tensorbord": {"flush_secs": 1}})
    accelerator.init_trackers("run", init_kwargs={"wandb": {"entity": "others"}})  # for another time
    assert len(accelerator.trackers) == 1


def test_a_second_run_has_trackers_of_its_own(tmp_path: Path) -> None:
    """What the first one had is finished, and takes no more."""
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", kept := Kept()], project_dir=str(tmp_path))
    for name in ("first", "second"):
        accelerator.init_trackers(name)
        accelerator.log({"loss": 1.0}, step=1)
        accelerator.end_training()
    assert kept.told == ["start", ({"loss": 1.0}, 1, {}), "finish"] * 2
    assert [len(list((tmp_path / name).glob("events*"))) for name in ("first", "second")] == [1, 1]


def test_a_tracker_that_a_script_registers_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "registered", Registered)
    accelerator = Accelerator(cpu=True, log_with="registered")
    accelerator.init_trackers("mine", {"lr": 0.5}, init_kwargs={"registered": {"tag": "b"}})
    accelerator.log({"loss": 1.0})
    assert accelerator.get_tracker("registered", unwrap=True) == [
        ("mine", "b"), "start", {"lr": 0.5}, ({"loss": 1.0}, None, {})
    ]  # fmt: skip


def test_a_profile_of_what_is_inside(tmp_path: Path) -> None:
    handler = ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir=str(tmp_path / "traces"))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    assert accelerator.profile_handler is handler
    with accelerator.profile() as profiler:
        torch.ones(3, 4) @ torch.ones(4, 5)
    shapes = [event.input_shapes for event in profiler.events() if event.name == "aten::mm"]
    assert shapes == [[[3, 4], [4, 5]]]
    assert "aten::mm" in json.dumps(json.loads((tmp_path / "traces" / "profile_0.json").read_text()))
    with accelerator.profile(ProfileKwargs()) as profiler:
        torch.ones(3) + 1
    assert any(event.name == "aten::add" for event in profiler.events())


def _profiled(directory: str) -> tuple[list[str], list[Any]]:
    heard: list[Any] = []
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=directory)])
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = accelerator.prepare(shard_model(plain, unit_modules=[], event_sink=heard.append))
    with accelerator.profile():
        accelerator.backward(model(torch.ones(2, 4)).sum())
    during = [str(event.kind) for event in heard]
    accelerator.backward(model(torch.ones(2, 4)).sum())
    return during, heard[len(during) :]


def test_a_profile_has_marks_of_the_engine(tmp_path: Path) -> None:
    results = run_ranks(_profiled, 2, str(tmp_path))
    assert all(during.count("forward_begin") == 1 and after for during, after in results), "who listened still does"
    for rank in (0, 1):
        entries = json.loads((tmp_path / f"profile_{rank}.json").read_text())["traceEvents"]
        marks = {entry["name"]: entry["ts"] for entry in entries if "fullshard: " in str(entry.get("name"))}
        products = [entry["ts"] for entry in entries if entry.get("name") == "aten::addmm"]
        assert len(products) == 2 and "fullshard: reduce_done" in marks
        assert marks["fullshard: forward_begin"] < min(products) < max(products) < marks["fullshard: forward_end"]


def _profiled_without_room(directory: str) -> str:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=directory)])
    with pytest.raises(CheckpointError) as error, accelerator.profile():
        if accelerator.process_index == 1:
            (Path(directory) / "profile_1.json").mkdir()
    accelerator.wait_for_everyone()
    return str(error.value)


def test_a_trace_that_one_rank_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    one, other = run_ranks(_profiled_without_room, 2, str(tmp_path), timeout=60)
    assert one == other and one.startswith("writing the traces of a profile failed\nrank 1: IsADirectoryError")


def test_a_schedule_that_has_recorded_nothing_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "profile_0.json").write_text("of an earlier profile")
    handler = ProfileKwargs(output_trace_dir=str(tmp_path), schedule_option={"wait": 5, "warmup": 1, "active": 1})
    accelerator = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match=r"nothing was recorded.*in 1 call "), accelerator.profile(handler) as made:
        made.step()
    assert not any(path.suffix == ".json" for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"activities": ["gpu"]}, "Invalid profiler activity: gpu"),
        ({"schedule_option": {"wait": 1, "warmup": 1, "activ": 1}}, "schedule_option = .*'activ'"),
        ({"schedule_option": {"wait": -1, "warmup": 1, "active": 1}}, "wait=-1"),
        ({"output_trace_dir": __file__}, "output_trace_dir: the directory .* cannot be created"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_before_it_begins(wrong: dict[str, Any], what: str) -> None:
    begun = False
    with pytest.raises(ConfigError, match=what), Accelerator(cpu=True).profile(ProfileKwargs(**wrong)):
        begun = True
    assert not begun


def test_what_is_prepared_again_after_free_memory_is_known_again(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)
    prepared = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.free_memory()
    again = accelerator.prepare(*prepared)
    assert all(one is other for one, other in zip(again, prepared, strict=True))
    model, optimizer, loader, schedule = again
    for (batch,) in loader:
        accelerator.backward(model(batch).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    before = {k: v.clone() for k, v in optimizer.state[model.weight].items()}
    accelerator.save_state(tmp_path / "state")
    accelerator.backward(model(batch).square().sum())
    optimizer.step()
    accelerator.load_state(tmp_path / "state")
    after = optimizer.state[next(iter(model.parameters()))]
    assert all(torch.equal(after[name], value) for name, value in before.items())


def _recorded(directory: str) -> None:
    accelerator = Accelerator(cpu=True, project_dir=directory)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25))
    accelerator.init_trackers("run", {"width": 4})
    for step in (1, 2):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"train_loss": torch.tensor(step + 0.5), "epoch": 1, "note": "text"})
    accelerator.log({"eval_loss": 9.0, "tokens_per_second": 70}, step=2)
    accelerator.log({"accuracy": 1.0}, step=3)  # nothing that a report shows
    accelerator.end_training()


def test_what_a_script_logs_is_recorded_for_reports(tmp_path: Path) -> None:
    """Also without a tracker. Of the memory, only rank 0's is known, and of the rest what the script logs."""
    run_ranks(_recorded, 2, str(tmp_path))
    steps = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(m.step, m.loss, m.held_out_loss) for m in steps] == [(1, 1.5, None), (2, 2.5, None), (2, None, 9.0)]
    assert [m.learning_rate for m in steps] == [0.25] * 3 and [m.tokens_per_second for m in steps] == [None, None, 70]
    assert all(len(m.memory_nbytes) == 1 and m.memory_nbytes[0] > 2**20 for m in steps)
    assert {m.step_seconds for m in steps} == {m.data_wait_seconds for m in steps} == {None}
    [run] = read_runs([tmp_path])
    assert run.state == "done, 2 steps" and run.recorded.measures_rank_0 and run.recorded.planned_nbytes is None
    assert run.environment["model"] == "Linear, 20 parameters" and run.environment["ranks"] == 2
    assert run.settings["width"] == {"value": 4, "origin": "given"}
    assert run.settings["sharding.strategy"]["origin"] == "default"
    page = render([run])
    assert "planned peak is unknown: the script" in page and "(1 until step" not in page


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_end_of_a_run_that_a_signal_stopped_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """Else `fullshard watch` says that the run is done, until the launcher records that it was stopped."""
    monkeypatch.setattr(STOPPING, "is_agreed", is_stopped)
    monkeypatch.setattr(JOURNAL, "path", None)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.end_training()
    assert any(event["kind"] == "end" for event in read_journal(tmp_path)) is not is_stopped
