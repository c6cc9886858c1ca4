"""Convert Accelerate's plugin objects to fullshard's."""

import dataclasses
import math
import os
from typing import Any

from accelerate import ParallelismConfig as TheirParallelism
from accelerate.utils import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig, TorchDynamoPlugin

from fullshard.api.plugin import FullyShardedDataParallelPlugin
from fullshard.config.axes import AxesConfig
from fullshard.config.dialect import Reading, Setting
from fullshard.config.handover import handed_over
from fullshard.config.origin import Origin
from fullshard.core.errors import ConfigError, plural
from fullshard.core.strategy import Axis, parse_strategy
from fullshard.launch.environment import read_rank_environment

_AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


def own_plugin(plugin: Any) -> FullyShardedDataParallelPlugin:
    """Convert Accelerate's plugin to fullshard's. A field that still has Accelerate's default counts as unset."""
    untouched, chosen = type(plugin)(fsdp_version=plugin.fsdp_version), {}
    for field in dataclasses.fields(FullyShardedDataParallelPlugin):
        value = _translated(plugin, field.name)
        # In Accelerate, this default depends on the FSDP version, so without a launcher it counts as chosen.
        counts = field.name == "state_dict_type" and handed_over() is None
        if field.name in ("state_dict_config", "optim_state_dict_config"):
            continue  # Accelerate derives these from the type
        if value is not None and (counts or value != _translated(untouched, field.name)):
            chosen[field.name] = value
    return FullyShardedDataParallelPlugin(**chosen)


def _translated(plugin: Any, name: str) -> Any:
    """Return a field of Accelerate's plugin. For a wrap policy that is a plain torch function, return its name."""
    named = {"transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "size_based_auto_wrap_policy": "SIZE_BASED_WRAP"}
    value = getattr(plugin, name, None)
    return named.get(getattr(value, "__name__", ""), value) if name == "auto_wrap_policy" else value


def take_changes(ours: FullyShardedDataParallelPlugin, theirs: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Copy a script's changes to Accelerate's plugin since `before` into fullshard's, and return its fields."""
    plugin = own_plugin(theirs)
    said = {field.name: plugin.said(field.name) for field in dataclasses.fields(plugin)}
    vars(ours).update({name: value for name, value in said.items() if value != before.get(name, value)})
    return said


def compilation(plugin: Any, backend: str | None) -> dict[str, Any]:
    """Return the `torch.compile` settings, keyed by launcher option, from `plugin` or else from `backend`."""
    if plugin is None:
        return {"dynamo_backend": backend}
    if not isinstance(plugin, TorchDynamoPlugin):
        raise ConfigError(
            f"dynamo_plugin has the wrong type {type(plugin).__name__}", hint="use accelerate.utils.TorchDynamoPlugin"
        )
    if backend is not None:
        raise ConfigError("dynamo_plugin and dynamo_backend both select a compiler", hint="remove one of them")
    if plugin.options:
        raise ConfigError(
            f"dynamo_plugin: compiler options are not supported, got options = {plugin.options!r}",
            hint="set them in torch._inductor.config before you create the Accelerator",
        )
    name = "no" if plugin.disable else plugin.backend.value.lower()
    if name == "no" and not plugin.disable:
        return {}
    fields = {"mode": plugin.mode, "use_fullgraph": plugin.fullgraph, "use_dynamic": plugin.dynamic}
    return {"dynamo_backend": name} | {f"dynamo_{field}": value for field, value in fields.items()}


def tensor_parallel_size(config: Any) -> int:
    """Return the number of ranks in a tensor-parallel group, or 1 if there is no `ParallelismConfig`."""
    return getattr(config, "tp_size", None) or 1


def parallelism(config: Any, plugin: Reading) -> Reading:
    """Return the sharding strategy, the shard size and the sizes of axes that a `ParallelismConfig` requests.

    Parameters are sharded over the axes dp_shard, cp and sp. Whether they are freed after forward depends only on the
    strategy in the plugin.
    """
    reading = Reading()
    if config is None:
        return reading
    if not isinstance(config, TheirParallelism):
        raise ConfigError(
            f"parallelism_config has the wrong type {type(config).__name__}", hint="use fullshard.ParallelismConfig"
        )
    sizes = {f"{axis}_size": getattr(config, f"{axis}_size", None) or 1 for axis in _AXES}
    ranks = read_rank_environment().world_size
    if math.prod(sizes.values()) == 1:  # Accelerate reads sizes from the environment, where they may be missing
        return reading
    if math.prod(sizes.values()) != ranks:
        said = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name.startswith("dp_")]
        raise ConfigError(
            f"parallelism_config: {' x '.join(said)} does not match the job, which has {plural(ranks, 'rank')}"
        )
    origin = Origin.argument("parallelism_config")
    for name in ("cp_size", "sp_size"):
        reading.settings.append(Setting(f"parallelism.{name}", sizes[name], origin, name))
    replicas, shards = sizes["dp_replicate_size"], sizes["dp_shard_size"] * sizes["cp_size"] * sizes["sp_size"]
    if replicas == 1:
        return reading
    named = plugin.setting("sharding.strategy")
    row = parse_strategy("NO_SHARD" if shards == 1 else named.value if named is not None else "FULL_SHARD")
    if shards > 1:
        row = row.with_axes(*Axis)
    reading.settings.append(Setting("sharding.strategy", row.name, origin, "dp_replicate_size"))
    if shards > 1:
        reading.settings.append(Setting("sharding.shard_size", shards, origin, "dp_shard_size"))
    return reading


@dataclasses.dataclass(repr=False)
class ParallelismConfig(TheirParallelism):  # type: ignore[misc]
    """Accelerate's `ParallelismConfig`. Its `sp_backend` may also be `fullshard`, which needs no other package."""

    def __post_init__(self) -> None:
        backend = self.sp_backend or os.environ.get("PARALLELISM_CONFIG_SP_BACKEND", "deepspeed")
        self.sp_backend: Any = "deepspeed" if backend == "fullshard" else backend  # Accelerate knows only this one
        super().__post_init__()
        self.sp_backend = backend


def parallelism_config(axes: AxesConfig, replicas: int, shards: int, tiles: int) -> ParallelismConfig:
    """Return the `ParallelismConfig` with the sizes and options that the settings contain."""
    handled = axes.sp_seq_length, axes.sp_seq_length_is_variable, axes.sp_attn_implementation
    try:
        return ParallelismConfig(
            dp_replicate_size=replicas,
            dp_shard_size=shards,
            tp_size=tiles,
            cp_size=axes.cp_size,
            sp_size=axes.sp_size,
            sp_backend=axes.sp_backend,
            cp_handler=TorchContextParallelConfig(axes.cp_comm_strategy) if axes.cp_size > 1 else None,
            sp_handler=DeepSpeedSequenceParallelConfig(*handled) if axes.sp_size > 1 else None,
        )
    except ValueError as error:  # Accelerate does not combine some sizes
        raise ConfigError(f"parallelism: {error}", hint="change the sizes") from None
