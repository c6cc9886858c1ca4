"""What training scripts do beside steps, each on its own: loaders, evaluation, early stopping, TRL's trainers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


def loop(output: str) -> None:
    """A DistributedSampler, two workers, a scheduler, a loss of all ranks and a save of torch's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    model: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    fully_shard(model)
    data = TensorDataset(torch.randn(256 * dist.get_world_size() // 8, 16))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    batches = DataLoader(data, batch_size=8, sampler=sampler, num_workers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for [rows] in batches:
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach().clone(), op=dist.ReduceOp.SUM)
        scheduler.step(mean / dist.get_world_size())
    dcp.state_dict_saver.save(model.state_dict(), checkpoint_id=output)
    dist.destroy_process_group()


def accelerate(output: str) -> None:
    """`gather_for_metrics`, a dispatched loader, `broadcast_object_list`, `save_state` and `wait_for_everyone`."""
    from accelerate.utils import broadcast_object_list
    from torch.utils.data import DataLoader, TensorDataset

    from fullshard import Accelerator

    accelerator = Accelerator()
    model: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    rows = TensorDataset(torch.randn(40 * accelerator.num_processes + 3, 16))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, batches, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=8, num_workers=2), scheduler
    )
    for [row] in batches:
        accelerator.backward(model(row).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    seen = torch.cat([accelerator.gather_for_metrics(model(row).detach()) for [row] in batches])
    assert len(seen) == len(rows), len(seen)
    assert broadcast_object_list([1, 2]) == [1, 2]
    accelerator.wait_for_everyone()
    accelerator.save_state(output)
    accelerator.end_training()


def evaluation(output: str) -> None:
    """The Trainer, which evaluates with metrics, stops early and loads the best model at the end."""
    import numpy
    from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainingArguments

    small: Any = importlib.import_module("small")
    text = small.text(pieces=2048, length=64)
    args = TrainingArguments(
        output, max_steps=8, per_device_train_batch_size=1, eval_strategy="steps", eval_steps=2, save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_share", dataloader_num_workers=2, report_to="none",
        lr_scheduler_type="cosine", warmup_steps=2,
    )  # fmt: skip

    def metrics(found: Any) -> dict[str, float]:
        assert len(found.predictions) == len(found.label_ids)
        return {"share": float((numpy.argmax(found.predictions, -1) == found.label_ids).mean())}

    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(small.model()), args, train_dataset=text,
        eval_dataset=text[:130], compute_metrics=metrics, callbacks=[EarlyStoppingCallback(3)],
    )  # fmt: skip
    trainer.train()
    assert "eval_share" in trainer.evaluate()


if __name__ == "__main__":
    kind, output = sys.argv[1:]
    {"loop": loop, "accelerate": accelerate, "evaluation": evaluation}[kind](output)
    print(f"{kind} has ended", flush=True)
