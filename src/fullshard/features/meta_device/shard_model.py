"""Shard a complete model in one call, given a strategy and the modules that become units."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.comm.mesh import Mesh, init_mesh, joined_world_size
from fullshard.core.errors import ConfigError, WrapError
from fullshard.core.events import EventSink
from fullshard.core.progress import advance, progress
from fullshard.core.schedule import BackwardPrefetch
from fullshard.core.strategy import Strategy, parse_strategy
from fullshard.engine.extension import begin_sharding
from fullshard.engine.fully_shard import (
    check_can_be_unsharded,
    check_not_managed,
    ignored_parameters,
    make_unit,
    units_in,
)
from fullshard.engine.kinds import check_kinds, check_types, prepare
from fullshard.engine.module import assemble
from fullshard.engine.precision import MixedPrecisionPolicy
from fullshard.engine.schedule import Schedule
from fullshard.engine.storage import storage_of
from fullshard.features.meta_device.initialize import InitFunction, WeightSource, materialize, weight_source
from fullshard.wrap.partition import UnitPlan, partition

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def shard_model(
    model: ModuleT,
    *,
    unit_modules: Sequence[nn.Module],
    strategy: str | int | Strategy = "FULL_SHARD",
    shard_size: int | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    forward_prefetch: bool = True,
    backward_prefetch: str = BackwardPrefetch.BACKWARD_PRE,
    sync_module_states: bool = False,
    param_init_fn: InitFunction | None = None,
    device: torch.device | None = None,
    mesh: Mesh | None = None,
    other_meshes: Mapping[nn.Module, Mesh] | None = None,
    event_sink: EventSink | None = None,
) -> ModuleT:
    """Shard a complete model in one call. Tied parameters may be in different units.

    Parameters and buffers may be on the meta device.

    Args:
        model: the model, which becomes the outermost unit.
        unit_modules: submodules that become units (see `fullshard.wrap.policies`).
        strategy: name or code of a strategy in `core.strategy`.
        shard_size: number of ranks per shard group; required only by hybrid strategies.
        reshard_after_forward: overrides the setting of the strategy.
        mp_policy: as for `fully_shard`.
        offload_policy: as for `fully_shard`.
        ignored_params: parameters that are not sharded.
        forward_prefetch: unshard the next unit while the current unit runs forward.
        backward_prefetch: a name of `BackwardPrefetch`.
        sync_module_states: use rank 0's parameters and buffers on all ranks.
        param_init_fn: function that initializes one module on the meta device.
        device: device to compute on; by default the accelerator, if there is one.
        mesh: mesh of the ranks to use, instead of all ranks (`fullshard simulate` passes its own mesh).
        other_meshes: meshes of units that are sharded over other ranks, such as experts, keyed by module.
        event_sink: object that receives the engine's events.

    Raises:
        ConfigError, WrapError: See `fully_shard`.
    """
    row = parse_strategy(strategy)
    if mesh is None:
        mesh = init_mesh(shard_size=row.mesh_shape(joined_world_size(), shard_size)[1], device=device)
    prefetch = _backward_prefetch(backward_prefetch)
    if units_in([model]):
        raise WrapError("part of the model is already sharded", hint="call shard_model once, on an unsharded model")
    check_can_be_unsharded(model, [model, *unit_modules])
    reshard = row.reshards_after_forward if reshard_after_forward is None else reshard_after_forward
    storage = storage_of(offload_policy, mesh.device)
    weights = weight_source(model)
    plans = _plan_units(model, unit_modules, weights, ignored_parameters(ignored_params))
    meshes = [(other_meshes or {}).get(plan.modules[0], mesh) for plan in plans]
    for plan, own in zip(plans, meshes, strict=True):
        check_kinds([plan], [model], own)
    storage.check(plans)
    # The model changes from here on. Errors in the plans have already been raised.
    schedule, policy = Schedule(mesh), MixedPrecisionPolicy.of(mp_policy)
    begin_sharding()
    with progress("loading weights" if weights else "sharding", len(plans)):
        for plan, own in zip(plans, meshes, strict=True):
            for slot in plan.slots:
                slot.compute_dtype = policy.override(slot.parameter)
            # Do this before the unit is created, because its buckets copy the current values.
            materialize(
                plan,
                mesh=own,
                stop_at=units_in(plan.modules),
                model=model,
                init=param_init_fn,
                sync_module_states=sync_module_states,
                buffer_dtype=policy.buffer_dtype,
                weights=weights,
            )
            make_unit(
                plan,
                schedule=schedule if own is mesh else Schedule(own),  # the model's own takes its units over
                policy=policy,
                storage=storage,
                reshards_after_forward=None if reshard and plan.modules[0] is model else reshard,
                values=weights,
                prefix="",  # keep the class name, which configs, Transformers and PEFT look up
            )
            advance(1)
    assemble([model], schedule)
    schedule.forward_prefetch, schedule.backward_prefetch = forward_prefetch, prefetch
    schedule.keeps_parameters, schedule.keeps_gradients = row.keeps_parameters, row.keeps_gradients
    for unit in schedule.units:
        # Even if resharding frees no memory, it tells the other ranks that the main weights they read may change.
        unit.reshards_after_backward = not (row.keeps_parameters and unit.freed_nbytes)
    schedule.event_sink = event_sink
    return model


def _backward_prefetch(name: str) -> BackwardPrefetch:
    try:
        return BackwardPrefetch(str(name).upper())
    except ValueError:
        names = ", ".join(BackwardPrefetch)
        raise ConfigError(f"{name!r} is not a valid backward_prefetch", hint=f"use one of {names}") from None


def _plan_units(
    model: nn.Module, unit_modules: Sequence[nn.Module], weights: WeightSource | None, ignored: Iterable[nn.Parameter]
) -> list[UnitPlan]:
    """Return one plan for each unit. Tensors that must be sharded but are not parameters yet become parameters."""
    prepare(model, is_read_later=weights is not None)
    if weights is not None:
        weights.start(model)
    plans = partition([model], unit_modules, ignored=ignored)
    check_not_managed(plans)
    check_types(plans, [model])
    return plans
