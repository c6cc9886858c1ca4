"""Images: a Vision Transformer, sharded by one call.

fullshard launch --num_processes 2 examples/vision.py
"""

import argparse

import small
import torch
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

from fullshard import PartialState, accelerate

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
# yours: model = ViTForImageClassification.from_pretrained("google/vit-base-patch16-224", num_labels=...)
model = ViTForImageClassification(
    ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=3,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(small.images(), batch_size=8, shuffle=True)
model, optimizer, loader = accelerate(model, optimizer, loader, {"strategy": "FULL_SHARD"})

state = PartialState()
for epoch in range(args.epochs):
    right = seen = 0
    for batch in loader:
        output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        right += int((output.logits.argmax(-1) == batch["labels"]).sum())
        seen += len(batch["labels"])
    state.print(f"epoch {epoch}  loss {output.loss.item():.4f}  right on this rank {right} of {seen}")
