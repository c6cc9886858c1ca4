"""Trackers and profiles, as the Accelerator offers them: Accelerate's trackers, and torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.api.checkpointing import Checkpointing
from fullshard.api.options import ProfileKwargs
from fullshard.config.trackers import require_trackers
from fullshard.core.errors import ConfigError
from fullshard.core.imports import import_extra
from fullshard.observe import add_rows, marked, merge_traces


class Reporting(Checkpointing):
    """The part of the Accelerator that tells others what a run does."""

    log_with: list[Any]
    trackers: list[Any]

    @property
    def profile_handler(self) -> Any:
        """What `kwargs_handlers` says of `profile()`; None if nothing."""
        return self.handlers.given.get("ProfileKwargs")

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start what `log_with` names, on the main process.

        Args:
            project_name: the name of the run.
            config: what the trackers keep about it.
            init_kwargs: per tracker's name, further arguments for it.
        """
        if not self.is_main_process:
            return
        for wanted in self.log_with:
            tracker = wanted
            if not hasattr(wanted, "start"):  # a name
                kind, further = (
                    _accelerates().LOGGER_TYPE_TO_CLASS[str(wanted)],
                    (init_kwargs or {}).get(str(wanted), {}),
                )
                place = (self.logging_dir,) if kind.requires_logging_directory else ()
                tracker = kind(project_name, *place, **further)
            tracker.start()
            self.trackers.append(tracker)
            if config is not None:
                tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker that was started; on other processes than the main one, one that does nothing.

        Args:
            name: its name, such as `tensorboard`.
            unwrap: give the object of the library behind it.

        Raises:
            ConfigError: none of this name was started.
        """
        if not self.is_main_process:
            return _accelerates().GeneralTracker(_blank=True)
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        names = ", ".join(tracker.name for tracker in self.trackers) or "none"
        raise ConfigError(f"no tracker {name!r} was started; started: {names}", hint="init_trackers starts them")

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Hand values to all trackers, on the main process.

        Args:
            values: numbers and strings by name.
            step: the step they belong to.
            log_kwargs: per tracker's name, further arguments for it.
        """
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    @contextlib.contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[torch.profiler.profile]:
        """Profile what is inside, on every rank. The engine's events are rows of the traces, with a range per unit.

        Args:
            profile_handler: `ProfileKwargs`, Accelerate's or fullshard's; default: the one in `kwargs_handlers`. With
                its `output_trace_dir` every rank leaves a trace `profile_{rank}.json` there, and rank 0 one of all
                ranks whose traces it finds there, `trace.json`.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with marked(self._models), _profiler(handler) as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            directory = Path(handler.output_trace_dir)
            directory.mkdir(parents=True, exist_ok=True)
            traces = [directory / f"profile_{rank}.json" for rank in range(self.num_processes)]
            own = traces[self.process_index]
            profiler.export_chrome_trace(str(own))
            add_rows(own)
            self.wait_for_everyone()
            if self.is_main_process:
                merge_traces([path for path in traces if path.is_file()], directory / "trace.json")

    def _finish_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.finish()


def wanted_trackers(log_with: Any, logging_dir: str | None) -> list[Any]:
    """What `log_with` names, as names and tracker objects.

    Raises:
        ConfigError: one that is unknown, whose package is not installed, or that has no directory to write to.
        MissingExtraError: Accelerate, whose trackers they are, is not installed.
    """
    if log_with is None:
        return []
    given = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    theirs = _accelerates()
    try:
        found: list[Any] = theirs.filter_trackers(given, logging_dir)
    except ValueError as error:
        raise ConfigError(f"log_with: {error}") from error
    # Theirs leaves out what is not installed, without a word.
    missing = {str(tracker) for tracker in given} - {"all", *map(str, found)}
    require_trackers(sorted(missing), "log_with")
    if missing:
        raise ConfigError(f"log_with: {', '.join(sorted(missing))} cannot be used here, says Accelerate")
    return found


def _accelerates() -> Any:
    return import_extra("accelerate.tracking", extra="track", purpose="log_with, whose trackers are Accelerate's")


def _profiler(handler: Any) -> torch.profiler.profile:
    activities = handler.activities and [
        getattr(torch.profiler.ProfilerActivity, a.upper()) for a in handler.activities
    ]
    return torch.profiler.profile(
        activities=activities,
        schedule=handler.schedule_option and torch.profiler.schedule(**handler.schedule_option),
        on_trace_ready=handler.on_trace_ready,
        record_shapes=handler.record_shapes,
        profile_memory=handler.profile_memory,
        with_stack=handler.with_stack,
        with_flops=handler.with_flops,
        with_modules=handler.with_modules,
    )
