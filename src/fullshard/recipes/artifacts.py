"""The files that a run leaves besides its checkpoints: sample text, the export and the picture of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.features import unsharded
from fullshard.observe import plot_losses, read_metrics


@torch.no_grad()
def sample_text(model: nn.Module, tokenizer: Any, *, prompt: str, tokens: int, device: torch.device) -> str:
    """Return the prompt and the model's continuation, always the likeliest token. Collective."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids = encoded["input_ids"].to(device)
    if ids.numel() == 0:
        ids = torch.tensor([[tokenizer.eos_token_id]], device=device)
    model.eval()
    with unsharded(model):
        output = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    model.train()
    text: str = tokenizer.decode(output[0], skip_special_tokens=True)
    return text


def final_loss(metrics: Path) -> str:
    """Return the final loss in words: the mean of the last tenth of the steps, since single batches scatter widely."""
    losses = [record.loss for record in read_metrics(metrics)]
    if not losses:  # a run that went on in another directory and had nothing left to train
        return "training loss: no steps here"
    last = losses[-max(1, len(losses) // 10) :]
    return f"training loss: {sum(last) / len(last):.4f} nats/token (mean of the last {len(last)} steps)"


def draw_losses(path: Path, metrics: Path, *, unigram_entropy: float, held_out_loss: float | None) -> None:
    """Draw the losses that the metrics file holds."""
    records = list(read_metrics(metrics))
    plot_losses(
        path,
        steps=[record.step for record in records],
        losses=[record.loss for record in records],
        unigram_entropy=unigram_entropy,
        held_out_loss=held_out_loss,
    )
