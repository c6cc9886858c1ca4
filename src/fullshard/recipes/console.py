"""The messages and the metrics that rank 0 writes while a run goes on."""

from __future__ import annotations

import contextlib
import json
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fullshard.api import Accelerator
from fullshard.core.version import __version__
from fullshard.launch import RankEnvironment
from fullshard.launch.device import name_of
from fullshard.observe import (
    ConsoleSink,
    JsonlSink,
    MetricsSink,
    TensorboardSink,
    TrackerSink,
    write_text,
)
from fullshard.recipes.arguments import TrainArguments
from fullshard.recipes.planned import RunPlan


class Console:
    """The messages of rank 0; the other ranks say nothing.

    Attributes:
        sinks: where the steps of this run go, rank 0 only.
        plan: of the run, if the planner knows enough.
    """

    def __init__(self, environment: RankEnvironment) -> None:
        self._is_main = environment.is_main
        self._lines: ConsoleSink | None = None
        self._trackers: TrackerSink | None = None
        self.sinks: list[MetricsSink] = []
        self.plan: RunPlan | None = None

    def open(self, accelerator: Accelerator, arguments: TrainArguments) -> None:
        """Write down what the run is, now that it will go on, and start its trackers. On rank 0."""
        write_text(arguments.output_dir / "arguments.json", arguments.to_json())
        if self.plan is not None:
            write_text(arguments.output_dir / "plan.json", json.dumps(self.plan.as_dict(), indent=2) + "\n")
        write_text(arguments.output_dir / "environment.json", json.dumps(_environment(accelerator), indent=2) + "\n")
        write_text(arguments.output_dir / "settings.json", json.dumps(_settings(arguments), indent=2) + "\n")
        # But TensorBoard, whose events are cut back wherever a run goes on from: a sink of its own.
        accelerator.init_trackers(
            arguments.output_dir.name,
            arguments.model_dump(mode="json"),
            {"wandb": {"dir": str(arguments.output_dir)}},
        )
        if accelerator.trackers:
            self._trackers = TrackerSink(accelerator.log)

    def start(self, arguments: TrainArguments, *, first_step: int) -> None:
        """Open the sinks of a run that continues after `first_step` steps."""
        if not self._is_main:
            return
        self.sinks.append(JsonlSink(metrics_path(arguments), last_step=first_step))
        if "tensorboard" in arguments.trackers:
            self.sinks.append(TensorboardSink(arguments.output_dir / "tensorboard", last_step=first_step))
        if self._trackers is not None:
            self.sinks.append(self._trackers)
        self._lines = ConsoleSink(total_steps=arguments.steps, every=arguments.log_every, first_step=first_step)
        self.sinks.append(self._lines)

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._lines is not None:
            self._lines.print(text)
        elif self._is_main:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def close(self) -> None:
        """Close the sinks."""
        for sink in self.sinks:
            sink.close()
        self.sinks, self._lines = [], None


@contextlib.contextmanager
def open_console(environment: RankEnvironment) -> Iterator[Console]:
    """Give a console, and close it at the end."""
    console = Console(environment)
    try:
        yield console
    finally:
        console.close()


def metrics_path(arguments: TrainArguments) -> Path:
    """Return the file with the numbers of every step."""
    return arguments.output_dir / "metrics.jsonl"


def _environment(accelerator: Accelerator) -> dict[str, Any]:
    """Return the environment of a run: versions, host, device, ranks."""
    device = accelerator.device
    return {
        "fullshard": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "device": name_of(device),
        "ranks": accelerator.num_processes,
    }


def _settings(arguments: TrainArguments) -> dict[str, Any]:
    """Return every flag with its value, and whether it is the default."""
    values = arguments.model_dump(mode="json")
    return {
        TrainArguments.spelled(name): {
            "value": values[name],
            "origin": "default" if getattr(arguments, name) == field.default else "given",
        }
        for name, field in TrainArguments.model_fields.items()
    }
