"""Read the folders of runs for a report.

Other programs write files with the same names, and killed runs leave incomplete files. Therefore files are read with
size limits and validated, paths that lead out of the folder are refused, and every fault raises a `DataError`.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from fullshard.core.errors import DataError, plural, shortened
from fullshard.core.files import MIB, read_lines, read_object
from fullshard.core.journal import JOURNAL_NAME, read_journal
from fullshard.core.paths import local_path
from fullshard.observe.metrics import read_metrics

_TRAINER_STATE = "trainer_state.json"
_LEFT_OUT = "move it away to exclude it from the report"
_MOST_NBYTES = 256 * MIB
_LARGEST = 1e100
"""Larger values are not drawn, like those that are not finite."""

Kind = TypeVar("Kind")


class _Logged(BaseModel):
    """One entry in the log history of Transformers' Trainer."""

    step: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    held_out_loss: float | None = Field(None, alias="eval_loss")
    epoch: float | None = None


class _TrainerState(BaseModel):
    log_history: list[_Logged] = []


class _Rehearsal(BaseModel):
    """The answer of `fullshard rehearse --json`, as far as it is drawn."""

    phases: dict[str, dict[Literal["allocated", "reserved", "planned"], int | None]]
    memory: int
    step_seconds: float | None = None
    exposed_seconds: float | None = None


_Nbytes = Annotated[int, Field(ge=0, lt=2**60)]


class _Environment(BaseModel, extra="allow"):
    total_steps: int | None = None
    steps_per_pass: float | None = Field(None, gt=0)  # over the data
    measures_rank_0: bool = False  # only, not all ranks
    limit_nbytes: _Nbytes | None = None  # the memory that a rank may use
    planned_nbytes: _Nbytes | None = None  # counts the same as `StepMetrics.memory_nbytes`
    unplanned: str = "the run did not record it"
    before_model_nbytes: _Nbytes = 0  # the part of `planned_nbytes` that the process used before it built the model
    resumed_after: _Nbytes = 0  # the other fields describe the attempt that began after this step
    reserve_nbytes: _Nbytes = 0  # what the planner adds for the runtime and unused blocks of the allocator


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Holds the metrics of one run, from `metrics.jsonl` or Trainer's log, and the contents of its other files."""

    name: str
    directory: Path
    steps: list[dict[str, Any]]
    settings: dict[str, dict[str, Any]]
    environment: dict[str, Any]
    recorded: _Environment
    sample: str
    events: list[dict[str, Any]]
    rehearsal: _Rehearsal | None

    def series(self, name: str, after: int = -1) -> tuple[list[float], list[float]]:
        """Return the later steps that have a value for `name`, and the values: the largest if each rank has one."""
        found = []
        for step in self.steps:
            value = step.get(name)
            value = max(value, default=None) if isinstance(value, tuple) else value
            if value is not None and abs(value) < _LARGEST and after < step["step"] < _LARGEST:
                found.append((float(step["step"]), float(value)))
        return [step for step, _ in found], [value for _, value in found]

    @property
    def written(self) -> float:
        """Return when the run wrote a file, or its launcher sent a heartbeat, in seconds since the epoch."""
        files = (self.directory / name for name in ("metrics.jsonl", JOURNAL_NAME))
        return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)

    @property
    def resumed(self) -> list[int]:
        """Return the steps after which attempts began, from the names of the checkpoints that they loaded."""
        loads = [event for event in self.events if event["kind"] == "load" and event.get("optimizer")]
        found = {step for load in loads for step in _numbers(Path(str(load.get("path"))))[0][:1]}
        return sorted(step for step in found if step <= self.recorded.resumed_after)  # the run repeated later ones

    @property
    def outcome(self) -> Literal["done", "failed", "stopped", "unknown"]:
        """Return how the last start of the run ended. It is unknown if the run may still continue."""
        last = self.events[-1] if self.events else {"kind": ""}
        if last["kind"] == "end":
            return "done"
        if self.failure is not None:
            return "failed"
        is_saving = "asked to save" in str(last.get("message"))  # another event follows
        return "stopped" if last["kind"] == "preemption" and not is_saving else "unknown"

    @property
    def is_saved(self) -> bool:
        """Return whether the last event says that the run saved and stopped because of a signal."""
        return str(self.events[-1].get("message")).startswith("saved and stopped") if self.events else False

    @property
    def failure(self) -> dict[str, Any] | None:
        """Return the first failure since the last start, or None."""
        return next((event for event in self.events[self.begun :] if event["kind"] == "failure"), None)

    @property
    def begun(self) -> int:
        """Return the number of events before the last start."""
        kinds = enumerate(event["kind"] for event in self.events)
        return max((number for number, kind in kinds if kind in ("start", "restart")), default=0)

    @property
    def state(self) -> str:
        """Return a short text that says whether the run is done, has failed or was stopped, and after which step."""
        last, failure = self.steps[-1]["step"] if self.steps else 0, self.failure or {}
        after, count = (f" after step {last}", plural(last, "step")) if self.steps else ("", "unknown step")
        how = f"rank {failure.get('rank')}: {failure.get('how', '')}"
        told = str(failure.get("message") or how) if failure else str((self.events or [{}])[-1].get("message", ""))
        why = "" if self.is_saved else told.partition("\n")[0]
        further = "; the record does not show whether the run continues" if self.events else ""
        return {
            "done": f"done, {count}",
            "failed": f"failed{after}: {why}",
            "stopped": f"stopped by a signal{after}{why and f': {why}'}",
            "unknown": f"{count}{further}",
        }[self.outcome]


