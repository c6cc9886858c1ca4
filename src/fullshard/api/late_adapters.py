"""PEFT adapters that are added to a model after it was sharded, as `from_pretrained(distributed_config=...)` does.

The adapters of each unit become another unit over the same ranks. Adapters on experts that expert parallelism
distributes are also parameters of all ranks. In forward, each rank adds to its own experts their part of the adapter.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.adapters import is_adapted
from fullshard.checkpoint.full_state import gather_when_all_save
from fullshard.checkpoint.live_adapters import use_sharded_methods
from fullshard.comm.mesh import init_mesh
from fullshard.core.errors import ConfigError
from fullshard.engine.fully_shard import fully_shard
from fullshard.engine.lookup import require_unit, unit_of
from fullshard.engine.parameter import sharded_parameter_of
from fullshard.features import CPUOffloadPolicy, FSDPModule
from fullshard.features.meta_device.initialize import take_from_rank_0

_ACTIVE = "_fullshard_active_adapters"


def is_sharded_inside(model: nn.Module) -> bool:
    """Return whether `model` is a PEFT model around a model that is sharded."""
    inner: Any = model
    return is_adapted(model) and isinstance(inner.get_base_model(), FSDPModule)


def shard_adapters(model: Any) -> None:
    """Shard the adapters of a PEFT model whose base model is already sharded. All ranks use the values of rank 0.

    Raises:
        ConfigError: Tensor parallelism has split a layer, but not its adapter, or parameters other than those of
            adapter layers were added.
    """
    base = model.get_base_model()
    managed = {parameter for parameter in model.parameters() if sharded_parameter_of(parameter) is not None}
    added = [(name, p) for name, p in model.named_parameters() if p not in managed]
    groups: dict[int, list[nn.Module]] = {}
    reached: set[int] = set()
    outermost, tiles = require_unit(base), getattr(base, "_tp_size", None) or 1
    for layer, unit in _adapter_layers(base, outermost):
        groups.setdefault(id(unit), []).append(layer)
        reached.update(id(parameter) for parameter in layer.parameters())
        _check_split(layer, tiles)
    if other := [name for name, parameter in added if id(parameter) not in reached]:
        raise ConfigError(
            f"{', '.join(other[:3])} was added to a model that is already sharded, and is not in an adapter layer",
            hint="load the base without distributed_config, add the adapters, then shard it",
        )
    whole_mesh = outermost.mesh if tiles == 1 else init_mesh(device=outermost.mesh.device)
    take_from_rank_0([p.detach() for _, p in added if not isinstance(p, DTensor)], whole_mesh)
    take_from_rank_0([p.to_local().detach() for _, p in added if isinstance(p, DTensor)], outermost.mesh)
    for module in model.modules():
        if hasattr(module, "_activate_lora") and _ACTIVE in module.get_base_layer().__dict__:
            module._activate_lora = _adds_inside(module)
    options: dict[str, Any] = {"mesh": outermost.mesh, "mp_policy": outermost.policy, "ignored_params": managed}
    if outermost.storage.offload.has_shards:
        options["offload_policy"] = CPUOffloadPolicy()
    base.set_reshard_after_forward(False, recurse=False)  # as before, when it was the outermost unit
    for layers in groups.values():
        fully_shard(layers, **options)
    fully_shard(model, **options)
    use_sharded_methods(model)
    gather_when_all_save(model)


def _adapter_layers(module: nn.Module, unit: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the outermost adapter layers in `module`, each with the unit that contains it."""
    for child in module.children():
        if hasattr(child, "adapter_layer_names"):
            yield child, unit
        else:
            yield from _adapter_layers(child, unit_of(child) or unit)


def _check_split(layer: Any, tiles: int) -> None:
    """Refuse an adapter whose layer is split among ranks, unless the adapter is split, too."""
    base, kind = layer.get_base_layer(), f"{type(layer).__module__}.{type(layer).__name__}"
    if _ACTIVE in base.__dict__:
        is_right = tiles == 1
    else:
        sharded = map(sharded_parameter_of, base.parameters(recurse=False))
        is_split = any(one is not None and one.spec.beside is not None for one in sharded)
        is_plain = kind == "peft.tuners.lora.layer.Linear" and not layer.lora_magnitude_vector
        is_right = not is_split or (is_plain and getattr(base, "_hf_tp_plan", None) in ("colwise", "rowwise"))
    if not is_right:
        raise ConfigError(
            f"tensor parallelism splits a {type(base).__name__}, but its adapter {kind} cannot be split",
            hint="add LoRA to linear layers that Transformers splits, or load the model with tp_size=1",
        )


def _adds_inside(wrapper: Any) -> Any:
    """Return a replacement for PEFT's `_activate_lora`. PEFT's own would add values for the experts of all ranks."""
    active: list[tuple[Any, str]] = wrapper.get_base_layer().__dict__[_ACTIVE]

    @contextlib.contextmanager
    def activate_lora(names: list[str]) -> Iterator[None]:
        added = [(wrapper, name) for name in names if name in wrapper.lora_A]
        active.extend(added)
        try:
            yield
        finally:
            del active[len(active) - len(added) :]

    return activate_lora


def let_adapters_in(experts: Any, mesh: DeviceMesh) -> None:
    """Make the forward of experts add the active adapters. Call this before the experts are distributed over `mesh`."""
    forward, active = experts.forward, experts.__dict__.setdefault(_ACTIVE, [])
    rank = mesh.get_local_rank()

    def adapted(*args: Any, **kwargs: Any) -> Any:
        held = dict(experts._parameters)
        try:
            for wrapper, name in active:
                weight = experts._parameters[wrapper.parameter_name]
                experts._parameters[wrapper.parameter_name] = _add(wrapper, name, weight, rank * len(weight))
            return forward(*args, **kwargs)
        finally:
            experts._parameters.update(held)

    experts.forward = adapted


def _add(wrapper: Any, name: str, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Return `weight`, which holds the experts from number `first`, plus their part of an adapter."""
    own = slice(first, first + len(weight))
    if weight.ndim == 2:  # biases: one row per expert
        bias: torch.Tensor = weight + wrapper.get_delta_weight(name)[own]
        return bias
    a, b, count = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    a = a.reshape(count, -1, a.shape[-1])[own].to(weight.dtype)  # (experts, rank, in)
    b = b.reshape(b.shape[0], -1, count)[..., own].to(weight.dtype)  # (out, rank, experts)
    is_out_by_in = wrapper._did_swap_in_out_features
    factors = (b.permute(2, 0, 1), a) if is_out_by_in else (a.mT, b.permute(2, 1, 0))
    return torch.baddbmm(weight, *factors, alpha=wrapper.scaling[name])
