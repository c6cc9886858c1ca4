"""The ranks of `fullshard doctor --run`, which check the collectives and a sharded step.

Run this module with three arguments: the path of the file for the outcomes, the device, and the number of seconds to
wait for other ranks. Rank 0 writes the file after every check, so that a missing outcome shows which check hung or
crashed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.comm.base import Collectives
from fullshard.comm.select import choices_for
from fullshard.features import ShardedParameter, fully_shard
from fullshard.launch.environment import init_process_group_from_environment, rank_device, read_rank_environment
from fullshard.launch.worker import run_worker

_STEPS = 3
_TOLERANCE = 1e-5


def main() -> None:
    """Join the process group, run the checks, and write the outcome."""
    path, kind, timeout = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    device = rank_device(read_rank_environment(), kind)
    environment = init_process_group_from_environment(device, timeout_seconds=timeout)
    chosen = choices_for(dist.group.WORLD, device)[0]
    facts = {
        "world size": environment.world_size,
        "device": device.type,
        "backend": dist.get_backend(),
        "collectives": chosen.name,
        "because": chosen.reason,
        "threads per rank": torch.get_num_threads(),
    }
    checks: dict[str, str] = {}
    for name, check in (
        ("sum over the ranks", lambda: _check_sum(device)),
        ("all-gather and reduce-scatter", lambda: _check_collectives(chosen.collectives, device)),
        ("sharded steps against DDP", lambda: _check_step(device)),
    ):
        checks[name] = _worst(check())
        if environment.is_main:
            path.write_text(json.dumps({"checks": checks, "facts": facts}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _worst(outcome: str) -> str:
    """Return, on every rank, the outcome of the first rank whose check failed, or of rank 0 if none failed."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    wrong = [f"{text} (rank {rank})" for rank, text in enumerate(outcomes) if text.startswith("wrong")]
    return wrong[0] if wrong else outcomes[0]


def _check_sum(device: torch.device) -> str:
    total = torch.full((1000,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(total)
    expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    if bool((total == expected).all()):
        return "right"
    return f"wrong: an all-reduce of 1 to {dist.get_world_size()} gave {total.unique().tolist()}, expected {expected}"


def _check_collectives(collectives: Collectives, device: torch.device) -> str:
    size, rank, numel = collectives.size, collectives.rank, 1000
    buffer = collectives.full_buffer(size * numel, torch.float32, device, holds_main=False)
    gathered = buffer.gather(torch.full((numel,), rank + 1.0, device=device), tag=0).wait()
    expected = torch.arange(1, size + 1, device=device).repeat_interleave(numel)
    if not torch.equal(gathered, expected.to(gathered.dtype)):
        return "wrong: an all-gather returned different elements from those that the ranks sent"
    reduced = collectives.reduce_scatter(gathered.clone() * (rank + 1), tag=1).wait()
    wanted = (rank + 1) * size * (size + 1) / 2
    if not bool((reduced == wanted).all()):
        return f"wrong: a reduce-scatter gave {reduced.unique().tolist()[:4]}, expected {wanted}"
    return "right"


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)).to(device)


def _check_step(device: torch.device) -> str:
    """Train a model with DDP and an equal one sharded. Return whether their losses and parameters agree."""
    ours, theirs = _model(device), _model(device)
    replicated = DistributedDataParallel(theirs)
    for layer in (ours[0], ours[2], ours[4]):
        fully_shard(layer)
    fully_shard(ours)
    losses = torch.tensor([_train(model, device) for model in (ours, replicated)])
    apart = _apart(*losses)
    if not apart <= _TOLERANCE:
        return f"wrong: the losses are {losses[0].tolist()}, but {losses[1].tolist()} with DDP"
    for (name, mine), same in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if not isinstance(mine, ShardedParameter):
            return f"wrong: {name} is not sharded"
        difference = _apart(mine.full_tensor(), same)
        if not difference <= _TOLERANCE:
            return f"wrong: after {_STEPS} steps {name} differs from DDP's by {difference:.1e}"
        apart = max(apart, difference)
    return f"right: {_STEPS} steps, losses and parameters within {apart:.1e} (relative)"


@torch.no_grad()
def _apart(mine: torch.Tensor, same: torch.Tensor) -> float:
    return float((mine - same).abs().max() / same.abs().max())


def _train(model: nn.Module, device: torch.device) -> list[float]:
    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank has different data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(_STEPS):
        inputs, targets = (torch.randn(16, size, generator=generator).to(device) for size in (64, 8))
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    run_worker(main)
