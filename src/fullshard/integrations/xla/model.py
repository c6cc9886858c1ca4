"""Move a model to a mesh of XLA devices, and annotate its tensors so that XLA's compiler implements FSDP."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.config.xla import require_xla
from fullshard.core.errors import CheckpointError, ConfigError, WrapError
from fullshard.integrations.xla.settings import XlaSettings

_AXES = ("replicate", "fsdp")
_STATE = "_fullshard_xla"


@dataclass(frozen=True, slots=True)
class Sharded:
    """Holds the settings of a prepared model and its mesh, whose shape is (replicas, devices per shard group)."""

    mesh: Any
    settings: XlaSettings

    def place(self, tensor: torch.Tensor, dims: tuple[Any, ...]) -> torch.Tensor:
        """Move a tensor to the devices, divided over axes of the mesh.

        `dims` names the mesh axis over which each dim of the tensor is divided, or None for a dim that is not divided.
        """
        import torch_xla.distributed.spmd as spmd

        moved = tensor.detach().to("xla")
        if any(dims):
            spmd.mark_sharding(moved, self.mesh, dims)
        return moved

    def place_parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a parameter to the devices with its largest dim divided over a shard group, as FSDPv2 does."""
        largest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim], default=None)
        return self.place(tensor, tuple("fsdp" if dim == largest else None for dim in range(tensor.dim())))

    def annotate(self, output: Any) -> None:
        """Divide dim 0 of every tensor in an output over all devices, or do what the settings' `shard_output` does."""
        import torch_xla
        import torch_xla.distributed.spmd as spmd

        if self.settings.shard_output is not None:
            self.settings.shard_output(output, self.mesh)
            return

        def divide(tensor: torch.Tensor) -> torch.Tensor:
            is_batch = tensor.dim() > 0 and tensor.shape[0] % self.mesh.size() == 0
            if is_batch and tensor.device.type == "xla" and not torch_xla._XLAC._get_xla_sharding_spec(tensor):
                spmd.mark_sharding(tensor, self.mesh, (_AXES, *[None] * (tensor.dim() - 1)))
            return tensor

        mapped(output, divide)


def prepare(model: nn.Module, settings: XlaSettings | None = None) -> nn.Module:
    """Shard a model in place over all XLA devices of this host. Create the optimizer afterwards.

    Call this function before the first backward pass of the process, because torch counts the devices at that time and
    ignores devices that appear later.

    Args:
        model: The model, on the CPU. It keeps its class, names, hooks, and tied weights.
        settings: The settings. By default, all devices form one shard group, and the units come from the model's own
            list of layers.

    Raises:
        ConfigError: If PyTorch/XLA is not available or runs in several processes, or if the shard size does not divide
            the number of devices.
        WrapError: If the settings name a module class that does not occur in the model.
    """
    settings = settings or XlaSettings()
    require_xla("fullshard.integrations.xla", "use fullshard.shard_model, which trains on the devices that it finds")
    if hasattr(model, _STATE):
        raise ConfigError(f"{type(model).__name__} is already sharded", hint="call prepare once per model")
    units = _units(model, settings)
    sharded = Sharded(_mesh(settings.shard_size), settings)
    _move(model, sharded)
    setattr(model, _STATE, sharded)
    if settings.bf16:
        model.forward = _in_bf16(model.forward)
    for unit in units:
        _make_unit(unit, sharded)
    model.register_forward_hook(lambda _module, _inputs, output: sharded.annotate(output))
    if settings.checkpointing and getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False  # type: ignore[union-attr]  # a cache would be filled twice
    return model


def sharded_state(model: nn.Module) -> Sharded:
    """Return the mesh and settings that `prepare` stored. Raise `ConfigError` if the model is not prepared."""
    found = getattr(model, _STATE, None)
    if not isinstance(found, Sharded):
        raise ConfigError(f"{type(model).__name__} is not sharded", hint="call xla.prepare(model) first")
    return found


