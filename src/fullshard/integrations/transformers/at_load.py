"""Transformers' `from_pretrained(distributed_config=DistributedConfig(...))`, adapted to fullshard's engine.

Each rank reads only the data that it will own. The returned model is sharded. If the config requests tensor or expert
parallelism, Transformers first splits the layers or distributes the experts. The result is like that of `shard_model`,
so Trainer can save it and resume on any number of ranks.
"""

import contextlib
import functools
import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.api.late_adapters import let_adapters_in
from fullshard.checkpoint import pretrained
from fullshard.checkpoint.full_state import gather_when_all_save
from fullshard.comm.device import current
from fullshard.comm.mesh import Mesh, init_mesh, joined_world_size
from fullshard.core.errors import ConfigError, plural
from fullshard.core.imports import after_import
from fullshard.features import CPUOffloadPolicy, MixedPrecisionPolicy, shard_model
from fullshard.features.sequence_parallel.attention import exchange

_AXES = ("dp_replicate", "fsdp", "tp")
_OF_THE_LOADER = (
    *("_commit_hash", "_from_auto", "_from_pipeline", "adapter_kwargs", "low_cpu_mem_usage", "use_safetensors"),
    *("weights_only", "trust_remote_code", "code_revision"),
)
"""Options about reading files and trusting code, which are not needed because the class has been loaded."""
_EXCHANGE = "exchanging tokens among experts"
_INFERENCE_ONLY = "deepgemm_megamoe"
_REFUSED = (
    *("device_map", "max_memory", "offload_folder", "state_dict", "gguf_file", "output_loading_info"),
    *("tp_plan", "tp_size", "force_download", "proxies"),
)


def replace_from_pretrained(modeling: Any) -> None:
    """Make Transformers' `from_pretrained` in `modeling` load models with a `distributed_config` with fullshard."""
    cls = modeling.PreTrainedModel
    theirs = cls.from_pretrained.__func__

    @classmethod  # type: ignore[misc]
    @functools.wraps(theirs)
    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: Any, *args: Any, distributed_config: Any = None, **options: Any
    ) -> Any:
        if distributed_config is None:
            return theirs(cls, pretrained_model_name_or_path, *args, **options)
        if args:
            raise ConfigError(
                f"from_pretrained(distributed_config=...) got {len(args)} unexpected positional arguments",
                hint="pass options by name",
            )
        return load_sharded(cls, pretrained_model_name_or_path, distributed_config, **options)

    cls.from_pretrained = from_pretrained


def load_sharded(model_class: Any, name_or_path: str | Path, distributed_config: Any, **options: Any) -> nn.Module:
    """Load a model with `fullshard.from_pretrained`, split and sharded as a `DistributedConfig` or dict says.

    Raises:
        ConfigError: The sizes do not match the job or the experts, or an option places weights in another way.
    """
    config = _config(distributed_config)
    given = [name for name in _REFUSED if options.pop(name, None)]
    if given:
        raise ConfigError(
            f"from_pretrained(distributed_config=...) does not support {', '.join(given)}",
            hint="remove it; each rank reads the data it will own from a directory or the hub's cache",
        )
    options = {name: value for name, value in options.items() if name not in _OF_THE_LOADER and value is not None}
    if "torch_dtype" in options:
        options["dtype"] = options.pop("torch_dtype")
    device_mesh = _device_mesh(config)
    model: Any = pretrained.from_pretrained(model_class, name_or_path, **options)
    with _as_config_errors():
        tp_plan, ep_plan, fsdp_plan = model._resolve_parallel_plans(config)
    if device_mesh is not None and config.tp_size > 1:
        importlib.import_module("transformers.distributed.tensor_parallel").apply_tensor_parallelism(
            model, device_mesh["tp"], tp_plan
        )
        model.tie_weights()
        for name, layer in model.named_modules():
            if name in tp_plan:  # PEFT splits the adapters of these layers accordingly
                layer._hf_tp_plan, layer._hf_device_mesh = tp_plan[name], device_mesh["tp"]
    ep_size = getattr(config, "ep_size", None) or 1  # a setting since Transformers 5.20
    experts = {} if device_mesh is None or ep_size == 1 else _distribute(model, config, device_mesh, ep_plan)
    # PEFT must size adapters by the features of a layer, not by this rank's part of its weight.
    after_import("peft.tuners.tuners_utils", lambda tuners: setattr(tuners, "_torch_supports_distributed", False))
    # PEFT takes any size, even 1, for split layers.
    model._tp_size, model._fsdp_size = config.tp_size if config.tp_size > 1 else None, config.fsdp_size
    axes = ("dp_replicate", "fsdp") if config.dp_replicate_size > 1 else "fsdp"
    # Parameters that the plan keeps unsharded until backward belong to the outermost unit, which keeps them too.
    units = [model.get_submodule(name) for name, style in fsdp_plan.items() if style == "free_full_weight"]
    shard_model(
        model,
        unit_modules=[*experts, *units],
        strategy="HYBRID_SHARD" if config.dp_replicate_size > 1 else "FULL_SHARD",
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if config.fsdp_mixed_precision
        else None,
        offload_policy=CPUOffloadPolicy() if config.fsdp_cpu_offload else None,
        mesh=init_mesh(device_mesh=None if device_mesh is None else device_mesh[axes]),
        other_meshes=experts,
    )
    for each in experts:
        # The ranks that hold an expert have its gradients for the tokens of all batches, not of one batch per rank.
        each.set_gradient_divide_factor(float(config.dp_replicate_size * config.fsdp_size))
    gather_when_all_save(model)
    return model  # type: ignore[no-any-return]


