"""A script with one of three models (wide, deep or layers), which prints the seconds of its steps after the first."""

from __future__ import annotations

import itertools
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard

kind, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)


def perceptron(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


blocks: list[nn.Module]
if kind == "wide":
    blocks, batch = [perceptron(1024, 4096) for _ in range(2)], torch.randn(512, 1024)
elif kind == "deep":
    blocks, batch = [perceptron(640, 1920) for _ in range(8)], torch.randn(256, 640)
else:
    blocks = [nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True) for _ in range(4)]
    batch = torch.randn(8, 128, 512)
model = nn.Sequential(*blocks)
for block in blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ends = []
for _ in range(steps):
    model(batch).square().mean().backward()
    optimizer.step()
    ends.append(time.perf_counter())
    optimizer.zero_grad()
spans = [end - begin for begin, end in itertools.pairwise(ends)]
if dist.get_rank() == 0:
    print(f"a step takes {statistics.median(spans):.4f} s", *(f"{span:.3f}" for span in spans), flush=True)
dist.destroy_process_group()