def shard_batch(batch: Any, model: nn.Module) -> Any:
    """Move a global batch to the devices, with dim 0 of its tensors divided over all devices.

    Raises:
        ConfigError: If the size of a batch is not a multiple of the number of devices.
    """
    sharded = sharded_state(model)

    def place(value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 0:
            return value
        if value.shape[0] % sharded.mesh.size():
            raise ConfigError(
                f"a batch of {value.shape[0]} samples cannot be split across {sharded.mesh.size()} devices",
                hint="use a batch size that is a multiple of the number of devices, and drop_last=True",
            )
        return sharded.place(value, (_AXES, *[None] * (value.dim() - 1)))

    return mapped(dict(batch) if isinstance(batch, Mapping) else batch, place)


class batches:
    """An iterable over a loader's global batches on the devices. After each batch, recorded operations are run."""

    def __init__(self, loader: Iterable[Any], model: nn.Module) -> None:
        self.loader, self.model = loader, model

    def __iter__(self) -> Iterator[Any]:
        import torch_xla

        for batch in self.loader:
            yield shard_batch(batch, self.model)
            torch_xla.sync()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return unsharded copies of the model's parameters and buffers in host memory, under their state dict names."""
    import torch_xla

    torch_xla.sync()
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def sharded_state_dict(model: nn.Module) -> dict[str, list[tuple[str, Any, torch.Tensor]]]:
    """Return the part of each tensor that each device holds, keyed by the tensor's name.

    Each part is a tuple `(device, slices, elements)`. `slices` contains one slice for each dim of the unsharded tensor.
    Replicated parts are included for every device.
    """
    import torch_xla
    import torch_xla.distributed.spmd as spmd

    torch_xla.sync()
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tuple(slice(0, size) for size in tensor.shape)
        found[name] = [
            (str(shard.shard_device), indices, shard.data[tuple(slice(0, i.stop - i.start) for i in indices)])
            for shard in spmd.XLAShardedTensor(tensor.detach()).local_shards
            for indices in [whole if shard.indices is Ellipsis else tuple(shard.indices)]
        ]
    return found


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load unsharded tensors into the model, which stays sharded.

    Raises:
        CheckpointError: If names or shapes differ from the model's.
    """
    sharded = sharded_state(model)
    own = model.state_dict(keep_vars=True)
    if own.keys() != state.keys():
        name = min(own.keys() ^ state.keys())
        has, lacks = ("the model", "the state") if name in own else ("the state", "the model")
        raise CheckpointError(f"{has} has {name!r}, {lacks} does not")
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise CheckpointError(f"{name} has the shape {tuple(state[name].shape)}, expected {tuple(tensor.shape)}")
    for name, tensor in own.items():
        value = state[name].to(tensor.dtype)
        is_parameter = isinstance(tensor, nn.Parameter)
        # Copying into the tensor would drop the annotation.
        tensor.data = sharded.place_parameter(value) if is_parameter else sharded.place(value, ())


def _mesh(shard_size: int | None) -> Any:
    import numpy as np
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as runtime

    if runtime.process_count() > 1:
        raise ConfigError(
            "PyTorch/XLA runs in several processes", hint="start a single process, which drives all devices"
        )
    runtime.use_spmd()
    count = runtime.global_runtime_device_count()
    size = shard_size or count
    if count % size:
        raise ConfigError(f"shard_size = {size} does not divide {count} devices", hint=f"use a divisor of {count}")
    return spmd.Mesh(np.arange(count), (count // size, size), _AXES)


def _units(model: nn.Module, settings: XlaSettings) -> list[nn.Module]:
    """Return the modules that are units, innermost first, without the model itself, which is always a unit."""
    if settings.wrap_min_numel is not None:
        found: list[nn.Module] = []
        _units_by_size(model, settings.wrap_min_numel, found, set())
        return [module for module in found if module is not model]
    names = settings.wrap_classes or tuple(getattr(model, "_no_split_modules", None) or ())
    present = {type(module).__name__ for module in model.modules()}
    if missing := [name for name in settings.wrap_classes if name not in present]:
        raise WrapError(
            f"{type(model).__name__} has no module of class {missing[0]!r}", hint=f"use one of {sorted(present)}"
        )
    return [m for m in reversed(list(model.modules())) if type(m).__name__ in names and m is not model]


def _units_by_size(module: nn.Module, least: int, found: list[nn.Module], taken: set[nn.Parameter]) -> None:
    for child in module.children():
        _units_by_size(child, least, found, taken)
    own = set(module.parameters()) - taken
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) and sum(p.numel() for p in own) >= least:
        found.append(module)
        taken |= own


def _move(model: nn.Module, sharded: Sharded) -> None:
    """Move the model to the devices. Unlike `.to`, this keeps tied parameters tied."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in moved:
                    values = sharded.place_parameter(parameter)
                    moved[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                module._parameters[name] = moved[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = sharded.place(buffer, ())


def _make_unit(module: nn.Module, sharded: Sharded) -> None:
    import torch_xla.distributed.spmd.xla_sharding as xla_sharding
    from torch_xla.distributed.fsdp import checkpoint_module

    if sharded.settings.checkpointing:
        checkpoint_module(module)
    # Prevents the compiler from merging all backwards, which would need all weights in memory at the same time.
    xla_sharding.apply_backward_optimization_barrier(module)
    module.register_forward_hook(lambda _module, _inputs, output: sharded.annotate(output))


def _in_bf16(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("xla", dtype=torch.bfloat16):
            output = forward(*args, **kwargs)
        return mapped(output, lambda tensor: tensor.float() if tensor.dtype == torch.bfloat16 else tensor)

    return wrapped


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nested value, such as an output of Transformers, with `change` applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed: Any = copy.copy(value)
        for key, item in value.items():
            changed[key] = mapped(item, change)
        return changed
    if isinstance(value, list | tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
