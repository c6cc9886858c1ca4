"""Any layout into any other, all of them: five strategies at one to four ranks, saved and loaded as any of the twenty.

Run with `pytest -m full test_checkpoint_matrix.py`; the default suite has a sample in test_checkpoint_ranks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint import full_state_dict, load_checkpoint, save_checkpoint
from fullshard.features import MixedPrecisionPolicy, ShardedParameter, shard_model
from tests.distributed import run_ranks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WORLD_SIZES = (1, 2, 3, 4)


class Net(nn.Module):
    """Odd shapes; a tied, a scalar, an empty and a frozen parameter; one with fewer elements than ranks; a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.one = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5))
        self.two = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> Any:
        self.seen += tokens.numel()
        return self.head(self.frozen(self.two(self.one(self.embed(tokens))) * self.scale))


def _job(strategy: str, *, seed: int, variant: int) -> tuple[Net, torch.optim.Optimizer]:
    """A sharded model with its optimizer; variants differ in units and precision."""
    torch.manual_seed(seed)
    net = Net()
    units = ([], [net.one], [net.one, net.two])[variant % 3]
    policy = (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16))[variant % 2]
    size = dist.get_world_size()
    shard_size = (2 if size % 2 == 0 else size) if strategy.startswith("HYBRID") else None
    shard_model(net, unit_modules=units, strategy=strategy, shard_size=shard_size, mp_policy=policy)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def _everything(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole parameters, buffers, and optimizer state."""
    whole = full_state_dict(net, rank0_only=False)
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad or name == "nothing":
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[parameter][key]
            if isinstance(parameter, ShardedParameter):
                state = state.full_tensor()
            whole[f"{name}/{key}"] = state
    return {name: tensor.detach().clone().reshape(-1) for name, tensor in whole.items()}


def _name(strategy: str, world_size: int) -> str:
    return f"{strategy}-{world_size}"


def _save_all(directory: str) -> None:
    for number, strategy in enumerate(STRATEGIES):
        net, optimizer = _job(strategy, seed=number + 10 * dist.get_world_size(), variant=number)
        for _ in range(2):
            net(torch.randint(0, 13, (4,))).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        name = _name(strategy, dist.get_world_size())
        save_checkpoint(Path(directory) / name, model=net, optimizer=optimizer)
        whole = _everything(net, optimizer)
        if dist.get_rank() == 0:
            torch.save(whole, Path(directory) / f"{name}.pt")


def _load_all(directory: str) -> int:
    checked = 0
    for number, strategy in enumerate(STRATEGIES):
        net, optimizer = _job(strategy, seed=1000, variant=number + dist.get_world_size())
        for saved in (_name(s, w) for w in WORLD_SIZES for s in STRATEGIES):
            load_checkpoint(Path(directory) / saved, model=net, optimizer=optimizer)
            expected = torch.load(Path(directory) / f"{saved}.pt", weights_only=True)
            got = _everything(net, optimizer)
            assert got.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(got[name], tensor), (saved, strategy, dist.get_world_size(), name)
            steps = {float(state["step"]) for state in optimizer.state.values()}
            assert steps <= {2.0}, steps
            checked += 1
    return checked


@pytest.mark.full
@pytest.mark.timeout(900)
def test_all_400_pairs(tmp_path: Path) -> None:
    """Parameters, buffers and optimizer state bit by bit, also into other units and other precisions."""
    for world_size in WORLD_SIZES:
        run_ranks(_save_all, world_size, str(tmp_path))
    checked = [run_ranks(_load_all, world_size, str(tmp_path), timeout=400)[0] for world_size in WORLD_SIZES]
    assert sum(checked) == 400
