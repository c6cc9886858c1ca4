"""Measure the time and memory of an unchanged script's steps, and count the values that only other ranks know.

A step ends with a step of the optimizer. Calls of `backward` and of the optimizer separate the phases.
"""

import itertools
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from fullshard.api import torch_private
from fullshard.api.rehearsal import saves
from fullshard.api.rehearsal.group import unknown
from fullshard.api.rehearsal.lines import Links, waits
from fullshard.api.rehearsal.planned import device_at_hand, engine_of, peaks_of, plan_of, read_job, seconds_of
from fullshard.core.errors import ConfigError
from fullshard.core.imports import Replaced, replace
from fullshard.engine.precision import dtype_name
from fullshard.features.auto_reshard import entry_nbytes
from fullshard.plan.hardware import Cluster, find_device
from fullshard.plan.work import step_flops

WARM_UP = 2
"""The steps that are not timed. The first creates the optimizer's state, and the engine learns the order of units."""

FREE = (False,) * 3 + (True,) * 6 + (False,) * 3
"""Whether links are free in steps after the warm-up. Both kinds thus have every second, third and fourth step."""

PAGE = 1024
"""The number of losses for which host memory is pinned at once, because that may stop the device for a moment."""

LOAD, FORWARD, BACKWARD, OPTIMIZER = "load and first forward", "forward", "backward", "optimizer"


