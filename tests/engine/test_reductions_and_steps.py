"""Several reductions of one bucket in one backward are summed, and no unit is stale over a step.

pytest tests/engine/test_reductions_and_steps.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.features import MixedPrecisionPolicy, shard_model
from tests.distributed import run_ranks
from tests.traps import Block, adamw, batch, build, run_squared, train_beside_reference


class Repeated(nn.Module):
    """One block in several reentrant checkpoints, each of which is a backward of its own for the block's parameters."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()  # nothing else is to be reduced: the block's turn comes at once, each time
        for _ in range(self.times):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return x


def check_repeated(times: int, options: dict[str, Any]) -> None:
    train_beside_reference(lambda: Repeated(times), run_squared, ("blocks.0",), **options)


@pytest.mark.parametrize("times", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_reductions_of_one_backward_are_summed(times: int, strategy: str) -> None:
    run_ranks(check_repeated, 2, times, {"strategy": strategy})


def run_now_and_then(model: Any, step: int, rank: int) -> torch.Tensor:
    model.times = 2 - step % 2
    return run_squared(model, step, rank)


def check_now_and_then() -> None:
    train_beside_reference(lambda: Repeated(1), run_now_and_then, ("blocks.0",))


def test_a_sum_of_two_is_not_added_to_the_next() -> None:
    run_ranks(check_now_and_then, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_unit_kept_after_backward_is_gathered_anew_after_a_step(dtype: torch.dtype) -> None:
    """Its unsharded parameters are those of before the step: a copy, where they are cast or sent."""

    def losses(*, keep: bool) -> list[float]:
        model: Any = shard_model(
            build(lambda: nn.Sequential(Block(), Block())).float(),
            unit_modules=[],
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype),
        )
        model.set_reshard_after_backward(not keep)
        optimizer = adamw(model.parameters())
        found = []
        for step in range(3):
            loss = model(batch(step, 0).float()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    kept = losses(keep=True)
    assert kept == losses(keep=False)
    assert len(set(kept)) == 3
