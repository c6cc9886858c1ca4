"""The Accelerator's methods for Accelerate's trackers and for profiling with torch's profiler."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator as Theirs
from accelerate import tracking
from accelerate.utils import ProfileKwargs
from torch import nn

from fullshard.api.checkpointing import Checkpointing
from fullshard.api.configure import flat_settings
from fullshard.checkpoint.ranks import Ranks
from fullshard.config.settings import suggestion
from fullshard.config.trackers import require_trackers
from fullshard.core.errors import ConfigError, plural
from fullshard.core.journal import JOURNAL
from fullshard.core.paths import local_path
from fullshard.observe import JsonlSink, StepMetrics, memory_nbytes
from fullshard.observe.metrics import describe_run, run_facts
from fullshard.observe.traces import marked

_NAMES = {
    "loss": ("train_loss", "train/loss", "loss"),
    "held_out_loss": ("val_loss", "validation_loss", "eval_loss", "eval/loss"),
    "learning_rate": ("lr", "learning_rate"),
    "grad_norm": ("grad_norm",),
    "tokens_per_second": ("tokens_per_second",),
}
"""The names under which scripts log the metrics of a step. Later names win."""


class Reporting(Checkpointing):
    """The part of the Accelerator that logs metrics and profiles a run."""

    log_with: list[Any]
    trackers: list[Any]
    get_tracker = Theirs.get_tracker
    _sink: JsonlSink | None = None
    _tracked: dict[str, tuple[Any, Any]] | None = None

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, init_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Start the trackers that are named in `log_with`, on the main process. TensorBoard gets a flat `config`.

        Raises:
            ConfigError: `init_kwargs` has arguments for a tracker that is not in use.
        """
        known = {*tracking.LOGGER_TYPE_TO_CLASS, *map(_tracker_name, self.log_with)}
        for name in (init_kwargs or {}).keys() - known:
            raise ConfigError(f"init_kwargs: unknown tracker {name!r}", hint=suggestion(name, sorted(known)))
        self._tracked = {name: (value, None) for name, value in (config or {}).items()}
        Theirs.init_trackers(self, project_name, None, init_kwargs)
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(_flat(config) if tracker.name == "tensorboard" else config)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Log values with all trackers, on the main process. Warn if no tracker has been started.

        With a `project_dir`, also write the values that `fullshard watch` and `fullshard report` show.
        """
        if self.log_with and not self.trackers and self.is_main_process:
            names = ", ".join(map(_tracker_name, self.log_with))
            warnings.warn(f"log: {names} has not been started: call init_trackers first", stacklevel=2)
        Theirs.log(self, values, step, log_kwargs)
        number = JOURNAL.step if step is None else step
        if self.is_main_process and self.project_dir is not None and number is not None:
            self._record(local_path(self.project_dir), number, values)

    def _record(self, directory: Path, step: int, values: dict[str, Any]) -> None:
        """Write what is known about a step, as `fullshard train` does. Only this rank's memory is known."""
        given = {key: value for key, value in values.items() if isinstance(value, int | float | torch.Tensor)}
        known = {name: float(given[key]) for name, keys in _NAMES.items() for key in keys if key in given}
        if not known:
            return
        if self._sink is None:
            self._sink = JsonlSink(directory / "metrics.jsonl", last_step=step - 1)
            model = self._models[0] if self._models else nn.Module()
            why = "the script's batches are not known in advance"
            facts = run_facts(model, None, why, self.process.environment, self.device)
            facts |= {"resumed_after": step - 1, "measures_rank_0": True}
            describe_run(directory, (self._tracked or {}) | flat_settings(self._config), facts)
        if self._optimizers:
            known = {"learning_rate": float(self._optimizers[0].param_groups[0]["lr"])} | known
        self._sink.write(StepMetrics.known(step=step, memory_nbytes=(memory_nbytes(self.device),), **known))

    @contextlib.contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[torch.profiler.profile]:
        """Profile the block on every rank. The traces also show the engine's events.

        Args:
            profile_handler: `ProfileKwargs`. Default: the one in `kwargs_handlers`. If its `output_trace_dir` is set,
                every rank writes a trace `profile_{rank}.json` to that directory.

        Raises:
            ConfigError: an activity, a schedule or a directory is invalid.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        directory = None if handler.output_trace_dir is None else _trace_directory(handler.output_trace_dir)
        with marked(self._models), _profiler(handler) as profiler:
            yield profiler
        if directory is not None:
            self._write_traces(profiler, directory)

    def _write_traces(self, profiler: torch.profiler.profile, directory: Path) -> None:
        own = directory / f"profile_{self.process_index}.json"

        def write() -> None:
            own.unlink(missing_ok=True)  # from an earlier profile
            try:
                profiler.export_chrome_trace(str(own))
            except AssertionError:  # torch raises it if nothing was recorded; training must continue
                steps = f"the schedule reached no active step in {plural(profiler.step_num, 'call')} to step()"
                warnings.warn(f"profile: nothing was recorded, and no trace is written: {steps}", stacklevel=6)

        Ranks().together("writing the traces of a profile", write)


def wanted_trackers(log_with: Any, logging_dir: str | None) -> list[Any]:
    """Return the requested trackers, as names or tracker objects. Raise `ConfigError` if one cannot be used."""
    if log_with is None:
        return []
    given = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    try:
        found: list[Any] = tracking.filter_trackers(given, logging_dir)
    except ValueError as error:
        raise ConfigError(f"log_with: {error}") from error
    # Accelerate silently skips trackers that are not installed.
    missing = {str(tracker) for tracker in given} - {"all", *map(str, found)}
    require_trackers(sorted(missing), "log_with")
    if missing:
        raise ConfigError(f"log_with: Accelerate reports that {', '.join(sorted(missing))} cannot be used here")
    return found


def _flat(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings as one level, as in `{"adam.lr": 0.1}`, with text in place of lists and objects."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        is_plain = value is None or isinstance(value, int | float | str | torch.Tensor)
        own = {f"{above}{name}": value if is_plain else str(value)}
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else own
    return found


def _tracker_name(tracker: Any) -> str:
    return str(tracker.name if hasattr(tracker, "start") else tracker)


def _trace_directory(text: str) -> Path:
    """Create the trace directory before profiling starts, and return it."""
    directory = local_path(text)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_trace_dir: the directory {directory} cannot be created: {error.strerror}") from None
    return directory


def _profiler(handler: Any) -> torch.profiler.profile:
    try:
        profiler: torch.profiler.profile = handler.build()
    except (ValueError, TypeError, AssertionError) as error:
        options = f"activities = {handler.activities}, schedule_option = {handler.schedule_option}"
        raise ConfigError(
            f"profile: {options}: {error}", hint="use options of torch.profiler, for example {'wait': 1}"
        ) from None
    return profiler
