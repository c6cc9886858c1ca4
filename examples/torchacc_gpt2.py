"""GPT-2 from scratch, as a TorchAcc script has it; of TorchAcc only the import is another.

    torchrun --nproc_per_node=2 examples/torchacc_gpt2.py
    fullshard launch --num_processes 2 examples/torchacc_gpt2.py

The text is the standard library of the running Python, byte by byte, so nothing is downloaded. `--save DIR` writes a
checkpoint after the last step, and `--load DIR` goes on from one.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import fullshard.torchacc as torchacc


class Text(Dataset[dict[str, torch.Tensor]]):
    """Pieces of equal length of the standard library; a token is a byte."""

    def __init__(self, count: int, length: int) -> None:
        data = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            data += path.read_bytes()
            if len(data) >= count * length:
                break
        self.pieces = torch.frombuffer(data[: count * length], dtype=torch.uint8).long().view(count, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.pieces[index]
        return {"input_ids": piece, "attention_mask": torch.ones_like(piece), "labels": piece}


def train(arguments: argparse.Namespace) -> list[float]:
    """Train; returns this rank's losses."""
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=arguments.length, n_embd=64, n_layer=2, n_head=2,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    )  # fmt: skip
    loader: Any = DataLoader(Text(arguments.pieces, arguments.length), batch_size=arguments.batch_size, shuffle=True)

    config = torchacc.Config()
    config.compute.bf16 = not arguments.fp32
    config.dist.fsdp.size = torchacc.dist.world_size()
    config.dist.fsdp.wrap_layer_cls = {"GPT2Block"}
    model, loader = torchacc.accelerate(model, loader, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.schedule)
    if arguments.load:
        load(arguments.load, model, optimizer, scheduler, loader)

    losses: list[float] = []
    model.train()
    while len(losses) < arguments.steps:
        for batch in tqdm(loader, unit="batch", disable=not torchacc.dist.is_master_ordinal(local=False)):
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            if torchacc.dist.is_master_ordinal(local=False) and len(losses) % 10 == 0:
                print(f"step: {len(losses)}, loss: {losses[-1]:.4f}")
            if len(losses) == arguments.steps:
                break
    if arguments.save:
        save(arguments.save, model, optimizer, scheduler, loader)
    return losses


def save(directory: Path, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
    """Every rank writes its slices of the model; what is saved by rank 0 alone is made whole first."""
    torchacc.dist.rendezvous("saving_model")
    torchacc.dist.mark_step()
    checkpoint = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    torchacc.save(checkpoint, directory / "model", master_only=False)

    torchacc.dist.rendezvous("saving_optimizer_states")
    torchacc.save(optimizer.state_dict(), directory / "optimizer.pth")
    torchacc.save(scheduler.state_dict(), directory / "scheduler.pth")
    torchacc.save(loader.state_dict(), directory / "loader.pth")


def load(directory: Path, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
    """Rank 0 makes the slices one file, which all ranks read. At any number of ranks."""
    consolidated = directory / "consolidated.pth"
    if torchacc.dist.is_master_ordinal(local=False):
        torchacc.dist.fsdp.consolidate_sharded_model_checkpoints(directory / "model", "*.pth", consolidated)
    torchacc.dist.rendezvous("ckpt_consolidation")

    model.load_state_dict(torch.load(consolidated)["model"])
    optimizer.load_state_dict(torch.load(directory / "optimizer.pth"))
    scheduler.load_state_dict(torch.load(directory / "scheduler.pth"))
    loader.load_state_dict(torch.load(directory / "loader.pth"))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options on the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT-2.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--schedule", type=int, default=60, help="steps until the learning rate is 0")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces per step on each rank")
    parser.add_argument("--pieces", type=int, default=2048, help="pieces of text in an epoch")
    parser.add_argument("--length", type=int, default=64, help="bytes of a piece")
    parser.add_argument("--fp32", action="store_true", help="compute in float32 instead of bfloat16")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint after the last step")
    parser.add_argument("--load", type=Path, metavar="DIR", help="go on from a checkpoint")
    return parser.parse_args(words)


if __name__ == "__main__":
    train(parse())