class Meter:
    """Measures the script from now on. Half of the steps have free links, which shows the exposed communication."""

    def __init__(self, links: Links, steps: int | None, cluster: Cluster) -> None:
        self._links, self._last, self._cluster, self._always_free = links, steps, cluster, links.is_free
        self._steps = Counter[int]()  # by optimizer
        self._reads = Counter[int](), Counter[int](), Counter[int]()  # tokens, sequences and calls, by embedding
        self._job: Any = "the script has taken no step"  # or what `read_job` returns
        self._engine: str | None = None
        self._losses = list[torch.Tensor]()  # in pages on the host, or each would take device memory
        self._operations: FlopCounterMode | None = None
        self._dtype = ""  # in which the script computes
        self._ends: list[tuple[Any, bool]] = []  # when each step ended, and whether its links were free
        self._phase, self._depth = LOAD, 0
        self._peaks: dict[str, list[int]] = {}  # allocated and reserved bytes, by phase
        self._top = [0, 0]  # of the whole script
        self._waited: float | None = None  # seconds for batches
        self._waits = Counter[tuple[str, str]]()  # for messages, in the steps whose time is given
        self._before = _of_process("VmRSS")
        _forget_peak()
        register_optimizer_step_pre_hook(lambda *_: self._turn(OPTIMIZER))
        register_optimizer_step_post_hook(self._end_step)
        self._backward, self._embed = Replaced.of(torch.autograd, "backward"), Replaced.of(nn.Embedding, "forward")
        torch_private.next_batch.owner.__next__ = lambda batches: self._read(batches)
        # A plain function, because a bound method of this class would not become one of `nn.Embedding`.
        replace({self._backward: self._run_backward, self._embed: lambda *given: self._run_embedding(*given)})

    def _turn(self, phase: str) -> None:
        """Begin a phase, and note the peak of the last one, except in steps whose peaks the engine itself reads."""
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
        if given and isinstance(given[0], torch.Tensor) and given[0].numel() == 1:
            self._keep(given[0].detach())
        self._depth += 1
        try:
            self._backward.torchs(*given, **named)
        finally:
            self._depth -= 1
        if not self._depth:
            self._turn(FORWARD)

    def _keep(self, loss: torch.Tensor) -> None:
        """Copy the loss of a step to the host, which does not wait for it. The last one of a step remains."""
        page, place = divmod(len(self._ends), PAGE)
        while len(self._losses) <= page:
            self._losses.append(torch.full((PAGE,), torch.nan, pin_memory=torch.accelerator.is_available()))
        self._losses[page][place].copy_(loss.reshape(()), non_blocking=True)

    def _run_embedding(self, module: nn.Embedding, given: torch.Tensor) -> Any:
        if module.training and not self._depth and not torch.compiler.is_compiling():
            numbers = given.numel(), len(given) if given.ndim > 1 else 1, 1
            for counter, number in zip(self._reads, numbers, strict=True):
                counter[id(module)] += number
            kind, own = given.device.type, module.weight.dtype  # FSDP1 leaves no parameters
            is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
            self._dtype = dtype_name(torch.get_autocast_dtype(kind) if is_cast else own)
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
        self._ends.append((now(), self._links.is_free))
        if count > WARM_UP and self._links.is_free == self._always_free:
            self._waits.update(waits)
        waits.clear()
        if count == 1:
            self._engine = engine_of(optimizer)
            self._look_at(optimizer)
        self._links.is_free = self._always_free or (count >= WARM_UP and FREE[(count - WARM_UP) % len(FREE)])
        if count == WARM_UP:
            for counter in self._reads:
                counter.clear()
            self._waited = None
            if self._operations is not None:
                self._operations.__exit__(None, None, None)
        if count == WARM_UP + 1:
            _forget_peak()
        if count == self._last:
            sys.exit(0)  # the script's handlers and `finally` blocks run

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        """Find out what the script trains, and with which engine."""
        try:
            self._job = read_job(optimizer)
        except ConfigError as error:
            self._job = str(error).partition("\n")[0]
            self._operations = FlopCounterMode(display=False)
            self._operations.__enter__()

    def _beside(self, step: float | None, exposed: float | None, steps: int) -> dict[str, Any]:
        """Return the model's FLOP, and what the plan and the figures of the device at hand say of them."""
        busiest = max(self._reads[0].items(), key=itemgetter(1), default=(0, 0))[0]
        reads = [counter[busiest] for counter in self._reads]
        here, asked = device_at_hand(self._cluster), self._cluster.device
        flops: float = 0 if self._operations is None else self._operations.get_total_flops()
        dtype, peaks = self._dtype, dict[str, int]()
        found: dict[str, Any] = {"planned": None, "unplanned": None, "seconds_by_plan": None, "engine": self._engine}
        try:
            if isinstance(self._job, str):
                raise ConfigError(self._job)
            plan = plan_of(self._job, reads, steps, self._cluster)
            flops, dtype = step_flops(plan.setting.model, plan.job), plan.job.compute_dtype
            peaks, found["planned"] = peaks_of(plan), plan.memory.needed
            if here is not None and here != asked and step is not None and exposed is not None:
                found["seconds_by_plan"] = seconds_of(plan, step, exposed, here)
        except ConfigError as error:
            found["unplanned"] = str(error).partition("\n")[0]
        is_known = here not in (None, find_device("CPU")) and step and flops and dtype
        kinds = ("allocated", "reserved", "planned")
        return found | {
            "phases": {
                name: dict(zip(kinds, (*peak, peaks.get(name)), strict=True)) for name, peak in self._peaks.items()
            },
            "flops": flops,
            "mfu": flops / step / here.peak(dtype) if is_known else None,  # type: ignore[operator, union-attr]
            "is_asked_device": here == asked,
            "tokens_per_second": reads[0] / steps / step if step and reads[0] else None,
        }

    def answer(self) -> dict[str, Any]:
        """Return the measurements, as values for JSON. Times are None if too few steps have ended."""
        self._turn(FORWARD)
        pairs = itertools.pairwise(self._ends[WARM_UP - 1 :])
        spans = [(seconds_between(before, end), is_free) for (before, _), (end, is_free) in pairs]
        chosen = [span for span, is_free in spans if is_free == self._always_free]
        step, exposed = statistics.median(chosen) if chosen else None, exposed_seconds(spans)
        timed = max(1, len(self._ends) - WARM_UP)
        places: dict[str, dict[str, float]] = {}
        for (what, kind), total in self._waits.items():
            places.setdefault(what, {})[kind] = total / len(chosen)
        runtime = self._cluster.framework or self._before  # of a CPU, the process before the script
        needed, memory = self._top[1] + runtime, self._cluster.device.memory
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the losses may still be on their way
        return {
            "steps": len(self._ends),
            "step_seconds": step,
            "exposed_seconds": exposed,
            "waits": places,
            "data_seconds": None if step is None or self._waited is None else self._waited / timed,
            **self._beside(step, exposed, timed),
            "losses": torch.cat([*self._losses, torch.empty(0)])[: len(self._ends)].tolist(),
            "peak_allocated": self._top[0],
            "peak_reserved": self._top[1],
            "needed": needed,
            "runtime": runtime,
            "memory": memory,
            "fits": needed <= memory if self._ends else None,
            "is_on_gpu": torch.accelerator.is_available(),
            "saves": saves.done,
            "unknown": dict(unknown),
        }


def exposed_seconds(spans: Sequence[tuple[float, bool]]) -> float | None:
    """Return the median difference (Hodges and Lehmann 1963) between linked and free steps within rows of `FREE`."""
    rows = (spans[start : start + len(FREE)] for start in range(0, len(spans), len(FREE)))
    saved = [span - other for row in rows for span, is_free in row if not is_free for other, free in row if free]
    return max(0.0, statistics.median(saved)) if saved else None


def now() -> Any:
    """Return an event on the device's current stream, or without a device the seconds of the host's clock."""
    if not torch.accelerator.is_available():
        return time.perf_counter()
    event = torch.Event(torch.accelerator.current_accelerator(), enable_timing=True)
    return torch.accelerator.current_stream().record_event(event)


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two results of `now`, after the second has come."""
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
