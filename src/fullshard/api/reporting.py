"""Trackers and profiles, as the Accelerator offers them: Accelerate's trackers, and torch's profiler."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import tracking
from accelerate.utils import ProfileKwargs

from fullshard.api.checkpointing import Checkpointing
from fullshard.checkpoint.ranks import Ranks
from fullshard.config.settings import suggestion
from fullshard.config.trackers import require_trackers
from fullshard.core.errors import ConfigError
from fullshard.core.paths import local_path
from fullshard.observe.traces import add_rows, marked, merge_traces


class Reporting(Checkpointing):
    """The part of the Accelerator that reports on a run."""

    log_with: list[Any]
    trackers: list[Any]

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start the trackers that `log_with` names, on the main process.

        Args:
            project_name: the name of the run.
            config: the run's data that the trackers keep.
            init_kwargs: per tracker's name, further arguments for it.

        Raises:
            ConfigError: `init_kwargs` names a tracker that there is not.
        """
        if self.log_with:
            _check_names(init_kwargs or {}, self.log_with)
        if not self.is_main_process:
            return
        self.trackers = []  # those of a run before this one are finished
        for tracker in self.log_with:
            if not hasattr(tracker, "start"):
                name = str(tracker)
                kind = tracking.LOGGER_TYPE_TO_CLASS[name]
                place = (self.logging_dir,) if kind.requires_logging_directory else ()
                tracker = kind(project_name, *place, **(init_kwargs or {}).get(name, {}))
            tracker.start()
            self.trackers.append(tracker)
            if config is not None:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker that was started; on processes other than the main one, one that does nothing.

        Args:
            name: its name, such as `tensorboard`.
            unwrap: give the object of the library behind it.

        Raises:
            ConfigError: none of this name was started.
        """
        if not self.is_main_process:
            return tracking.GeneralTracker(_blank=True)
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names = ", ".join(tracker.name for tracker in self.trackers) or "none"
        raise ConfigError(f"no tracker {name!r} was started; started: {names}", hint="init_trackers starts them")

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Log values with all trackers, on the main process.

        Args:
            values: numbers and strings by name.
            step: the step they belong to.
            log_kwargs: per tracker's name, further arguments for it.
        """
        if self.log_with and not self.trackers and self.is_main_process:
            names = ", ".join(map(_tracker_name, self.log_with))
            warnings.warn(f"log: {names} has not been started: call init_trackers first", stacklevel=2)
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    @contextlib.contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[torch.profiler.profile]:
        """Profile the block, on every rank. The engine's events are rows of the traces, with a range per unit.

        Args:
            profile_handler: `ProfileKwargs`; default: the one in `kwargs_handlers`. With
                its `output_trace_dir` every rank leaves a trace `profile_{rank}.json` there, and rank 0 one of all
                ranks whose traces it finds there, `trace.json`.

        Raises:
            ConfigError: an activity, a schedule or a directory that cannot be had.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        directory = None if handler.output_trace_dir is None else _trace_directory(handler.output_trace_dir)
        with marked(self._models), _profiler(handler) as profiler:
            yield profiler
        if directory is not None:
            self._write_traces(profiler, directory)

    def _write_traces(self, profiler: torch.profiler.profile, directory: Path) -> None:
        traces = [directory / f"profile_{rank}.json" for rank in range(self.num_processes)]
        own = traces[self.process_index]

        def write() -> None:
            own.unlink(missing_ok=True)  # of an earlier profile
            try:
                profiler.export_chrome_trace(str(own))
            except AssertionError:  # torch's way to say so; it must not cost the training done meanwhile
                steps = f"the schedule had not come to its active steps after {profiler.step_num} calls of step()"
                warnings.warn(f"profile: nothing was recorded, and no trace is written: {steps}", stacklevel=6)
            else:
                add_rows(own)

        def merge() -> None:
            if found := [path for path in traces if path.is_file()]:
                merge_traces(found, directory / "trace.json")

        ranks = Ranks()
        ranks.together("writing the traces of a profile", write)
        ranks.on_rank_0("merging the traces of a profile", merge)

    def _finish_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []


def wanted_trackers(log_with: Any, logging_dir: str | None) -> list[Any]:
    """Return the trackers in `log_with`, as names and tracker objects.

    Raises:
        ConfigError: one that is unknown, whose package is not installed, or that has no directory to write to.
    """
    if log_with is None:
        return []
    given = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    try:
        found: list[Any] = tracking.filter_trackers(given, logging_dir)
    except ValueError as error:
        raise ConfigError(f"log_with: {error}") from error
    # Theirs silently leaves out trackers that are not installed.
    missing = {str(tracker) for tracker in given} - {"all", *map(str, found)}
    require_trackers(sorted(missing), "log_with")
    if missing:
        raise ConfigError(f"log_with: {', '.join(sorted(missing))} cannot be used here, says Accelerate")
    return found


def _tracker_name(tracker: Any) -> str:
    return str(tracker.name if hasattr(tracker, "start") else tracker)


def _check_names(named: Mapping[str, Any], started: Iterable[Any]) -> None:
    """Check that `init_kwargs` is for trackers that there are; those of other runs may be among them."""
    known = {*tracking.LOGGER_TYPE_TO_CLASS, *map(_tracker_name, started)}
    for name in named.keys() - known:
        raise ConfigError(f"init_kwargs: no tracker is called {name!r}", hint=suggestion(name, sorted(known)))


def _trace_directory(text: str) -> Path:
    """Return the directory, made before anything is profiled."""
    directory = local_path(text)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_trace_dir: cannot make {directory}: {error.strerror}") from None
    return directory


def _profiler(handler: Any) -> torch.profiler.profile:
    try:
        profiler: torch.profiler.profile = handler.build()
    except (ValueError, TypeError, AssertionError) as error:
        options = f"activities = {handler.activities}, schedule_option = {handler.schedule_option}"
        raise ConfigError(
            f"profile: {options}: {error}", hint="as for torch.profiler, for example {'wait': 1}"
        ) from None
    return profiler
