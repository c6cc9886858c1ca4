"""Shard a model according to its settings. Only this module translates a `ShardingConfig` into calls to the engine."""

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from accelerate.utils import AutocastKwargs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.api.plugin import (
    FullyShardedDataParallelPlugin,
    configured_policy,
    dtype_or_none,
    modules_matching,
    policy_of,
)
from fullshard.api.state import ProcessState
from fullshard.checkpoint.adapters import HOW_TO_SAVE_INNER, carries_adapters, is_adapted, is_saved_as_adapters
from fullshard.checkpoint.full_state import gather_when_all_save
from fullshard.checkpoint.live_adapters import use_sharded_methods
from fullshard.checkpoint.quantities import conversion_of, quantize_rest
from fullshard.comm import device as devices
from fullshard.comm.mesh import init_mesh
from fullshard.config.schema import PrecisionConfig, RunConfig, ShardingConfig
from fullshard.core.dtypes import AUTOCAST, main_dtype
from fullshard.core.errors import ConfigError
from fullshard.core.sizes import format_count, format_nbytes
from fullshard.engine.kinds import kind_of
from fullshard.engine.lookup import require_module
from fullshard.engine.precision import cast_floating, dtype_name, torch_dtype
from fullshard.features import FSDPModule, OffloadPolicy, describe, keep_head, keep_unsharded, shard_model
from fullshard.features.quantized_weights.quantize import quantize
from fullshard.features.recompute import checkpoint_modules, compile_modules
from fullshard.features.unit_selection import embedding_modules, unit_modules
from fullshard.wrap.policies import WrapPolicy

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_OUTER, _HAS_SETTINGS = "_fullshard_outer_forward", "_fullshard_has_settings"


def shard(
    model: ModuleT,
    settings: RunConfig,
    process: ProcessState,
    say: Callable[[str], None],
    *,
    plugin: FullyShardedDataParallelPlugin | None,
    autocast: AutocastKwargs,
    device_mesh: DeviceMesh | None = None,
) -> ModuleT:
    """Shard `model` in place, and report to the user on every rank how it is sharded.

    If the model has no parameters, only move it to the device. `plugin` provides the settings that are objects:
    modules, functions and a wrap policy. Scripts may change these settings at any time.
    """
    require_module(model)
    if next(model.parameters(), None) is None:
        return model.to(process.device)
    config, precision = settings.sharding, settings.precision
    if device_mesh is not None:
        _check_split(model, device_mesh)
    if plugin is not None:  # the settings' expression is in it, unless a script has taken it out
        ignored = plugin.ignored_module_list(model)
    else:
        ignored = modules_matching(model, config.ignored_modules) if config.ignored_modules is not None else []
    if ignored and not {id(module) for module in ignored} & {id(module) for module in model.modules()}:
        say(f"ignored_modules: no ignored module is in {type(model).__name__}, so the entire model is sharded")
    _quantize(model, config.quantize, say)
    policy = configured_policy(config) if plugin is None else plugin.wrap_policy()
    units = _units(model, policy, ignored, process)
    apart = embedding_modules(model) if config.wrap_embeddings else ()
    _upcast(model, precision.mode, say)
    _change_forwards(model, units, config)
    _change_dtypes(model, precision, autocast, process.device)
    mesh = None
    if device_mesh is not None:
        mesh = init_mesh(device_mesh=device_mesh["dp_replicate", "dp_shard_cp"], device=process.device)
    shard_model(
        model,
        unit_modules=[*units, *apart],
        ignored_params=[parameter for module in ignored for parameter in module.parameters()],
        mesh=mesh,
        strategy=config.resolved_strategy(),
        shard_size=config.resolved_shard_size(process.environment.local_world_size),
        mp_policy=policy_of(precision),
        offload_policy=OffloadPolicy(**dataclasses.asdict(config.offload)),
        forward_prefetch=config.forward_prefetch,
        backward_prefetch=config.backward_prefetch,
        sync_module_states=config.sync_module_states,
        param_init_fn=None if plugin is None else plugin.param_init_fn,
        device=process.device,
    )
    if apart:
        keep_head(apart[1])
    training = settings.training
    model.set_nonfinite_gradients(training.nonfinite_gradients, limit=training.nonfinite_limit)  # type: ignore[operator]
    model.set_replica_check(training.replica_check, every=training.compare_every)  # type: ignore[operator]
    for module in ignored:
        module.to(process.device)
    if is_adapted(model):
        use_sharded_methods(model)
    if hasattr(model, "save_pretrained"):
        gather_when_all_save(model)
    _say_how(model, config, process, say)
    if config.keeps_what_fits:
        ranks = process.environment.local_world_size
        keep_unsharded(model, budget_nbytes=config.unsharded_memory_nbytes, ranks_on_host=ranks, say=say)
    model.__dict__[_HAS_SETTINGS] = True
    return model


