"""What ranks allocate in a step, as torch's profiler sees it, and what the planner says that they do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from fullshard.features.offload.host import Host
from fullshard.plan.families import from_config
from fullshard.plan.hardware import DEVICES
from fullshard.plan.job import Job
from fullshard.plan.layout import ModelLayout, lay_out
from fullshard.plan.memory import Memory, memory_of
from fullshard.plan.methods import apply_method
from fullshard.plan.route import Route
from fullshard.plan.schedule import predict_step
from fullshard.plan.setting import PlanSetting

RANKS, TOKENS = 2, 64


def planned(config: dict[str, Any], job: Job) -> tuple[Memory, ModelLayout]:
    """Return what the planner says of a job on `RANKS` ranks of a CPU, without shared memory."""
    shape = apply_method(from_config(config, where="test")[0], job)
    layout = lay_out(shape, strategy=job.row, world_size=RANKS, dtypes=job.dtypes, offload=job.on_host)
    route = Route.of(RANKS, on_cpu=True, per_host=None)
    setting = PlanSetting(shape, layout, job, DEVICES["CPU"], on_host=job.on_host, route=route)
    return memory_of(predict_step(layout, job.schedule), setting, ranks_per_host=RANKS), layout


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(1, TOKENS + 1)[None]  # the row of token 0, for padding, is zeros
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def measured(make: Callable[[], tuple[Any, torch.optim.Optimizer]]) -> tuple[int, Any, torch.optim.Optimizer]:
    """Return the most live bytes of a third step, host memory left out, with the model and its optimizer."""
    with host_marked(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, optimizer = make()
        step(model, optimizer)
        step(model, optimizer)
        with record_function("measured"):
            step(model, optimizer)
        with record_function("after"):
            pass
    return peak_of(profiler), model, optimizer


@contextlib.contextmanager
def host_marked() -> Iterator[None]:
    empty: Any = Host.empty

    def marked(host: Host, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with record_function("host"):
            out: torch.Tensor = empty(host, numel, dtype)
            return out

    vars_of: Any = Host
    vars_of.empty = marked
    try:
        yield
    finally:
        vars_of.empty = empty


def peak_of(profiler: Any) -> int:
    """Return the most live bytes between the marks, host memory left out."""
    found: list[tuple[int, int, int, bool]] = []
    marks: dict[str, int] = {}

    def walk(event: Any, on_host: bool) -> None:
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, on_host))
        elif event.name in ("measured", "after"):
            marks[event.name] = event.start_time_ns
        for child in event.children:
            walk(child, on_host or event.name == "host")

    for event in profiler.profiler.kineto_results.experimental_event_tree():
        walk(event, False)
    live = most = 0
    there = set()
    for moment, place, nbytes, on_host in sorted(found):
        if on_host and nbytes > 0:
            there.add(place)
        elif nbytes < 0 and place in there:
            there.remove(place)
        else:
            live += nbytes
        if marks["measured"] <= moment < marks["after"]:
            most = max(most, live)
    return most
