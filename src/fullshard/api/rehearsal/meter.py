"""Measure the time and memory of an unchanged script's steps, and count the values that only other ranks know.

A step ends with a step of the optimizer. Calls of `backward` and of the optimizer separate the phases.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import threading
import time
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fullshard.api import torch_private
from fullshard.api.rehearsal import saves
from fullshard.api.rehearsal.group import unknown
from fullshard.api.rehearsal.lines import Links
from fullshard.api.rehearsal.planned import Batches, Planned, engine_of, read_job
from fullshard.core.errors import ConfigError, WrapError
from fullshard.core.imports import Replaced, replace
from fullshard.features.auto_reshard import entry_nbytes
from fullshard.plan.hardware import Cluster
from fullshard.plan.shapes import ModelShape

WARM_UP = 2
"""The steps that are not timed. The first creates the optimizer's state, and the engine learns the order of units."""

LOAD, FORWARD, BACKWARD, OPTIMIZER = "load and first forward", "forward", "backward", "optimizer"


class Meter:
    """Measures the script that this process runs from now on.

    Every second step after the warm-up runs with free links. What that saves is the exposed communication.
    """

    def __init__(self, links: Links, steps: int | None, cluster: Cluster) -> None:
        self._links, self._last, self._cluster, self._always_free = links, steps, cluster, links.is_free
        self._steps = Counter[int]()  # by optimizer
        self._reads = Counter[int](), Counter[int](), Counter[int]()  # tokens, sequences and calls, by embedding
        self._job: str | tuple[ModelShape, dict[str, Any]] = "the script has taken no step"  # or its job
        self._engine: str | None = None
        self._ends: list[tuple[Any, bool]] = []  # when each step ended, and whether its links were free
        self._phase, self._depth = LOAD, 0
        self._peaks: dict[str, list[int]] = {}  # allocated and reserved bytes, by phase
        self._top = [0, 0]  # of the whole script
        self._waited: float | None = None  # seconds for batches
        self._before = _of_process("VmRSS")
        _forget_peak()
        register_optimizer_step_pre_hook(lambda *_: self._turn(OPTIMIZER))
        register_optimizer_step_post_hook(self._end_step)
        self._backward, self._embed = Replaced.of(torch.autograd, "backward"), Replaced.of(nn.Embedding, "forward")
        torch_private.next_batch.owner.__next__ = lambda batches: self._read(batches)
        # A plain function, because a bound method of this class would not become one of `nn.Embedding`.
        replace({self._backward: self._run_backward, self._embed: lambda *given: self._run_embedding(*given)})

    def _turn(self, phase: str) -> None:
        """Begin a phase, and note the peak of the one that ends.

        Peaks start anew in each phase, but only after the steps in which the engine itself reads them.
        """
        peak, is_anew = _peak(self._before), len(self._ends) > WARM_UP
        self._top = [*map(max, self._top, peak)]
        if is_anew or self._phase == LOAD:
            self._peaks[self._phase] = [*map(max, self._peaks.get(self._phase, (0, 0)), peak)]
        if is_anew:
            _forget_peak()
        self._phase = phase

    def _run_backward(self, *given: Any, **named: Any) -> None:
        if not self._depth:
            self._turn(BACKWARD)
        self._depth += 1
        try:
            self._backward.torchs(*given, **named)
        finally:
            self._depth -= 1
        if not self._depth:
            self._turn(FORWARD)

    def _run_embedding(self, module: nn.Module, given: torch.Tensor) -> Any:
        if module.training and not self._depth and not torch.compiler.is_compiling():
            numbers = given.numel(), len(given) if given.ndim > 1 else 1, 1
            for counter, number in zip(self._reads, numbers, strict=True):
                counter[id(module)] += number
        return self._embed.torchs(module, given)

    def _read(self, batches: Any) -> Any:
        begin = time.perf_counter()
        try:
            return torch_private.next_batch.torchs(batches)
        finally:
            if threading.current_thread() is threading.main_thread():
                self._waited = (self._waited or 0.0) + time.perf_counter() - begin

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._turn(FORWARD)
        self._steps[id(optimizer)] += 1
        if (count := max(self._steps.values())) <= len(self._ends):  # another optimizer of the same step
            return
        self._ends.append((_now(), self._links.is_free))
        if count == 1:
            self._look_at(optimizer)
        self._links.is_free = self._always_free or (count >= WARM_UP and (count - WARM_UP) % 2 == 1)
        if count == WARM_UP:
            for counter in self._reads:
                counter.clear()
            self._waited = None
        if count == WARM_UP + 1:
            _forget_peak()
        if count == self._last:
            sys.exit(0)  # the script's handlers and `finally` blocks run

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Find out what the script trains, and with whose engine."""
        self._engine = engine_of(optimizer)
        try:
            self._job = read_job(optimizer)
        except (ConfigError, WrapError) as error:
            self._job = str(error).partition("\n")[0]

    def _plan(self, batches: Batches) -> Planned | str:
        """Return the plan of the script's job, or why there is none."""
        if isinstance(self._job, str):
            return self._job
        try:
            shape, settings = self._job
            return Planned(shape, settings, batches, self._cluster)
        except ConfigError as error:
            return str(error).partition("\n")[0]

    def answer(self) -> dict[str, Any]:
        """Return what was measured, as values for JSON. Times are None if too few steps have ended."""
        self._turn(FORWARD)
        spans: dict[bool, list[float]] = {False: [], True: []}
        for (before, _), (end, is_free) in itertools.pairwise(self._ends[WARM_UP - 1 :]):
            spans[is_free].append(_seconds_between(before, end))
        linked, free = (statistics.median(spans[kind]) if spans[kind] else None for kind in (False, True))
        step = free if self._always_free else linked
        timed = max(1, len(self._ends) - WARM_UP)
        busiest = max(self._reads[0].items(), key=itemgetter(1), default=(0, 0))[0]
        read, sequences, calls = (counter[busiest] for counter in self._reads)
        tokens = read / timed
        plan = self._plan(Batches.of(read, sequences, calls, timed)) if read else "the script embeds no tokens"
        peaks = {} if isinstance(plan, str) else plan.peaks
        allocated, reserved = self._top
        needed, memory = reserved + self._cluster.device.framework, self._cluster.device.memory
        return {
            "steps": len(self._ends),
            "step_seconds": step,
            "exposed_seconds": None if linked is None or free is None else max(0.0, linked - free),
            "data_seconds": None if step is None or self._waited is None else self._waited / timed,
            "tokens_per_second": tokens / step if step and tokens else None,
            "phases": {
                phase: {"allocated": peak[0], "reserved": peak[1], "planned": peaks.get(phase)}
                for phase, peak in self._peaks.items()
            },
            "planned": None if isinstance(plan, str) else plan.plan.memory.needed,
            "unplanned": plan if isinstance(plan, str) else None,
            "engine": self._engine,
            "peak_allocated": allocated,
            "peak_reserved": reserved,
            "needed": needed,
            "memory": memory,
            "fits": needed <= memory,
            "is_on_gpu": torch.accelerator.is_available(),
            "saves": saves.done,
            "unknown": dict(unknown),
        }


def _now() -> Any:
    if not torch.accelerator.is_available():
        return time.perf_counter()
    event = torch.Event(torch.accelerator.current_accelerator(), enable_timing=True)
    return torch.accelerator.current_stream().record_event(event)


def _seconds_between(begin: Any, end: Any) -> float:
    if isinstance(end, float):
        return end - float(begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _peak(before: int) -> tuple[int, int]:
    """Return the peak of the allocated and of the reserved bytes. On a CPU, both are what the process has grown by."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()
    return (max(0, _of_process("VmHWM") - before),) * 2


def _forget_peak() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _of_process(name: str) -> int:
    return entry_nbytes(Path("/proc/self/status").read_text(encoding="utf-8"), name)
