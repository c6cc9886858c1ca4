"""A small BERT, three steps, whatever the configuration; writes what each rank saw to a file in argv[1]."""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from fullshard import Accelerator

accelerator = Accelerator()
torch.manual_seed(5)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
numel = sum(parameter.numel() for parameter in model.parameters())
rows = [{"input_ids": torch.randint(0, 50, (12,)), "labels": torch.tensor(row % 2)} for row in range(4)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
losses = []
while len(losses) < 3:
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
result = {
    "world_size": accelerator.num_processes,
    "share": sum(part.numel() for part in held) / numel,
    "losses": losses,
    "mode": accelerator.mixed_precision,
    "offload": accelerator._config.sharding.cpu_offload,
    "checkpointing": accelerator._config.sharding.activation_checkpointing,
}
Path(sys.argv[1], f"rank{accelerator.process_index}.json").write_text(json.dumps(result), encoding="utf-8")
accelerator.end_training()