def read_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """Read the runs in some folders, and give each run a distinct name."""
    runs = [_run(local_path(path)) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(run.directory)) for run in runs]
    return runs


def _run(folder: Path) -> RunRecord:
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a directory, so it is not the output directory of a run",
            hint="pass the --output-dir of a run",
        )
    metrics = _read(folder / "metrics.jsonl", folder, lambda path: list(read_metrics(path)))
    steps = [dataclasses.asdict(step) for step in metrics] or _logged(folder)
    events = _read(folder / JOURNAL_NAME, folder, lambda path: list(read_journal(path)))
    recorded = _json(folder / "environment.json", folder, _Environment) or _Environment()
    rehearsal = _json(folder / "rehearsal.json", folder, _Rehearsal)
    if not steps and not events and rehearsal is None:
        raise DataError(
            f"{folder} does not contain a run: there is no metrics.jsonl, no {JOURNAL_NAME} and no "
            f"{_TRAINER_STATE} with losses",
            hint="pass the --output-dir of a run",
        )
    return RunRecord(
        name=folder.absolute().name,
        directory=folder,
        steps=steps,
        settings=_json(folder / "settings.json", folder, dict[str, dict[str, Any]]) or {},
        environment=recorded.model_extra or {},
        recorded=recorded,
        sample=_read(folder / "sample.txt", folder, _beginning),
        events=events,
        rehearsal=rehearsal,
    )


def _read(path: Path, folder: Path, read: Callable[[Path], Kind]) -> Kind:
    """Read a file in a run's folder. Raise `DataError` if its path leads out of the folder or it cannot be read."""
    try:
        if os.path.lexists(path) and not path.resolve().is_relative_to(folder.resolve()):
            raise OSError("it is a link that points outside the run's directory")
        return read(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", hint=_LEFT_OUT) from None


def _json(path: Path, folder: Path, kind: type[Kind]) -> Kind | None:
    """Return the contents of a JSON file. Return None if the file does not exist or contains an empty object."""
    try:
        found = _read(path, folder, lambda path: read_object(path, limit_nbytes=_MOST_NBYTES) if path.exists() else {})
        return TypeAdapter(kind).validate_python(found) if found else None
    except ValidationError as error:
        wrong = error.errors()[0]
        where, got = shortened(".".join(map(str, wrong["loc"])), 300), shortened(str(wrong["input"]), 60)
        raise DataError(
            f"{path}: {where}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}, got {got}",
            hint=f"another program may have written it; {_LEFT_OUT}",
        ) from None
    except (ValueError, RecursionError) as error:
        hint = f"a killed process may have left it incomplete; {_LEFT_OUT}"
        raise DataError(f"{path} is not valid JSON: {error}", hint=hint) from None


def _logged(folder: Path) -> list[dict[str, Any]]:
    """Return the steps in Trainer's newest readable state file, or raise the error for the newest file."""
    inside = [path for path in folder.glob("checkpoint-*") if path.is_dir() and not path.is_symlink()]
    cut_off = None  # the error for the newest file, which a killed run may have left incomplete
    for place in (folder, *sorted(inside, key=_numbers, reverse=True)):
        try:
            if state := _json(place / _TRAINER_STATE, folder, _TrainerState):
                return [one.model_dump() for one in state.log_history if {one.loss, one.held_out_loss} != {None}]
        except DataError as error:
            cut_off = cut_off or error
    if cut_off is not None:
        raise cut_off
    return []


def _beginning(path: Path) -> str:
    return "".join(islice(read_lines(path), 100)) if path.exists() else ""


def _numbers(path: Path) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall(r"[0-9]{1,18}", path.name)], path.name
