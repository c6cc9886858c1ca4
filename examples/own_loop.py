"""A model and a training loop of your own. What was written for torch's `fully_shard` changes one import.

fullshard launch --num_processes 2 examples/own_loop.py
"""

import argparse
import os

import small
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from fullshard import describe, fully_shard  # was: from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    """A small transformer that reads bytes and predicts the next one."""

    def __init__(self, width: int = 64, depth: int = 2, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embedding(tokens) + self.places.weight[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
args = parser.parse_args()

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

torch.manual_seed(0)
model = Model().to(device)  # yours: any nn.Module; of Transformers, AutoModelForCausalLM.from_pretrained(...)
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
if dist.get_rank() == 0:
    print(describe(model))

data = small.text(pieces=4096, length=64)
loader = DataLoader(data, batch_size=args.batch_size, sampler=DistributedSampler(data, shuffle=True))

for step, batch in zip(range(1, args.steps + 1), loader):
    tokens = batch["input_ids"].to(device)
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step}  loss {loss.item():.4f}")

dist.destroy_process_group()
