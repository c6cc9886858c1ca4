"""The time of a rehearsed step on the simulated accelerator, beside virtual time.

pytest -m full -s tests/api/rehearsal/test_rehearsal_time.py
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fullshard.api.rehearsal import meter
from fullshard.api.rehearsal.group import NAME, Collective, CommunicatorLine, RehearsedGroup, Tensors, register
from fullshard.api.rehearsal.lines import HostWork, Links, StreamLine
from fullshard.api.virtual import rehearsal
from fullshard.api.virtual.device import VirtualDevice, VirtualEvent, VirtualStream
from fullshard.api.virtual.rehearsal import time_step
from fullshard.plan.hardware import parse_cluster
from fullshard.plan.job import Job
from fullshard.plan.library import MODELS
from tests.distributed import run_ranks

SMALL = {**MODELS["Llama-2-7B"], "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
         "vocab_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
STEPS = 8


class _VirtualLinks(Links):
    """The links of a rehearsal, whose messages keep a stream of the simulated device busy."""

    def line_on(self, device: VirtualDevice) -> Any:
        """Return what makes the lines of groups."""

        def send_from_host(message: Collective, whole: Tensors, fill: Callable[[], object], is_async: bool) -> HostWork:
            fill()
            device.clock.host += device.host.message * math.ceil(math.log2(max(2, message.ranks)))
            return HostWork(0.0)

        def line(group: RehearsedGroup, kind: str) -> CommunicatorLine:
            if kind == "cpu":
                return send_from_host

            def occupy(message: Collective, fill: Any) -> None:
                device.clock.host += device.host.collective
                sending, latency = self.seconds(message)
                link = "link" if sending[0] >= sending[1] else "link between hosts"
                device.clock_task(message.what, link, max(sending), latency)

            return StreamLine(lambda: device.current, lambda: VirtualStream(device, group.name), occupy)

        return line


def _rehearse(devices: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a rehearsal of the script that virtual time runs."""
    cluster = parse_cluster(devices)
    links = _VirtualLinks(cluster)

    @contextlib.contextmanager
    def playing(device: VirtualDevice, rank: int, world_size: int) -> Iterator[None]:
        with register(links.line_on(device)):
            dist.init_process_group(NAME, rank=rank, world_size=world_size, store=dist.HashStore())
            yield
            dist.destroy_process_group()

    def train(device: VirtualDevice, model: Any, optimizer: torch.optim.Optimizer, job: Job) -> dict[str, Any]:
        measured = meter.Meter(links, None, cluster)
        with (
            patch.object(meter.Meter, "_keep"),  # because these losses have no values
            patch.object(meter, "now", lambda: VirtualEvent(device).record()),
            patch.object(meter, "seconds_between", lambda begin, end: end._task.end - begin._task.end),
        ):
            for _ in range(STEPS):
                rehearsal._loss(model, job.micro_batch, job.seq_len).backward()
                optimizer.step()
                optimizer.zero_grad()
                device.clock.block_all()
            return measured.answer()

    dist.destroy_process_group()  # of the process that runs this
    with patch.object(rehearsal, "playing", playing), patch.object(rehearsal, "last_step", train):
        return time_step(SMALL, Job.of(settings), cluster)  # type: ignore[return-value]


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        ("8xH100", {"seq_len": 2048}),
        ("8xL40S", {"seq_len": 512}),  # the links are busy nearly all the time, with gathers beside reductions
        ("16xL40S", {"seq_len": 2048}),
        ("64xH100", {"seq_len": 2048}),
        ("1024xH100", {"seq_len": 4096, "checkpointing": "full"}),
        ("64xH100", {"seq_len": 1024, "strategy": "HYBRID_SHARD"}),
    ],
)
def test_a_step_takes_its_virtual_time(devices: str, settings: dict[str, Any]) -> None:
    """Within 1 %."""
    step = time_step(SMALL, Job.of(settings), parse_cluster(devices))
    [found] = run_ranks(_rehearse, 1, devices, settings)
    print(f"{devices} {settings}: {found['step_seconds'] / step.seconds:.4f} of {1000 * step.seconds:.3f} ms, "
          f"exposed {1000 * found['exposed_seconds']:.3f} and {1000 * step.exposed:.3f} ms")  # fmt: skip
    assert found["step_seconds"] == pytest.approx(step.seconds, rel=0.01)
