"""Trains a larger model with torch's engine or this package's, and says how its resident memory has grown."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def resident(name: str) -> int:
    """Return a number of /proc/self/status, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


start = resident("VmRSS")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

if sys.argv[1] == "torch":
    from torch.distributed.fsdp import fully_shard
else:
    from fullshard import fully_shard  # type: ignore[assignment]

dist.init_process_group("gloo")
layers = [nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(6)]
model = nn.Sequential(*layers)
torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # imports what takes memory
dist.all_reduce(torch.ones(1))
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
for layer in layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    model(torch.randn(64, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"grown by {resident('VmHWM') - before} after {before - start}", flush=True)
dist.destroy_process_group()
