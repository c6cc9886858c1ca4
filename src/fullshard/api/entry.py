"""One call for scripts with a training loop of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from fullshard.api.accelerator import Accelerator
from fullshard.api.data import ShardedDataLoader
from fullshard.api.optimizer import check_parameters
from fullshard.config.schema import ShardingConfig
from fullshard.core.errors import ConfigError


def accelerate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    dataloader: DataLoader[Any] | None = None,
    config: ShardingConfig | Mapping[str, Any] | None = None,
    *,
    mixed_precision: str | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer | None, ShardedDataLoader | None]:
    """Shard a model, make an optimizer fit it, and divide a data loader over the ranks.

    The loop stays as it was: `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`. For gradient accumulation,
    fp16 and metrics over all ranks use `Accelerator`.

    Args:
        model: sharded in place.
        optimizer: made from the model before or after this call; re-pointed in place.
        dataloader: every rank takes its share of each step; batches arrive on the rank's device.
        config: `ShardingConfig` or a dict of its settings.
        mixed_precision: `no`, `fp32` or `bf16`. Default: the launcher's, else `no`.

    Returns:
        Model, optimizer and loader; None for each that was not given.

    Raises:
        ConfigError: a setting that is wrong; `fp16`, whose loss scaling needs an Accelerator.
        OptimizerError: the optimizer holds parameters that are not the model's, or needs whole tensors.
    """
    accelerator = Accelerator(fsdp_plugin=ShardingConfig.of(config), mixed_precision=mixed_precision)
    if accelerator.mixed_precision == "fp16":
        raise ConfigError("fp16 scales the loss, which a plain loop does not", hint="use Accelerator, or bf16")
    model = accelerator.prepare_model(model)
    if optimizer is not None:
        accelerator.prepare_optimizer(optimizer)
        check_parameters(optimizer, [model], accelerator.num_processes)
    loader = accelerator.prepare_data_loader(dataloader) if dataloader is not None else None
    return model, optimizer, loader