def adopt(model: nn.Module, settings: RunConfig, autocast: AutocastKwargs, device: torch.device, *, tiles: int) -> None:
    """Run the forward of an already sharded model under autocast, and refuse settings that would come too late.

    `tiles` is the number of ranks that get the same batch because they share each split layer.
    """
    if _HAS_SETTINGS in model.__dict__:
        return
    if (split := getattr(model, "_tp_size", None) or 1) not in (1, tiles):
        raise ConfigError(
            f"{split} ranks share each layer of {type(model).__name__}, but would get different batches",
            hint=f"pass Accelerator(parallelism_config=ParallelismConfig(tp_size={split}, dp_shard_size=...))",
        )
    names = ("activation_checkpointing", "compile", "quantize")
    if given := [f"sharding.{name}" for name in names if getattr(settings.sharding, name)]:
        raise ConfigError(
            f"{', '.join(given)} cannot be applied to a {type(model).__name__} that is already sharded",
            hint="use model.gradient_checkpointing_enable(), layer.compile() or from_pretrained(quantize=) instead",
        )
    _change_dtypes(model, settings.precision, autocast, device)
    model.__dict__[_HAS_SETTINGS] = True


def _quantize(model: nn.Module, form: str | None, say: Callable[[str], None]) -> None:
    """Quantize at rest what bitsandbytes left in 16 bits and, if `form` is set, all large frozen weights."""
    quantize_rest(model)
    if form is not None:
        say(f"{type(model).__name__}: {quantize(model, form)}")
    conversion = conversion_of(model)
    conversion.require()
    if conversion.converted or (conversion.at_rest and form is None):
        say(f"{type(model).__name__}: {conversion.said}")
    if conversion.said_of_adapters:
        say(conversion.said_of_adapters)


def _say_how(model: nn.Module, config: ShardingConfig, process: ProcessState, say: Callable[[str], None]) -> None:
    """Report how the model is sharded, and which requested settings have no effect here."""
    sharding, asked = describe(model), config.resolved_strategy().name
    say(f"{type(model).__name__}: {sharding}")
    kind = process.device.type
    count, what = (os.cpu_count() or 1, "processors") if kind == "cpu" else (devices.count(kind), "devices")
    if count > 1 and not process.environment.launched:
        say(f"no launcher started this process: on the {count} {what} of this host, use `fullshard launch SCRIPT`")
    if sharding.strategy not in ("", asked):
        say(
            f"{asked} with a shard group of {sharding.shard_size} of {sharding.world_size} ranks is {sharding.strategy}"
        )
    if carries_adapters(model) and not is_saved_as_adapters(model):
        say(
            "save_model will refuse this model: it contains adapters, which a plain model does not have\n"
            f"hint: {HOW_TO_SAVE_INNER}"
        )
    if config.offload.has_shards and not sharding.offload:
        held = format_nbytes(sharding.rank_nbytes)
        say(f"CPU offload saves no memory here: the {held} of this rank are already in host memory")
    if config.offload.activations and not sharding.offload:
        say("activation offload saves no memory here: on a CPU, the activations are already in host memory")


def _check_split(model: nn.Module, device_mesh: DeviceMesh) -> None:
    """Refuse a model that is not split for tensor parallelism, because all ranks of a group would do the same work."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigError(
            f"parallelism_config has tp_size = {device_mesh['tp'].size()}, but no layer of {type(model).__name__} is "
            "split",
            hint=(
                "before prepare, call torch.distributed.tensor.parallel.parallelize_module(model, "
                "accelerator.torch_device_mesh['tp'], plan)"
            ),
        )


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model itself is sharded, rather than only some of its modules."""
    return isinstance(model, FSDPModule)


