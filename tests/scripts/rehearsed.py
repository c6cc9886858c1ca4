"""A script with torch's engines or this package's, which knows nothing of a rehearsal: ddp, fsdp1, fsdp2, ..."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

[engine] = sys.argv[1:]
dist.init_process_group("gloo")
ranks = dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
model: nn.Module = nn.Sequential(nn.Embedding(128, 64), *layers, nn.Linear(64, 128))
if engine == "ddp":
    model = DistributedDataParallel(model)
elif engine == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
else:
    if engine == "fullshard":
        from fullshard import fully_shard
    else:
        from torch.distributed.fsdp import fully_shard  # type: ignore[assignment]
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (ranks // 4, 4), mesh_dim_names=names) if engine == "hybrid" else None
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(8):
    tokens = torch.randint(128, (4, 32))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
losses = [None] * ranks
dist.all_gather_object(losses, loss.item())
dist.barrier()
where = f"{os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']} on host {os.environ['GROUP_RANK']}"
state = "finite" if torch.isfinite(torch.tensor(losses)).all() and len(losses) == ranks else "not finite"
print(f"{sum(p.numel() for p in model.parameters()) * 4} bytes of gradients", flush=True)
print(f"rank {dist.get_rank()} of {ranks}, {where}, {dist.get_backend()}, {state}", flush=True)
dist.destroy_process_group()
