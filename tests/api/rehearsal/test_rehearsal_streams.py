"""The streams of a rehearsal on the simulated accelerator, in which a wait that is missing gives a wrong number.

pytest -m full tests/api/rehearsal/test_rehearsal_streams.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard import fully_shard
from tests.api.rehearsal.test_rehearsal_group import rehearsed
from tests.simulated.process import on_device

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
