"""One function for scripts that have their own training loop."""

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
    """Shard a model, adapt its optimizer to the shards, and divide a data loader over the ranks.

    The training loop does not change: `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`. For gradient
    accumulation, fp16 and metrics over all ranks, use `Accelerator`.

    Args:
        model: the model, which is sharded in place.
        optimizer: an optimizer created before or after this call; its parameters are replaced in place.
        dataloader: a loader to divide. Every rank takes its share of each step, and batches move to the rank's device.
        config: a `ShardingConfig` or a dict of its settings.
        mixed_precision: `no`, `fp32`, `bf16` or `fp8`. Defaults to the launcher's setting, or `no` without a launcher.

    Returns:
        The model, optimizer and loader; None for each object that was not passed.

    Raises:
        ConfigError: a setting is wrong, or is `fp16`, which needs an Accelerator for its loss scaling.
        OptimizerError: the optimizer has parameters of another model, or needs whole tensors.
    """
    for kind, value in ((torch.optim.Optimizer, optimizer), (DataLoader, dataloader)):
        if not isinstance(value, kind | None):
            what = f"accelerate: expected a torch {kind.__name__}, got {type(value).__name__}"
            raise ConfigError(what, hint="pass settings as config={'strategy': 'FULL_SHARD'}")
    accelerator = Accelerator(fsdp_plugin=ShardingConfig.of(config), mixed_precision=mixed_precision)
    if accelerator.mixed_precision == "fp16":
        raise ConfigError(
            "fp16 needs loss scaling, which a plain training loop does not include", hint="use Accelerator, or bf16"
        )
    model = accelerator.prepare_model(model)
    if optimizer is not None:
        accelerator.prepare_optimizer(optimizer)
        check_parameters(optimizer, [model], accelerator.num_processes)
    loader = accelerator.prepare_data_loader(dataloader) if dataloader is not None else None
    return model, optimizer, loader
