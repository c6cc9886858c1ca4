"""A training loop of one's own in bf16: from a checkpoint, if one is named, to another.

user_loop.py FIRST_STEP STEPS SAVED_IN [GOES_ON_FROM]
"""

import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.checkpoint import load_checkpoint, save_checkpoint
from fullshard.launch import init_process_group_from_environment, rank_device, read_rank_environment

WIDTH, WORDS, LENGTH = 128, 256, 64


class Model(nn.Module):
    """A small causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            LENGTH, device=tokens.device, dtype=self.places.weight.dtype
        )
        x = self.embedding(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


def made() -> Model:
    """The same weights everywhere: they are drawn on the host."""
    torch.manual_seed(0)
    return Model()


def loss_of(model: nn.Module, step: int, device: torch.device) -> torch.Tensor:
    """Of a batch whose next word is the last but three times as large, which can be learned."""
    first = torch.randint(WORDS, (16, 1), generator=torch.Generator().manual_seed(step))
    tokens = (first * 3 ** torch.arange(LENGTH + 1).remainder(8) % WORDS).to(device)
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    first, steps, saved_in, *more = sys.argv[1:]
    device = rank_device(read_rank_environment())
    init_process_group_from_environment(device)
    model = made().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if more:
        load_checkpoint(more[0], model=model, optimizer=optimizer)
    losses = []
    for step in range(int(first), int(first) + int(steps)):
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    save_checkpoint(saved_in, model=model, optimizer=optimizer)
    found = {"device": str(device), "backends": str(dist.get_backend_config()), "losses": losses}
    sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
