"""Rehearsals on a GPU: time on its own clock, and the memory of a real rank. Not run yet: see decision 39.

pytest -m gpu tests/api/rehearsal/test_gpu_rehearsal.py
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard
from tests.api.rehearsal.test_rehearsal_group import rehearsed
from tests.api.rehearsal.test_rehearse import SCRIPTS, rehearse
from tests.distributed import run_ranks

pytestmark = pytest.mark.gpu


def test_messages_take_their_time_on_the_gpu_while_the_host_goes_on() -> None:
    """Two gathers of 20 ms each, one after the other, beside a computation."""
    with rehearsed(0, 2, links="CPU"):
        whole, own = torch.zeros(15_000_000, device="cuda"), torch.ones(7_500_000, device="cuda")
        dist.all_gather_into_tensor(whole, own)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        works = [dist.all_gather_into_tensor(whole, own, async_op=True) for _ in range(2)]
        assert not works[1].is_completed()
        for work in works:
            work.wait()
        end.record()
        end.synchronize()
        assert 40 <= begin.elapsed_time(end) < 44
        assert whole.sum().item() == 15_000_000


def test_a_script_on_the_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    """The loop of the examples, which asks for NCCL."""
    script = str(SCRIPTS.parents[1] / "examples" / "own_loop.py")
    found, said = rehearse(capfd, "--as", "64xH100", "--steps", "12", "--", script)
    assert found["is_on_gpu"]
    assert "sharded over 64 ranks" in said
    assert 0 < found["peak_allocated"] <= found["peak_reserved"]
    assert found["exposed_seconds"] < found["step_seconds"]


def _peak() -> int:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048)) for _ in range(4)))
    model.cuda()
    torch.cuda.reset_peak_memory_stats()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randn(256, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_is_that_of_a_real_rank_of_the_gpu(ranks: int) -> None:
    """Real ranks share the GPU over NCCL."""
    real = run_ranks(_peak, ranks, kind="cuda")[0]
    with rehearsed(0, ranks):
        assert _peak() == pytest.approx(real, rel=0.02)
