"""Stages of torch's pipeline schedules that are sharded over the other axis of a mesh, against one process.

pytest tests/engine/test_pipeline.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining._backward import stage_backward_input

from fullshard.core.errors import LifecycleError
from fullshard.core.events import Event, EventKind
from fullshard.engine.unit_parameters import UnitState
from fullshard.features import fully_shard, units_of
from tests.distributed import end_workers, preload, run_ranks

preload("torch.distributed.pipelining")

WIDTH, LAYERS, MICRO_BATCHES = 8, 8, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


class Pipeline:
    """Stages on two ranks, `chunks` on each, every one sharded over two."""

    def __init__(self, schedule: Any, *, chunks: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        self.mesh = mesh
        torch.manual_seed(0)
        whole = nn.Sequential(*(Layer() for _ in range(LAYERS))).double()
        self.reference = copy.deepcopy(whole)
        size = LAYERS // (2 * chunks)
        self.parts: list[tuple[slice, nn.Module]] = []
        stages = []
        for number in range(mesh["pp"].get_local_rank(), 2 * chunks, 2):
            place = slice(number * size, (number + 1) * size)
            part = nn.Sequential(*list(whole)[place])
            for layer in part:
                fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
            fully_shard(part, mesh=mesh["dp"])
            self.parts.append((place, part))
            stages.append(PipelineStage(part, number, 2 * chunks, torch.device("cpu"), group=mesh["pp"].get_group()))
        stage: Any = stages if chunks > 1 else stages[0]
        self.schedule = schedule(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of, scale_grads=True)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Gradients of one step; every group of stages has a batch of its own."""
        own = self.mesh["dp"].get_local_rank()
        if self.mesh["pp"].get_local_rank() == 0:
            self.schedule.step(inputs[own])
        else:
            self.schedule.step(target=targets[own], losses=[])


def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 + step)
    shape = (2, 2 * MICRO_BATCHES, WIDTH)
    return torch.rand(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)


def check(name: str, chunks: int) -> None:
    schedules = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS)
    pipeline = Pipeline({s.__name__: s for s in schedules}[name], chunks=chunks)
    parameters = [p for _, part in pipeline.parts for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    reference_optimizer = torch.optim.AdamW(pipeline.reference.parameters(), lr=0.1)
    events: list[Event] = []
    for _, part in pipeline.parts:
        units_of(part)[0].schedule.event_sink = events.append
    buckets = [bucket for _, part in pipeline.parts for unit in units_of(part) for bucket in unit.buckets]
    for step in range(3):
        events.clear()
        inputs, targets = batches(step)
        pipeline.step(inputs, targets)
        kinds = [event.kind for event in events]
        if step:  # before the first one torch finds out about shapes by a forward and backward of its own
            assert kinds.count(EventKind.REDUCE_ISSUED) == len(buckets), "once, not for each micro-batch"
        assert all(unit.state is UnitState.SHARDED for _, part in pipeline.parts for unit in units_of(part))
        optimizer.step()
        optimizer.zero_grad()
        for x, y in zip(inputs, targets, strict=True):
            (loss_of(pipeline.reference(x), y) / 2).backward()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
    for place, part in pipeline.parts:
        whole = part.state_dict()
        assert whole
        for key, value in nn.Sequential(*list(pipeline.reference)[place]).state_dict().items():
            torch.testing.assert_close(whole[key].full_tensor(), value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("ScheduleInterleaved1F1B", 2),
        pytest.param("Schedule1F1B", 1, marks=pytest.mark.full),
        pytest.param("ScheduleGPipe", 1, marks=pytest.mark.full),
        pytest.param("ScheduleLoopedBFS", 2, marks=pytest.mark.full),
    ],
)
def test_stages_train_as_one_process(name: str, chunks: int) -> None:
    end_workers()
    run_ranks(check, 4, name, chunks)


def check_zero_bubble() -> None:
    """What `ScheduleInterleavedZeroBubble` does in a stage. It would find no node of the graph, and no gradient."""
    stage = nn.Sequential(Layer(), Layer())
    for layer in stage:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(stage)
    inputs = torch.rand(3, WIDTH, requires_grad=True)
    with pytest.raises(LifecycleError, match=r"accumulates the gradient of sharded parameter 0.up.weight(?s:.*)1F1B"):
        stage_backward_input([stage(inputs).sum()], None, [inputs], stage.parameters())


def check_nodes() -> None:
    layer = fully_shard(Layer())
    for view in ("view_as", "expand_as"):
        with pytest.raises(LifecycleError, match=r"parameter up.weight(?s:.*)register_post_accumulate"):
            getattr(layer.up.weight, view)(layer.up.weight)
        with torch.no_grad():
            getattr(layer.up.weight, view)(layer.up.weight)
        assert getattr(layer.up.weight, view)(torch.empty(WIDTH + 1, WIDTH)).shape == (WIDTH + 1, WIDTH)


def test_gradients_of_inputs_and_weights_apart_are_refused() -> None:
    run_ranks(check_zero_bubble, 2)


def test_who_looks_for_where_gradients_are_accumulated() -> None:
    run_ranks(check_nodes, 2)
