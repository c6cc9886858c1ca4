"""A script as people write it for Accelerate: BERT on sentence pairs, in the shape of its `nlp_example`.

`tests/api/test_accelerator_script.py` runs it once with Accelerate and once with fullshard; only the import differs.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset[dict[str, torch.Tensor]]):
    """Random token sequences whose label says whether token 7 occurs early."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(5, 60, (count, 12), generator=generator)
        self.labels = (self.tokens[:, :3] < 20).any(dim=1).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.tokens[index],
            "attention_mask": torch.ones(12, dtype=torch.long),
            "labels": self.labels[index],
        }


def main(library: str, options: dict[str, Any], batch_size: int = 8, epochs: int = 2) -> dict[str, Any]:
    """Train and evaluate; returns losses per step, gathered predictions, the final norm and learning rate."""
    from accelerate.utils import DataLoaderConfiguration
    from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

    accelerator_class = importlib.import_module(library).Accelerator
    accelerator = accelerator_class(
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=42),
        **options,
    )
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(config)
    train_dataset, eval_dataset = Pairs(32, seed=1), Pairs(13, seed=2)
    train_loader = DataLoader(train_dataset, shuffle=True, batch_size=batch_size, drop_last=True)
    eval_loader = DataLoader(eval_dataset, shuffle=False, batch_size=batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    steps = len(train_loader) * epochs // accelerator.gradient_accumulation_steps
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=steps)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    model.eval()
    predictions, references = [], []
    for batch in eval_loader:
        with torch.no_grad():
            logits = model(**batch).logits
        gathered = accelerator.gather_for_metrics((logits.argmax(dim=-1), batch["labels"]))
        predictions.append(gathered[0].cpu())
        references.append(gathered[1].cpu())
    return {
        "losses": losses,
        "norms": norms,
        "predictions": torch.cat(predictions).tolist(),
        "references": torch.cat(references).tolist(),
        "expected": eval_dataset.labels.tolist(),
        "rate": scheduler.get_last_lr()[0],
    }
