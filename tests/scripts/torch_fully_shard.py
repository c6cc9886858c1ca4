"""Trains a small transformer with torch's `fully_shard`, as people write it, and prints its losses as JSON.

torchrun --standalone --nproc-per-node 2 torch_fully_shard.py
"""

# mypy: ignore-errors
import argparse
import itertools
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 97, width: int = 24, depth: int = 3, heads: int = 4, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))

    torch.manual_seed(0)
    model = Transformer()
    model.recompute = args.recompute
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else None
    fsdp_kwargs = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for block in model.blocks:
        fully_shard(block, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)
    for one, other in itertools.pairwise(model.blocks):
        one.set_modules_to_forward_prefetch([other])

    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    generator = torch.Generator().manual_seed(rank)
    losses, norms = [], []
    for _ in range(args.steps):
        for micro_batch in range(args.accumulate):
            tokens = torch.randint(97, (4, 17), generator=generator)
            model.set_requires_gradient_sync(micro_batch == args.accumulate - 1)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / args.accumulate
            loss.backward()
            average = loss.detach().clone()
            dist.all_reduce(average)
            losses.append(average.item() / world_size)
        norm = clip_grad_norm_(model.parameters(), max_norm=1e6)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        logits = model(torch.arange(16).unsqueeze(0)).float()
    whole = {name: parameter.full_tensor().double().sum().item() for name, parameter in model.state_dict().items()}
    if rank == 0:
        print(json.dumps({"losses": losses, "norms": norms, "logits": logits.flatten().tolist(), "sums": whole}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
