"""Count how often each unit is gathered, and print it at the end of every backward: an extension of the engine.

fullshard launch --num_processes 2 examples/count_gathers.py
"""

from collections import Counter

import torch
from torch import nn

import fullshard
from fullshard.engine.extension import Extension, register


class CountGathers(Extension):
    """One for each model that is sharded; the engine calls these methods."""

    def __init__(self, model):
        super().__init__(model)
        self.counts = Counter()

    def before_gather(self, unit):
        self.counts[unit.name or "the model"] += 1

    def backward_ends(self, used):
        if self.model.mesh.is_first:
            print(", ".join(f"{name}: {count}" for name, count in self.counts.items()), flush=True)
        self.counts.clear()


def main():
    register(CountGathers)  # before the model is sharded
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fullshard.fully_shard(layer)
    fullshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