def _config(given: Any) -> Any:
    home = importlib.import_module("transformers.distributed.configuration_utils")
    with _as_config_errors():
        config = home.DistributedConfig.from_dict(given) if isinstance(given, dict) else given
    if (getattr(config, "pp_size", None) or 1) > 1:
        raise ConfigError(
            f"DistributedConfig(pp_size={config.pp_size}) requests pipeline parallelism, which is not supported",
            hint="remove it",
        )
    return config


@contextlib.contextmanager
def _as_config_errors() -> Iterator[None]:
    """Raise a `ConfigError` for every error that Transformers raises about the sizes and plans of a config."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"DistributedConfig: {error}") from error


def _distribute(model: Any, config: Any, dense: DeviceMesh, plan: dict[str, str]) -> dict[Any, Mesh]:
    """Distribute the experts over `ep_size` ranks, as Transformers does. Return the mesh that each is sharded over."""
    how = config.ep_implementation
    if how == _INFERENCE_ONLY or getattr(model.config, "_experts_implementation", None) == _INFERENCE_ONLY:
        raise ConfigError(
            f"{_INFERENCE_ONLY} experts cannot be trained, because its kernel has no backward",
            hint='use ep_implementation="all_to_all" and another experts_implementation',
        )
    experts = [model.get_submodule(name) for name, style in plan.items() if style == "ep_dispatch_experts"]
    if not experts:
        raise ConfigError(
            f"DistributedConfig(ep_size={config.ep_size}): the expert-parallel plan of {type(model).__name__} matches "
            "no experts",
            hint='remove ep_size, or pass an ep_plan with an "ep_dispatch_experts" rule',
        )
    sizes = (config.dp_replicate_size, config.efsdp_size, config.ep_size)
    mesh = init_device_mesh(dense.device_type, sizes, mesh_dim_names=("dp_replicate", "efsdp", "ep"))
    for each in experts:
        let_adapters_in(each, mesh["ep"])
    home: Any = importlib.import_module("transformers.distributed.expert_parallel")
    home.all_to_all_single = torch.compiler.disable(_exchange_counts)  # names a rank that does not take part
    home.all_to_all_single_autograd = torch.compiler.disable(_exchange_tokens)
    with _as_config_errors():
        home.apply_expert_parallelism(model, mesh["ep"], dense["tp"], plan, how)
    return dict.fromkeys(experts, init_mesh(device_mesh=mesh["dp_replicate", "efsdp"]))


def _exchange_counts(received: torch.Tensor, sent: torch.Tensor, *, group: dist.ProcessGroup) -> None:
    received.copy_(exchange(sent, group, _EXCHANGE))


def _exchange_tokens(rows: torch.Tensor, received: Any, sent: Any, group: dist.ProcessGroup) -> torch.Tensor:
    return exchange(rows, group, _EXCHANGE, received, sent)


def _device_mesh(config: Any) -> DeviceMesh | None:
    """Return a mesh of all ranks with the sizes that the config sets. Return None if there is a single rank."""
    ranks = joined_world_size()
    sizes = (config.dp_replicate_size or 1, config.fsdp_size or 1, config.tp_size or 1)
    if math.prod(sizes) != ranks:
        said = " x ".join(f"{axis} {size}" for axis, size in zip(_AXES, sizes, strict=True))
        raise ConfigError(
            f"DistributedConfig describes {said}, but the job has {plural(ranks, 'rank')}",
            hint="set dp_replicate_size x fsdp_size x tp_size to the number of ranks",
        )
    return init_device_mesh(current().type, sizes, mesh_dim_names=_AXES) if ranks > 1 else None
