"""Train with Lightning's `ModelParallelStrategy` as its users do: `lightning_program.py OUT`.

The module shards itself in `configure_model`. The Trainer accumulates, clips, validates, saves and resumes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))

    def configure_model(self) -> None:
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("off", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def main(out: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 1, generator=generator))
    losses = []
    for epochs in (1, 2):
        module = Module()
        trainer = L.Trainer(
            **{
                "accelerator": "cpu",
                "devices": 2,
                "strategy": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            },
            **{"max_epochs": epochs, "accumulate_grad_batches": 2, "logger": False, "enable_progress_bar": False},
            callbacks=[ModelCheckpoint(out / "checkpoints", save_top_k=-1)],
            **{"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm", "num_sanity_val_steps": 0},
        )
        paths = sorted((out / "checkpoints").glob("*.ckpt"))
        loaders = DataLoader(rows, 4, shuffle=False), DataLoader(rows, 8)
        trainer.fit(module, *loaders, ckpt_path=paths[-1] if epochs == 2 else None)
        losses += [*module.seen, trainer.callback_metrics["off"].item()]
    if trainer.global_rank == 0:
        torch.save({"losses": losses}, out / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
