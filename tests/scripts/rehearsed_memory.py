"""Trains in the way that it is told, and says how its resident memory has grown: torch, full, hybrid, lora, ..."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any


def resident(name: str) -> int:
    """Return a number of /proc/self/status, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


start = resident("VmRSS")
[kind] = sys.argv[1:]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard as torchs  # noqa: E402

import fullshard  # noqa: E402

if kind == "offload":
    from fullshard import Accelerator, FullyShardedDataParallelPlugin
if kind in ("lora", "qlora", "checkpointing"):
    import peft
    import transformers


def own_loop() -> None:
    """Train with `fully_shard`, of torch or of this package."""
    shard: Any = torchs if kind == "torch" else fullshard.fully_shard
    layers = [nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(6)]
    model = nn.Sequential(*layers)
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names) if kind == "hybrid" else None
    for module in [*layers, model]:
        shard(module, mesh=mesh)
    steps(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def accelerate() -> None:
    """Train with an Accelerator that offloads to the host."""
    plugin = FullyShardedDataParallelPlugin(cpu_offload=True, transformer_cls_names_to_wrap=["Layer"])
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = nn.Sequential(*(Layer() for _ in range(6)))
    steps(*accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3)))


class Layer(nn.Sequential):
    """A unit."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take four steps."""
    for _ in range(4):
        model(torch.randn(64, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trainer() -> None:
    """Train a Llama with Transformers' Trainer: whole with activation checkpointing, or adapters."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(vocab_size=2048, num_hidden_layers=6, **sizes)
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    if kind != "checkpointing":
        model.requires_grad_(False)
        if kind == "qlora":
            fullshard.quantize(model, "nf4")
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"]))
    with tempfile.TemporaryDirectory() as directory:
        arguments = transformers.TrainingArguments(
            directory, max_steps=4, per_device_train_batch_size=4, report_to="none", save_strategy="no", use_cpu=True,
            gradient_checkpointing=kind == "checkpointing", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        tokens = torch.randint(2048, (64, 128), generator=torch.Generator().manual_seed(0))
        data: Any = [{"input_ids": row, "labels": row} for row in tokens]
        transformers.Trainer(model, arguments, train_dataset=data).train()


dist.init_process_group("gloo")
torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # imports what takes memory
dist.all_reduce(torch.ones(1))
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
{"torch": own_loop, "full": own_loop, "hybrid": own_loop, "offload": accelerate}.get(kind, trainer)()
if dist.get_rank() == 0:
    print(f"grown by {resident('VmHWM') - before} after {before - start}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