def remove_autocast(model: nn.Module) -> None:
    """Remove the autocast and the output cast that `shard` added to the forward of `model`."""
    outer = model.__dict__.pop(_OUTER, None)
    if outer is not None:
        del model.__dict__["forward"]
        if outer.inner is not None:
            model.forward = outer.inner


def _units(
    model: nn.Module, policy: WrapPolicy, ignored: Sequence[nn.Module], process: ProcessState
) -> list[nn.Module]:
    """Return the modules that become units. All ranks select the same modules, but only the main rank warns."""
    outside = {id(inner) for module in ignored for inner in module.modules()}
    with warnings.catch_warnings():
        if not process.environment.is_main:
            warnings.simplefilter("ignore")
        units = unit_modules(model, policy)
    return [module for module in units if id(module) not in outside]


def _change_forwards(model: nn.Module, units: list[nn.Module], config: ShardingConfig) -> None:
    """Apply activation checkpointing to the units, and then compile their forward, including the checkpointing."""
    if config.activation_checkpointing:
        if not units:
            raise ConfigError(
                f"activation_checkpointing recomputes one unit at a time, but {type(model).__name__} is a single unit",
                hint="wrap its repeated block, or remove activation_checkpointing",
            )
        checkpoint_modules(
            model,
            units,
            reentrant=config.activation_checkpointing_reentrant,
            selective=config.activation_checkpointing_mode == "selective",
        )
    if config.compile:
        compile_modules(
            units or [model],
            backend=config.compile_backend,
            fullgraph=config.compile_fullgraph,
            dynamic=config.compile_dynamic,
            # Backends other than inductor refuse a mode; the default one needs none.
            **{} if config.compile_mode == "default" else {"mode": config.compile_mode},
        )


def _upcast(model: nn.Module, mode: str, say: Callable[[str], None]) -> None:
    """Keep float32 main weights for trainable half-precision parameters, if the precision mode requires them."""
    half = []
    for parameter in model.parameters():
        stored = dtype_name(parameter.dtype)
        wanted = main_dtype(stored, trainable=parameter.requires_grad, mode=mode)
        if wanted != stored:
            kind = kind_of(parameter)
            kind.set_plain(parameter, kind.plain(parameter).to(torch_dtype(wanted)))
            half.append(parameter)
    if half:
        count = format_count(sum(p.numel() for p in half))
        say(f"{type(model).__name__}: {count} trainable parameters stored in half precision get float32 main weights")


@dataclass(frozen=True, slots=True)
class _Outer:
    """The autocast and output dtype that a root's forward adds. `inner` is the instance's own forward, if any."""

    autocast: Callable[[], AbstractContextManager[Any]]
    output_dtype: torch.dtype | None
    inner: Callable[..., Any] | None


def _change_dtypes(model: nn.Module, precision: PrecisionConfig, options: AutocastKwargs, device: torch.device) -> None:
    """In the modes bf16, fp16 and fp8, run the forward of the root under autocast. Cast its outputs if configured."""
    dtype, output_dtype = dtype_or_none(precision.compute_dtype), dtype_or_none(precision.result_dtype)
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    if precision.mode in AUTOCAST and dtype in (torch.bfloat16, torch.float16):
        autocast = functools.partial(
            torch.autocast, device.type, dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )
    elif output_dtype is None:
        return
    # A bound method, as in `features.recompute`: no wrapper in the module tree, and a deep copy is bound to itself.
    model.__dict__[_OUTER] = _Outer(autocast, output_dtype, model.__dict__.get("forward"))
    model.forward = MethodType(_outer_forward, model)


def _outer_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    outer: _Outer = self.__dict__[_OUTER]
    inner = outer.inner if outer.inner is not None else MethodType(type(self).forward, self)
    with outer.autocast():
        output = inner(*args, **kwargs)
    return cast_floating(output, outer.output_dtype)
