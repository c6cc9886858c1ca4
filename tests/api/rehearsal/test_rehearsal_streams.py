"""The streams of a rehearsal on the simulated accelerator, in which a wait that is missing gives a wrong number.

pytest -m full tests/api/rehearsal/test_rehearsal_streams.py
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.api.rehearsal.lines import Links
from fullshard.api.rehearsal.meter import Meter
from fullshard.plan.hardware import parse_cluster
from tests.api.rehearsal.test_rehearsal_group import rehearsed
from tests.simulated.process import end_worker, on_device

pytestmark = pytest.mark.full


def _trained(engine: str, place: str) -> list[float]:
    """Train as rank 1 of 4, and return the losses and the sums of the weights."""
    with rehearsed(1, 4):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
        model: nn.Module = nn.Sequential(*layers).to(place)
        if engine == "ddp":
            model = DistributedDataParallel(model, bucket_cap_mb=1)
        else:
            for layer in layers:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            loss = model(torch.linspace(-1, 1, 128).view(8, 16).to(place)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            works = [dist.all_reduce(value := loss.detach().clone(), async_op=True) for _ in range(2)]
            for work in works:
                assert work is not None
                work.wait()
            losses += [loss.item(), value.item()]
        return losses


def _in_each_order(engine: str) -> dict[str, Any]:
    from tests.simulated.device import ORDERS, begin

    found = {"cpu": _trained(engine, "cpu")}
    for order in ORDERS:
        begin(order, seed=1)
        found[order.name] = _trained(engine, "simulated")
    return found


@pytest.mark.parametrize("engine", ["fullshard", "ddp"])
def test_streams_wait_for_one_another(engine: str) -> None:
    """The numbers are those of the CPU, in whichever order the streams run."""
    found = on_device(_in_each_order, engine)
    assert len(found) == 5
    assert all(losses == found["cpu"] for losses in found.values()), found


def _metered() -> tuple[list[float], list[float], list[int], int]:
    """Train under a meter; return its losses, those of the loop, the bytes allocated after steps, and host waits."""
    from tests.simulated.device import host_waits

    cluster = parse_cluster("2xH100")
    meter = Meter(Links(cluster, is_free=True), None, cluster)
    layer = nn.Linear(8, 8, device="simulated")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    kept, nbytes = torch.zeros(2, device="simulated"), []
    with host_waits() as waits:
        for step in range(2):
            loss = layer(torch.ones(2, 8, device="simulated")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept[step] = loss.detach()
            del loss
            nbytes.append(torch.accelerator.memory_allocated())
    return meter.answer()["losses"], kept.tolist(), nbytes, waits.total()


def test_losses_are_kept_on_the_host_without_waiting() -> None:
    """A meter takes no memory of the device that a real rank would not."""
    end_worker()
    losses, expected, nbytes, waits = on_device(_metered)
    end_worker()  # the meter's hooks would stay
    assert losses == expected
    assert len(set(expected)) == 2
    assert len(set(nbytes)) == 1
    assert waits == 0


class _Behind(nn.Module):
    """A host that is so slow that the device has ended all its work."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        torch.accelerator.synchronize()
        return value


def _waits(is_behind: bool) -> dict[str, dict[str, float]]:
    """Train three sharded layers under a meter, and return the waits of a step."""
    from tests.simulated.device import Order, begin

    begin(Order.LAZY)  # the device does nothing before somebody waits for it
    cluster = parse_cluster("4xH100")
    with rehearsed(0, 4), patch("fullshard.api.rehearsal.meter.now", time.perf_counter):  # its events have no times
        meter = Meter(Links(cluster, is_free=True), None, cluster)
        layers = [nn.Linear(8, 8) for _ in range(3)]
        between = _Behind() if is_behind else nn.Identity()
        model = nn.Sequential(layers[0], between, layers[1], between, layers[2]).to("simulated")
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.ones(2, 8, device="simulated")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found: dict[str, dict[str, float]] = meter.answer()["waits"]
        return found


@pytest.mark.parametrize("is_behind", [True, False])
def test_late_waits_are_those_of_an_idle_device(*, is_behind: bool) -> None:
    """If the host is behind, what was gathered ahead for the second and the third layer was there before the host."""
    end_worker()
    found = on_device(_waits, is_behind)
    end_worker()
    late = {place: noted["late"] for place, noted in found.items() if noted.get("late")}
    assert late == ({"unit '2', unshard": 1, "unit '4', unshard": 1} if is_behind else {})
    assert "unit '0', reduce" in found


def _memory() -> tuple[int, int, int, int]:
    """Return the allocated and the reserved bytes, each now and at the peak since the last call."""
    here = torch.accelerator
    found = here.memory_allocated(), here.max_memory_allocated(), here.memory_reserved(), here.max_memory_reserved()
    here.reset_peak_memory_stats()
    return found


def _memory_by_phase(kind: str) -> dict[str, tuple[int, int, int, int]]:
    """Train and return the memory after each phase."""
    place = torch.device("simulated", torch.accelerator.current_device_index())
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    ranks = dist.get_world_size()
    sizes = (2, ranks // 2) if kind == "hybrid" else (ranks,)
    names = ("replicate", "shard")[-len(sizes) :]
    options: dict[str, Any] = {"mesh": init_device_mesh("simulated", sizes, mesh_dim_names=names)}
    if kind == "offload":
        options["offload_policy"] = CPUOffloadPolicy()
    else:
        nn.Sequential(*layers).to(place)
    for layer in layers:
        layer[0].requires_grad_(kind != "frozen")
        (torchs if kind == "torch" else fully_shard)(layer, **options)
    optimizer = torch.optim.AdamW(nn.ModuleList(layers).parameters(), lr=1e-3)
    found = {"sharded": _memory()}
    for step in range(3):
        value = torch.ones(64, 256, device=place)
        for layer in layers:
            value = checkpoint(layer, value, use_reentrant=False) if kind == "checkpointing" else layer(value)
        found[f"forward {step}"] = _memory()
        value.square().mean().backward()
        found[f"backward {step}"] = _memory()
        optimizer.step()
        found[f"optimizer {step}"] = _memory()
        optimizer.zero_grad()
        found[f"between {step}"] = _memory()
    return found


def _of_real_ranks(ranks: int, kind: str) -> Any:
    from tests.simulated.group import run_ranks

    return run_ranks(_memory_by_phase, ranks, kind)[0]


def _of_a_rehearsed_rank(ranks: int, kind: str) -> Any:
    with rehearsed(0, ranks):
        return _memory_by_phase(kind)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["full", "hybrid", "frozen", "checkpointing", "offload", "torch"])
def test_memory_is_exactly_that_of_a_real_rank(kind: str, ranks: int) -> None:
    """Allocated and reserved, after each phase and at its peak, each in a new process."""
    end_worker()
    real = on_device(_of_real_ranks, ranks, kind)
    end_worker()
    assert on_device(_of_a_rehearsed_rank, ranks, kind) == real
