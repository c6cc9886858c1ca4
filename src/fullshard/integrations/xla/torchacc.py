"""`fullshard.torchacc` on top of PyTorch/XLA: TorchAcc's configuration, with FSDP through XLA's SPMD."""

import os
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from fullshard.config.resolve import resolve
from fullshard.config.torchacc import Config
from fullshard.core.errors import ConfigError
from fullshard.integrations.xla.model import batches, prepare
from fullshard.integrations.xla.settings import XlaSettings

__all__ = ["Config", "accelerate", "mark_step", "sync"]


def accelerate(
    model: nn.Module,
    dataloader: DataLoader[Any] | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Any:
    """Shard a model in place over the XLA devices of this host. Create the optimizer afterwards.

    Args:
        model: The model, on the CPU.
        dataloader: A loader of global batches, because one process drives all devices.
        config: A `Config`, a dict, or the path of a file with its fields.

    Returns:
        `(model, dataloader)`, or only the model if no loader was given.

    Raises:
        ConfigError: If PyTorch/XLA does not support a field.
        WrapError: If the config names a module class that does not occur in the model.
    """
    config = Config.of(config)
    config.validate()
    given = config.entries()
    for name in ("memory.gc_cls", "memory.gc_cnt", "dist.dp.size", "dist.topology", *_LENGTHS):
        if name in given:
            raise ConfigError(
                f"{given[name].origin}: {name} is only supported by fullshard's engine, not by PyTorch/XLA",
                hint="remove it",
            )
    resolved = resolve([config.reading()])
    for note in resolved.notes:
        warnings.warn(str(note), stacklevel=2)
    model = prepare(model, XlaSettings.from_resolved(resolved, config.dist.fsdp.shard_output_callable))
    return model if dataloader is None else (model, batches(dataloader, model))


_LENGTHS = ("dataloader.buckets", "dataloader.max_length", "dataloader.num_buckets", "dataloader.pad_value_dict")


def sync(wait: bool = False) -> None:
    """Run the recorded operations. If `wait` is set, return only when they have finished."""
    import torch_xla

    torch_xla.sync(wait=wait)


mark_step = sync


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"fullshard.torchacc has no {name!r} when training with PyTorch/XLA (torch {torch.__version__}); use "
        "fullshard.integrations.xla to save and load"
    )
