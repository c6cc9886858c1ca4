"""Read runs' folders, for a report.

A folder may hold anything: other programs write files of these names, and kills cut them off. So every file is read
with limits (`core.files`) and checked, paths out of the folder are refused, and every fault is one `DataError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AliasPath, BaseModel, Field, TypeAdapter, ValidationError

from fullshard.core.errors import DataError
from fullshard.core.files import MIB, read_object
from fullshard.core.journal import JOURNAL_NAME, read_journal
from fullshard.core.paths import local_path
from fullshard.observe.sinks import read_metrics

_TRAINER_STATE = "trainer_state.json"
_LEFT_OUT = "move it away, and the report leaves it out"
_MOST_NBYTES = 256 * MIB
_MOST_FILES = 100_000
_LARGEST = 1e100
"""Larger values are not drawn, like those that are not finite."""

Kind = TypeVar("Kind")
_Count = Annotated[int, Field(ge=0, le=2**63)]
_Sizes = dict[str, dict[str, _Count]]


class BucketRecord(BaseModel):
    """A bucket in `plan.json`."""

    elements: _Count
    per_rank: Annotated[int, Field(gt=0, le=2**63)]
    bytes: _Count
    dtype: str
    compute_dtype: str
    trainable: bool


class UnitRecord(BaseModel):
    """A unit in `plan.json`."""

    name: str
    buckets: list[BucketRecord]


class PlanRecord(BaseModel):
    """The fields of `plan.json` that the report reads."""

    verdict: str
    process: _Count = 0
    phases: _Sizes = Field(validation_alias=AliasPath("memory", "phases"))
    ranks: _Count = Field(validation_alias=AliasPath("devices", "count"))
    model: str = Field(validation_alias=AliasPath("model", "name"))
    parameters: _Count = Field(validation_alias=AliasPath("model", "parameters"))
    units: list[UnitRecord] = []


class SettingRecord(BaseModel):
    """A setting in `settings.json`."""

    value: Any
    origin: str


class Environment(BaseModel, extra="allow"):
    """The fields of `environment.json` that the report reads; others are kept, too."""

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
class Checkpoint:
    """A checkpoint in a run's folder."""

    name: str
    files: int
    nbytes: int
    is_link: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run.

    Attributes:
        name: of its folder, or its whole path where several runs have the same.
        directory: where it was.
        steps: the known fields of `StepMetrics` of each step, by name; the steps of Trainer are those it has logged.
        plan: the contents of `plan.json`; None without one.
        settings: of each flag the value and where it came from.
        environment: of the run.
        events: of the journal, in order.
        checkpoints: those that are there.
    """

    name: str
    directory: Path
    steps: list[dict[str, Any]]
    plan: PlanRecord | None
    settings: dict[str, SettingRecord]
    environment: Environment | None
    events: list[dict[str, Any]]
    checkpoints: list[Checkpoint]

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return steps and the values of one field at them; of one value per rank it is the largest."""
        found = []
        for step in self.steps:
            value = step.get(name)
            value = max(value, default=None) if isinstance(value, tuple) else value
            if value is not None and abs(value) < _LARGEST and step["step"] < _LARGEST:
                found.append((float(step["step"]), float(value)))
        return [step for step, _ in found], [value for _, value in found]

    def seconds(self) -> float | None:
        """Return the time from the first event to the last; None where that is not known."""
        times = [time for event in self.events if (time := _time(event["time"])) is not None]
        return (times[-1] - times[0]).total_seconds() if len(times) > 1 else None


