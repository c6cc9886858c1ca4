"""Timing of a fullshard step in virtual time, and a writer of traces for Perfetto or chrome://tracing."""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.api import torch_private
from fullshard.api.planning import model_shape
from fullshard.api.virtual.attention import dividing, register
from fullshard.api.virtual.clock import DEVICE, Task
from fullshard.api.virtual.device import VirtualDevice, instead
from fullshard.api.virtual.group import name_groups, playing
from fullshard.api.virtual.simulation import check_axes, shard_without_weights, transformers_model
from fullshard.comm.mesh import init_mesh
from fullshard.core.errors import ConfigError, FullshardError
from fullshard.core.files import write_text
from fullshard.core.sizes import MIB
from fullshard.plan.axes import check_groups
from fullshard.plan.hardware import Cluster, check_rank
from fullshard.plan.host import HostCosts
from fullshard.plan.job import Job

STEPS = 2
"""Number of steps. The first creates the optimizer state and records the order of units. Later ones are identical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The figures and the tasks of one step."""

    seconds: float  # from the first launch to the end of the last task
    compute: float  # seconds in which a kernel runs
    communication: float  # seconds in which data is sent, whether or not a kernel runs at the same time
    exposed: float  # the part of `communication` in which no kernel runs
    idle: float  # seconds in which nothing runs because the device waits for the host
    host: float  # seconds until the host has launched everything, without `blocked`
    blocked: float  # seconds during that time in which the host waits for the device
    launches: int  # number of kernels that the host has launched
    collectives: int  # number of collectives that the host has launched
    peak_allocated: int  # peak of the allocated bytes on the device
    state: int  # bytes allocated before the step
    begin: float  # when the step started, on the host's clock
    tasks: Sequence[Task]
    memory: Sequence[tuple[float, int]]  # (seconds on the host's clock, bytes allocated) pairs

    def figures(self) -> dict[str, float | int]:
        """Return all figures except the tasks and the memory curve, for a benchmark record."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name not in ("begin", "tasks", "memory")}

    def write_trace(self, path: Path) -> None:
        """Write the timeline in Chrome's trace format, which Perfetto can also read."""
        streams = list(dict.fromkeys(task.stream for task in self.tasks))
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "virtual time"}}]
        for number, stream in enumerate(streams):
            events.append({"ph": "M", "tid": number, "name": "thread_name", "args": {"name": stream}})
        events += [
            {
                "ph": "X",
                "tid": streams.index(task.stream),
                "name": task.name,
                "cat": task.resource,
                "ts": (task.start - self.begin) * 1e6,
                "dur": (task.end - task.start) * 1e6,
                "args": {"unit": task.phase, "launched, us": (task.launched - self.begin) * 1e6},
            }
            for task in self.tasks
        ]
        for moment, nbytes in self.memory:
            values = {"MiB": round(nbytes / MIB)}
            events.append({"ph": "C", "name": "allocated", "ts": (moment - self.begin) * 1e6, "args": values})
        events = [{"pid": 0, **event} for event in events]
        write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _loss(model: nn.Module, sequences: int, tokens: int) -> torch.Tensor:
    """Run the forward of a causal language model and return its loss."""
    ids = torch.zeros(sequences, tokens, dtype=torch.long, device="meta")
    try:
        logits = model(input_ids=ids, position_ids=torch.arange(tokens, device="meta")[None]).logits
    except FullshardError:
        raise
    except Exception as error:  # of a model's own code, or of a kernel that knows no such dtype
        raise ConfigError(
            f"the forward pass of {type(model).__name__} cannot run in virtual time: {error}",
            hint="use fullshard plan, which does not run the model",
        ) from error
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def time_step(
    values: dict[str, Any], job: Job, cluster: Cluster, *, rank: int = 0, host: HostCosts | None = None
) -> Timeline:
    """Simulate a training step of the engine as one rank of a job on `cluster`, and return its timeline."""
    untimed = {
        "method": job.method != "full",
        "offload": bool(job.on_host) or job.on_host.activations,
        "compile": job.compile,
        "loss": job.loss != "eager",
        "attention": job.attention in ("flash3", "flash4"),
        "step in backward": job.schedule.steps_in_backward,
        "optimizer": job.optimizer not in ("adamw", "adamw-fused"),
    }
    if refused := [f"{name} = {getattr(job, name, True)}" for name, is_refused in untimed.items() if is_refused]:
        raise ConfigError(
            f"virtual time does not support {', '.join(refused)}", hint="remove them, or use fullshard plan"
        )
    check_axes(job)
    if cluster.device.is_cpu:
        raise ConfigError(
            "virtual time does not support CPUs", hint="use fullshard plan --calibrate, or select an accelerator"
        )
    check_rank(rank, cluster.count)
    attention = "eager" if job.attention == "eager" else register(job, cluster.device)
    positions = "n_positions" if "n_positions" in values else "max_position_embeddings"
    values = {**values, positions: max(job.seq_len, values.get(positions, 0))}
    with torch.device("meta"):
        model = transformers_model(values, attention=attention)().float()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"virtual time does not support {type(model).__name__}, which has an encoder and a decoder",
            hint="use fullshard plan",
        )
    device = VirtualDevice(cluster, host)
    fused = instead(nn.functional, "dropout", _fused_dropout)
    with playing(device, rank, cluster.count), device.running(), fused_optimizers(), fused:
        shard_size = job.row.shard_size_on(cluster.per_host, job.shard_size)
        in_group = job.row.mesh_shape(cluster.count, shard_size)[1]
        check_groups(model_shape(model), job, cluster, groups=cluster.count, shard_size=in_group)
        mesh = init_mesh(shard_size=in_group, device=torch.device("meta"))
        name_groups(mesh)
        with dividing(model, job, cluster.device) as groups:
            for axis, group in groups.items():
                group.title = axis
            shard_without_weights(model, job, mesh, device.note_event)
            return last_step(device, model, torch.optim.AdamW(model.parameters(), fused=True), job)


