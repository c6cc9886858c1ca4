"""`torchacc.accelerate`, which shards a model and distributes its data in one call."""

import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader

from fullshard.api.accelerator import Accelerator
from fullshard.api.collectives import broadcast_object
from fullshard.api.plugin import say_once
from fullshard.api.sharding import is_sharded
from fullshard.checkpoint.tensors import device_of
from fullshard.config.resolve import Resolved, resolve
from fullshard.config.torchacc import Config, check_sizes
from fullshard.core.errors import ConfigError, plural
from fullshard.features import clip_grad_norm_
from fullshard.features.recompute import checkpoint_modules
from fullshard.features.unit_selection import unit_modules
from fullshard.integrations.torchacc.amp import require_scaler
from fullshard.integrations.torchacc.eager import joined
from fullshard.integrations.torchacc.loader import AsyncLoader
from fullshard.integrations.torchacc.saving import shard_metadata, whole_optimizer_state
from fullshard.wrap.policies import Auto, ByClass


class AcceleratedModel:
    """A mixin that `accelerate` adds to the class of the model.

    `accelerate` returns the model that it received, so that all attributes remain: `model.config` is still Hugging
    Face's, and `generate` works.
    """

    @property
    def device(self) -> torch.device:
        """Return the device on which this rank computes."""
        return device_of(self)  # type: ignore[arg-type]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`. Return the previous norm."""
        return clip_grad_norm_(self, max_norm, norm_type)  # type: ignore[arg-type]

    def get_shard_metadata(self) -> dict[str, Any]:
        """Return a description of which slices of the parameters this rank holds.

        Save it together with `state_dict()`, because the files of all ranks cannot be combined without it.
        """
        return shard_metadata(self)  # type: ignore[arg-type]

    def sharded_optim_state_dict(self, optim: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state on this rank."""
        return optim.state_dict()

    def full_optim_state_dict(
        self, optim: torch.optim.Optimizer, rank0_only: bool = True, cpu_offload: bool = True
    ) -> dict[str, Any]:
        """Return the optimizer's state with unsharded tensors. All ranks must call this.

        With `rank0_only`, the result is empty on all ranks other than rank 0.
        """
        keep = not rank0_only or joined().environment.is_main
        whole = whole_optimizer_state(optim.state_dict(), keep=keep, cpu=cpu_offload)
        return whole if keep else {}

    def optim_state_dict_to_load(
        self, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any], rank0_only: bool = True
    ) -> dict[str, Any]:
        """Return the state to pass to `optim.load_state_dict`.

        With `rank0_only`, rank 0 sends its state to the other ranks, so all ranks must call this.
        """
        return broadcast_object(optim_state_dict) if rank0_only else optim_state_dict

    def forward_backward(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise `ConfigError`, because TorchAcc's method is for pipeline parallelism, which is not supported."""
        raise ConfigError(
            "forward_backward belongs to pipeline parallelism, which is not supported",
            hint="use loss = model(...); loss.backward()",
        )


def accelerate(
    model: nn.Module,
    dataloader: DataLoader[Any] | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Any:
    """Shard a model in place and distribute a data loader over the ranks. The training loop does not change.

    All ranks start from rank 0's weights. The loader's batch size applies to each rank, and each sample goes to one
    rank. Create the optimizer afterwards, from `model.parameters()`.

    Args:
        model: The model, on any device.
        dataloader: The data loader. Its batches are moved to the rank's device.
        config: A `Config`, a dict, or the path of a YAML file with its fields. By default, all fields have their
            defaults, so every rank holds the unsharded model.

    Returns:
        `(model, dataloader)`, or only the model if no loader was given.

    Raises:
        ConfigError: If a field is not supported on these ranks, or if the model is sharded already.
        WrapError: If the config names a module class that does not occur in the model.
    """
    config = Config.of(config)
    config.validate()
    if is_sharded(model):
        raise ConfigError(f"{type(model).__name__} is already sharded", hint="call accelerate once per model")
    if dataloader is not None and not isinstance(dataloader, DataLoader):
        raise ConfigError(
            f"dataloader is a {type(dataloader).__name__}, so its data cannot be split across the ranks",
            hint="pass a torch.utils.data.DataLoader, or wrap the data of each rank in AsyncLoader",
        )
    check_sizes(config.entries(), joined().environment.world_size)
    resolved = resolve([config.reading()])
    say_once(resolved.notes)
    accelerator = _accelerator(model, config, resolved)
    model = accelerator.prepare_model(model)
    cls = type(model)
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    model.__class__ = type(cls.__name__, (AcceleratedModel, cls), names)
    if accelerator.mixed_precision == "fp16":
        require_scaler(model)
    if dataloader is None:
        return model
    buckets = config.dataloader
    return model, AsyncLoader(
        accelerator.prepare_data_loader(dataloader, device_placement=False),
        accelerator.device,
        buckets=buckets.buckets,
        max_length=buckets.max_length,
        num_buckets=buckets.num_buckets,
        pad_value_dict=buckets.pad_value_dict,
    )


def _accelerator(model: nn.Module, config: Config, resolved: Resolved) -> Accelerator:
    sharding = resolved.config.sharding
    memory = config.memory
    if memory.gc and (memory.gc_cls is not None or memory.gc_cnt is not None):
        names = config.dist.fsdp.wrap_layer_cls if memory.gc_cls is None else memory.gc_cls
        modules = unit_modules(model, ByClass(tuple(sorted(names))) if names else Auto())
        if memory.gc_cnt is not None and memory.gc_cnt > len(modules):
            raise ConfigError(
                f"config.memory.gc_cnt = {memory.gc_cnt}, but {type(model).__name__} has only "
                f"{plural(len(modules), 'module')} of {sorted({type(module).__name__ for module in modules})}",
                hint="remove gc_cnt to checkpoint all modules",
            )
        checkpoint_modules(model, modules[: memory.gc_cnt])
        sharding = sharding.model_copy(update={"activation_checkpointing": False})
    mode = resolved.settings.get("precision.mode")
    return Accelerator(fsdp_plugin=sharding, mixed_precision=None if mode is None else mode.value)