def read_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """Return the runs in some folders, with names that differ.

    Raises:
        DataError: a folder holds no run, or a file of it cannot be read.
    """
    runs = [_Folder(local_path(path)).run() for path in paths]
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(run.directory)) for run in runs]
    return runs


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path

    def run(self) -> RunRecord:
        if not self.path.is_dir():
            raise DataError(f"{self.path} is no folder, and a run is one", hint="name the --output-dir of a run")
        steps = [
            dataclasses.asdict(step) for step in self._read("metrics.jsonl", lambda path: list(read_metrics(path)))
        ]
        steps = steps or self._logged()
        events = self._read(JOURNAL_NAME, lambda path: list(read_journal(path)))
        if not steps and not events:
            raise DataError(
                f"{self.path} holds no run: neither metrics.jsonl, as `fullshard train` writes it, nor a "
                f"{_TRAINER_STATE} with losses",
                hint="name the --output-dir of a run",
            )
        return RunRecord(
            name=self.path.absolute().name,
            directory=self.path,
            steps=steps,
            plan=self._json("plan.json", PlanRecord),
            settings=self._json("settings.json", dict[str, SettingRecord]) or {},
            environment=self._json("environment.json", Environment),
            events=events,
            checkpoints=[_checkpoint(path) for path in sorted(self._checkpoints(), key=_numbers)],
        )

    def _read(self, name: str, read: Callable[[Path], Kind]) -> Kind:
        """Return a file of the folder. `DataError` if its path leads out of the folder or it cannot be read."""
        path = self.path / name
        try:
            if os.path.lexists(path) and not path.resolve().is_relative_to(self.path.resolve()):
                raise OSError("it is a link that leads out of the run's folder")
            return read(path)
        except (OSError, RuntimeError) as error:  # the latter of links that go round
            reason = getattr(error, "strerror", None) or error
            raise DataError(
                f"{path} cannot be read: {reason}", hint="move it away, and the report leaves it out"
            ) from None

    def _json(self, name: str, kind: type[Kind]) -> Kind | None:
        """Return the contents of a JSON file; None where there is none, or an empty object."""
        path = self.path / name
        try:
            found = self._read(name, lambda path: read_object(path, limit_nbytes=_MOST_NBYTES) if path.exists() else {})
            return TypeAdapter(kind).validate_python(found) if found else None
        except ValidationError as error:
            wrong = error.errors()[0]
            where, got = ".".join(map(str, wrong["loc"])), _cut(str(wrong["input"]), 60)
            raise DataError(
                f"{path}: {_cut(where)}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}, got {got}",
                hint=f"another program may have written it; {_LEFT_OUT}",
            ) from None
        except (ValueError, RecursionError) as error:
            hint = f"a kill may have cut it off; {_LEFT_OUT}"
            raise DataError(f"{path} is not valid JSON: {error}", hint=hint) from None

    def _logged(self) -> list[dict[str, Any]]:
        """Return the steps that Trainer has noted last. Of a file that a kill has cut off: the one before."""
        inside = sorted(self._linkless("checkpoint-*"), key=_numbers, reverse=True)
        cut_off = None
        for name in (_TRAINER_STATE, *(f"{path.name}/{_TRAINER_STATE}" for path in inside)):
            try:
                if state := self._json(name, _TrainerState):
                    return [one.model_dump() for one in state.log_history if one.loss is not None]
            except DataError as error:
                cut_off = cut_off or error
        if cut_off is not None:
            raise cut_off
        return []

    def _linkless(self, pattern: str) -> list[Path]:
        return [path for path in self.path.glob(pattern) if path.is_dir() and not path.is_symlink()]

    def _checkpoints(self) -> list[Path]:
        inside = [*self.path.glob("checkpoint-*")]
        if not (self.path / "checkpoints").is_symlink():
            inside += self.path.glob("checkpoints/step-*")
        return [path for path in inside if path.is_dir() or path.is_symlink()]


def _checkpoint(path: Path) -> Checkpoint:
    """Return the size of a checkpoint. Links are neither followed nor counted."""
    sizes = []
    for file in () if path.is_symlink() else islice(path.rglob("*"), _MOST_FILES):
        with contextlib.suppress(OSError):  # a run that goes on has removed it
            if stat.S_ISREG((status := file.lstat()).st_mode):
                sizes.append(status.st_size)
    return Checkpoint(path.name, len(sizes), sum(sizes), path.is_symlink())


def _numbers(path: Path) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall(r"[0-9]{1,18}", path.name)], path.name


def _time(text: object) -> datetime | None:
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _cut(text: str, length: int = 300) -> str:
    return text if len(text) <= length else f"{text[:length]} ..."
