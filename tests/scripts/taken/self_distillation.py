"""Train a student and an averaged teacher as DINOv3 does around torch's `fully_shard`: `self_distillation.py OUT`.

Checkpointed blocks are units that prefetch one another. Both models start on the meta device. The backbone has a second
forward method. The teacher runs forward only, and private state of its unit makes it free its parameters after each
forward. Its weights are averages of the student's. Rank 0 writes losses, norms and both models' weights to OUT.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.scale = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.norm1(x)
        x = x + self.scale * self.attention(seen, seen, seen, need_weights=False)[0]
        return x + self.scale * self.mlp(self.norm2(x))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first.expand(len(x), -1, -1), self.patches(x).flatten(2).mT], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def get_intermediate_layers(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.tokens(x)
        return [x := block(x) for block in self.blocks]


def parallelize(models: list[nn.ModuleDict]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    config: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.float32, torch.float32)}
    for model in models:
        blocks: Any = model["backbone"].blocks
        for index, block in enumerate(blocks):
            blocks[index] = fully_shard(checkpoint_wrapper(block), **config, reshard_after_forward=True)
        for one, other in pairwise(blocks):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
        fully_shard(model["backbone"], **config, reshard_after_forward=True)
        register_fsdp_forward_method(model["backbone"], "get_intermediate_layers")
        model["head"] = fully_shard(model["head"], **config, reshard_after_forward=True)
        model.to_empty(device="cpu")
    for part in models[1].values():
        state: FSDPState = part._get_fsdp_state()  # type: ignore[operator]
        group: Any = state._fsdp_param_group
        info = group.post_forward_mesh_info
        state._lazy_init()
        group.post_forward_mesh_info = info


def fill(model: nn.Module) -> None:
    """Fill the parameters with numbers that do not depend on the sharding."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.2
        value = torch.ones(parameter.shape) if "norm" in name and "weight" in name else whole
        with torch.no_grad():
            parameter.copy_(
                torch.distributed.tensor.distribute_tensor(value, parameter.device_mesh, parameter.placements)
            )


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    with torch.device("meta"):
        heads = [nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 24)) for _ in range(2)]
        student, teacher = (nn.ModuleDict({"backbone": Backbone(), "head": head}) for head in heads)
    parallelize([student, teacher])
    fill(student)
    fill(teacher)
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, eps=1e-4)
    pairs = list(student.parameters()), list(teacher.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, norms = [], []
    for _ in range(5):
        images = torch.randn(2, 3, 8, 8, generator=generator)
        with torch.no_grad():
            aim = (teacher["head"](teacher["backbone"](images)[:, 0]) / 0.1).softmax(-1)
        seen = student["head"](student["backbone"](images + 0.1)[:, 0]).log_softmax(-1)
        features = student["backbone"].get_intermediate_layers(images)  # type: ignore[operator]
        loss = -(aim * seen).sum(-1).mean() + 0.1 * features[1].square().mean()
        loss.backward()
        losses.append(loss.item())
        norms += [nn.utils.clip_grad_norm_(part.parameters(), 3.0).full_tensor().item() for part in student.values()]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_mul_(pairs[1], 0.9)
            torch._foreach_add_(pairs[1], pairs[0], alpha=0.1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = [get_model_state_dict(model, options=options) for model in (student, teacher)]
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "norms": norms, "student": weights[0], "teacher": weights[1]}, out / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
