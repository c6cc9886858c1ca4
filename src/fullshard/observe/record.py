"""What runs have left in their directories, read for a report."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveInt, TypeAdapter, ValidationError

from fullshard.core.errors import DataError
from fullshard.core.journal import read_journal
from fullshard.core.paths import local_path
from fullshard.observe.sinks import read_metrics

_TRAINER_STATE = "trainer_state.json"
_LEFT_OUT = "a kill may have cut it off; move it away, and the report leaves it out"


# What the report reads of the files; they may hold more. Others write files of these names, too.


class _Bucket(BaseModel):
    elements: int
    per_rank: PositiveInt
    bytes: int
    dtype: str
    compute_dtype: str
    trainable: bool


class _Unit(BaseModel):
    name: str
    buckets: list[_Bucket]


class _Phases(BaseModel):
    phases: dict[str, dict[str, int]]


class _Devices(BaseModel):
    count: int


class _Model(BaseModel):
    name: str
    parameters: int


class _PlanFile(BaseModel):
    verdict: str
    process: int = 0
    memory: _Phases
    devices: _Devices
    model: _Model
    units: list[_Unit] = []


class _Setting(BaseModel):
    value: Any
    origin: str


class _Environment(BaseModel):
    device: str
    ranks: int


class _Logged(BaseModel):
    """A line of the history of Transformers' Trainer."""

    step: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None


class _TrainerState(BaseModel):
    log_history: list[_Logged] = []


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run.

    Attributes:
        name: of its directory, or more of the path where several runs have the same.
        directory: where it was.
        steps: of each step what is known of `StepMetrics`, by name; the steps of Trainer are those it has logged.
        plan: what `plan.json` holds; empty without one.
        settings: of each flag the value and where it came from.
        environment: what it ran on.
        events: of the journal, in order.
        checkpoints: those that are there: name, bytes, files, ranks.
    """

    name: str
    directory: Path
    steps: list[dict[str, Any]]
    plan: dict[str, Any]
    settings: dict[str, tuple[Any, str]]
    environment: dict[str, Any]
    events: list[dict[str, Any]]
    checkpoints: list[dict[str, Any]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps, and the values of one field at them; steps without a value are left out."""
        found = [(step["step"], step[name]) for step in self.steps if step.get(name) is not None]
        return [step for step, _ in found], [float(value) for _, value in found]

    def memory(self) -> tuple[list[int], list[float]]:
        """Steps, and the bytes of the fullest rank."""
        found = [(step["step"], max(step["memory_nbytes"])) for step in self.steps if step.get("memory_nbytes")]
        return [step for step, _ in found], [float(value) for _, value in found]

    def seconds(self) -> float | None:
        """From the first event to the last; None where nothing was noted."""
        times = [datetime.fromisoformat(event["time"]) for event in self.events]
        return (times[-1] - times[0]).total_seconds() if len(times) > 1 else None


def read_runs(paths: list[Path]) -> list[RunRecord]:
    """The runs in some directories, with names that differ.

    Raises:
        DataError: a directory holds no run, or a file of it cannot be read.
    """
    runs = [_read(local_path(path)) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        runs = [dataclasses.replace(run, name=str(run.directory)) for run in runs]
    return runs


def _read(directory: Path) -> RunRecord:
    if not directory.is_dir():
        raise DataError(f"{directory} is no folder, and a run is one", hint="name the --output-dir of a run")
    steps = [dataclasses.asdict(metrics) for metrics in read_metrics(directory / "metrics.jsonl")]
    steps = steps or _logged(_trainer_state(directory))
    events = list(read_journal(directory))
    if not steps and not events:
        raise DataError(
            f"{directory} holds no run: neither metrics.jsonl, as `fullshard train` writes it, nor a {_TRAINER_STATE} "
            "with losses",
            hint="name the --output-dir of a run",
        )
    settings = _json(directory / "settings.json", dict[str, _Setting])
    return RunRecord(
        name=directory.absolute().name,
        directory=directory,
        steps=steps,
        plan=_json(directory / "plan.json", _PlanFile),
        settings={name: (one["value"], one["origin"]) for name, one in settings.items()},
        environment=_json(directory / "environment.json", _Environment),
        events=events,
        checkpoints=[_checkpoint(path) for path in sorted(_checkpoints(directory), key=_number)],
    )


def _json(path: Path, kind: Any) -> dict[str, Any]:
    """What a file holds, if it is of that kind; nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}", hint=_LEFT_OUT) from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected an object, got a {type(found).__name__}", hint=_LEFT_OUT)
    try:
        if found:
            TypeAdapter(kind).validate_python(found)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise DataError(
            f"{path}: {where}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}, got {str(wrong['input'])[:60]}",
            hint="another program may have written it; move it away, and the report leaves it out",
        ) from None
    return found


def _trainer_state(directory: Path) -> dict[str, Any]:
    """What Trainer has noted last. A kill may have cut off what it was writing: then what it wrote before."""
    in_checkpoints = sorted(directory.glob(f"checkpoint-*/{_TRAINER_STATE}"), key=_number, reverse=True)
    cut_off = None
    for path in (directory / _TRAINER_STATE, *in_checkpoints):
        try:
            if state := _json(path, _TrainerState):
                return state
        except DataError as error:
            cut_off = cut_off or error
    if cut_off is not None:
        raise cut_off
    return {}


def _number(path: Path) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", str(path)))


def _logged(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps in the history of Transformers' Trainer."""
    return [
        {name: entry.get(name) for name in ("step", "loss", "learning_rate", "grad_norm")}
        for entry in state.get("log_history", ())
        if "loss" in entry
    ]


def _checkpoints(directory: Path) -> list[Path]:
    inside = [*directory.glob("checkpoints/step-*"), *directory.glob("checkpoint-*")]
    return [path for path in inside if path.is_dir()]


def _checkpoint(path: Path) -> dict[str, Any]:
    files = [file for file in path.rglob("*") if file.is_file()]
    return {"name": path.name, "files": len(files), "bytes": sum(file.stat().st_size for file in files)}
