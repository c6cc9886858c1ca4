"""Trains layers that are named and shaped as Llama's, without Transformers. The argument is a config.json's text."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard

VALUES: dict[str, Any] = json.loads(sys.argv[1])  # a config.json
WIDTH, INNER, LAYERS, VOCAB = (
    VALUES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
)


class Block(nn.Module):
    """A layer with the parameters of Llama's."""

    def __init__(self) -> None:
        super().__init__()
        shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (WIDTH, WIDTH))
        self.self_attn = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
        wide = {"gate_proj": (WIDTH, INNER), "up_proj": (WIDTH, INNER), "down_proj": (INNER, WIDTH)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in wide.items()})
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer; attention has one head, which changes nothing that is measured here."""
        y, own, mlp = self.input_layernorm(x), self.self_attn, self.mlp
        q, k, v = (own[name](y) for name in ("q_proj", "k_proj", "v_proj"))
        x = x + own["o_proj"](nn.functional.scaled_dot_product_attention(q, k, v))
        y = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](nn.functional.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))


class Model(nn.Module):
    """Llama's names of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(model_type="llama", to_dict=lambda: VALUES)
        inner = {"embed_tokens": nn.Embedding(VOCAB, WIDTH), "layers": nn.ModuleList(Block() for _ in range(LAYERS))}
        self.model = nn.ModuleDict({**inner, "norm": nn.RMSNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:  # type: ignore[union-attr]
            x = layer(x)
        return self.lm_head(self.model["norm"](x))  # type: ignore[no-any-return]


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
for layer in model.model["layers"]:  # type: ignore[union-attr]
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(6):
    tokens = torch.randint(VOCAB, (4, 64))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