def last_step(device: VirtualDevice, model: nn.Module, optimizer: torch.optim.Optimizer, job: Job) -> Timeline:
    """Train for `STEPS` steps, each of which begins when the last has ended. Return the timeline of the last."""
    clock = device.clock
    for step in range(STEPS):
        if step == STEPS - 1:
            device.begin_record()
        for _ in range(job.accumulation):
            device.phase = "forward"
            loss = _loss(model, job.micro_batch, job.seq_len // job.shared_by)
            device.phase = "backward"
            loss.backward()
            del loss
        device.phase = "optimizer"
        optimizer.step()
        optimizer.zero_grad()
        launched, blocked = clock.host, clock.blocked
        clock.block_all()
    begin = device.begin
    tasks = [t for s in clock.streams for t in s.tasks if t.resource and t.launched >= begin.time]
    kernels = [(t.start, t.end) for t in tasks if t.resource == DEVICE]
    sent = [(t.start, t.end) for t in tasks if t.resource != DEVICE]
    return Timeline(
        seconds=clock.host - begin.time,
        compute=_length(kernels),
        communication=_length(sent),
        exposed=_length([*kernels, *sent]) - _length(kernels),
        idle=clock.host - begin.time - _length([*kernels, *sent]),
        host=launched - begin.time - (blocked - begin.blocked),
        blocked=blocked - begin.blocked,
        launches=device.launches - begin.launches,
        collectives=device.collectives - begin.collectives,
        peak_allocated=device.peak_allocated,
        state=begin.allocated,
        begin=begin.time,
        tasks=tasks,
        memory=list(device.curve),
    )


def _length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total length of the union of time spans, in seconds."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


@contextlib.contextmanager
def fused_optimizers() -> Iterator[None]:
    """Allow torch's fused optimizers on the meta device within the block, because the simulated device has them."""
    place = torch_private.fused_devices
    with instead(place.owner, place.name, lambda: [*place.torchs(), "meta"]):
        yield


_torchs_dropout = nn.functional.dropout


def _fused_dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Run dropout as one kernel with a mask of one byte per element, where the meta device would run three."""
    if training and p and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return _torchs_dropout(input, p, training, inplace)
