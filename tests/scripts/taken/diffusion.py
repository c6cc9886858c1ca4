"""Train a small UNet of diffusers on noise, as public scripts around torch's `fully_shard` do: `diffusion.py OUT`.

Blocks are units, a step has two micro-batches, gradients are clipped, and the script keeps an average of the weights.
After three steps it saves with `torch.distributed.checkpoint` and loads the checkpoint into a new model and optimizer.
Rank 0 writes losses, norms, weights and averages to OUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from diffusers import DDPMScheduler, UNet2DModel
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

SIZES: dict[str, Any] = {
    **{"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1, "norm_num_groups": 4},
    **{"block_out_channels": (8, 16), "down_block_types": ("DownBlock2D", "AttnDownBlock2D")},
    **{"up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4},
}
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build(start: dict[str, torch.Tensor]) -> tuple[Any, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = UNet2DModel(**SIZES)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in [*model.down_blocks, model.mid_block, *model.up_blocks]:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)
    model.to_empty(device="cpu")
    set_model_state_dict(model, start, options=StateDictOptions(full_state_dict=True))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    start = UNet2DModel(**SIZES).state_dict()
    model, optimizer = build(start)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    generator = torch.Generator().manual_seed(dist.get_rank())
    average = [parameter.detach().clone() for parameter in model.parameters()]
    losses, norms = [], []
    for step in range(6):
        if step == 3:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=out / "checkpoint")
            model, optimizer = build({name: torch.zeros_like(value) for name, value in start.items()})
            weights, state = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=out / "checkpoint")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            images = torch.randn(2, 1, 8, 8, generator=generator)
            noise = torch.randn(2, 1, 8, 8, generator=generator)
            times = torch.randint(0, 100, (2,), generator=generator)
            found = model(noise_scheduler.add_noise(images, noise, times), times).sample
            loss = torch.nn.functional.mse_loss(found, noise) / 2
            loss.backward()
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(average, [parameter.detach() for parameter in model.parameters()], 0.1)
    averages = [value.full_tensor() for value in average]
    weights = get_model_state_dict(model, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "norms": norms, "weights": weights, "averages": averages}, out / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
