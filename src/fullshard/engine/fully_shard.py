"""The entry: turn modules into units, in place.

`fully_shard` has torch's signature and is called on inner modules first. `shard_model` makes all units of a model in
one call, from a strategy and a list of modules.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn.modules.lazy import LazyModuleMixin

from fullshard.comm.mesh import Mesh, data_parallel, init_mesh, joined_world_size
from fullshard.config.switches import check_switches
from fullshard.core.errors import ConfigError, PlacementError, RepeatedError, WrapError
from fullshard.core.events import EventSink
from fullshard.core.schedule import BackwardPrefetch
from fullshard.core.strategy import Strategy, parse_strategy
from fullshard.core.user_class import user_class
from fullshard.engine.extension import begin_sharding
from fullshard.engine.kinds import DataAxes, check_kinds, check_types, kind_of, prepare
from fullshard.engine.lookup import unit_of
from fullshard.engine.materialize import InitFunction, WeightSource, materialize, weight_source
from fullshard.engine.module import assemble, make_fsdp_module
from fullshard.engine.parameter import stands_for
from fullshard.engine.precision import MixedPrecisionPolicy
from fullshard.engine.schedule import Schedule
from fullshard.engine.state_dict import watch_state_dicts
from fullshard.engine.storage import Storage, storage_of
from fullshard.engine.unit import Unit
from fullshard.wrap.partition import UnitPlan, partition

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_BEGINNING = threading.Lock()
"""Guards `_begin`: ranks may be threads of one process."""


def fully_shard(
    module: ModuleT | list[nn.Module],
    *,
    mesh: DeviceMesh | Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Make `module` a unit, in place: shard its parameters, except those of units inside it.

    Call it on inner modules first and on the model last. Parameters on the meta device stay there until
    `model.to_empty(device=)`, after which they are NaN until they are initialised, or `load_state_dict`.

    Args:
        module: the module, or a list of modules that are unsharded together.
        mesh: 1-D shards over all its ranks, 2-D is (replicate, shard). Default: 1-D over all ranks.
        reshard_after_forward: free the unsharded parameters between forward and backward. Default: True, but False
            for the outermost unit, whose parameters backward needs at once. A number makes so many neighbouring ranks
            share them until backward; it must divide the size of the shard axis; 1 means False. If ranks of a
            host share memory, a number means True, as keeping them costs nothing there.
        shard_placement_fn: torch's way to shard along another dim, called for each parameter. If it returns `Shard(0)`,
            each rank has the rows that torch's `fully_shard` gives it, at the cost of a gather and a reduction for each
            such parameter; for None and other dims each rank has an interval. Another mesh is refused.
        mp_policy: `MixedPrecisionPolicy`, fullshard's or torch's.
        offload_policy: `OffloadPolicy` or `CPUOffloadPolicy`, fullshard's or torch's.
        ignored_params: parameters to leave alone; they are neither sharded nor reduced.
        dp_mesh_dims: torch's `DataParallelMeshDims`: which axes of `mesh` are (replicate, shard), by name. Several are
            taken as one; without one to shard along, every rank has everything. Parameters that are DTensors over all
            of `mesh`, replicated along these, are DTensors in forward, too.

    Returns:
        `module`, which is an `FSDPModule` now.

    Raises:
        ConfigError: an argument that cannot be honoured.
        WrapError: a unit already, nothing to shard where something must be, a parameter that is tied to one in another
            unit, one of a tensor subclass that wraps other tensors and does not say how it is gathered, or a DTensor
            that is not over another axis of the same mesh.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_arguments(modules, mesh, shard_placement_fn)
    ignored = _ignored(ignored_params)
    if dp_mesh_dims is not None:
        resolved = data_parallel(mesh, dp_mesh_dims)
    else:
        resolved = mesh if isinstance(mesh, Mesh) else init_mesh(device_mesh=mesh)
    resolved.begin_sharding()
    reshard, neighbours = _reshard_after_forward(reshard_after_forward, resolved.shard_size)
    for one in modules:
        if unit_of(one) is not None:
            raise RepeatedError(
                f"{user_class(one).__name__} is a unit already. Each distinct composable distributed API can only be "
                "applied to a module once.",
                hint="call fully_shard once per module",
            )
    for one in modules:
        _check_can_be_unsharded(one, [one])
        prepare(one)
    [plan] = partition(modules, ignored=ignored, stop_at=_units_in(modules))
    _check_not_managed([plan])
    check_types([plan], modules)
    check_kinds([plan], modules, resolved, _data_axes(mesh, dp_mesh_dims))
    if shard_placement_fn is not None:
        _take_placements(plan, shard_placement_fn)
    schedule = Schedule(resolved)
    _make_unit(
        plan,
        schedule=schedule,
        policy=MixedPrecisionPolicy.of(mp_policy),
        storage=storage_of(offload_policy, resolved.device),
        reshard_after_forward=reshard,
        neighbours=neighbours,
    )
    assemble(modules, schedule)
    resolved.end_sharding()
    return module


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
    event_sink: EventSink | None = None,
) -> ModuleT:
    """Shard a whole model in one call. Tied parameters may lie in different units.

    Args:
        model: the model; it is the outermost unit.
        unit_modules: modules below it that become units (see `fullshard.wrap.policies`).
        strategy: a row of `core.strategy`, by name or code.
        shard_size: ranks per shard group; needed by hybrid strategies only.
        reshard_after_forward: overrides the strategy's column.
        mp_policy: as for `fully_shard`.
        offload_policy: as for `fully_shard`.
        ignored_params: parameters to leave alone.
        forward_prefetch: unshard the next unit while one runs forward.
        backward_prefetch: a name of `BackwardPrefetch`.
        sync_module_states: take rank 0's parameters and buffers on all ranks.
        param_init_fn: initialises one module that is on the meta device.
        device: where to compute; the accelerator if there is one.
        mesh: the ranks, instead of all there are (`fullshard simulate` has one of its own).
        event_sink: receives the engine's events.

    Raises:
        ConfigError, WrapError: as for `fully_shard`.
    """
    row = parse_strategy(strategy)
    if mesh is None:
        mesh = init_mesh(shard_size=row.mesh_shape(joined_world_size(), shard_size)[1], device=device)
    mesh.begin_sharding()
    prefetch = _backward_prefetch(backward_prefetch)
    if _units_in([model]):
        raise WrapError("part of the model is sharded already", hint="call shard_model once, on an unsharded model")
    _check_can_be_unsharded(model, [model, *unit_modules])
    reshard = row.reshard_after_forward if reshard_after_forward is None else reshard_after_forward
    storage = storage_of(offload_policy, mesh.device)
    weights = weight_source(model)
    plans = _plan_units(model, unit_modules, weights, _ignored(ignored_params))
    check_kinds(plans, [model], mesh)
    storage.check(plans)
    # The model changes from here on; errors that the plans alone show were raised before.
    schedule = Schedule(mesh)
    for plan in plans:
        _make_unit(
            plan,
            schedule=schedule,
            policy=MixedPrecisionPolicy.of(mp_policy),
            storage=storage,
            reshard_after_forward=None if reshard and plan.modules[0] is model else reshard,
            model=model,
            init=param_init_fn,
            sync_module_states=sync_module_states,
            weights=weights,
        )
    assemble([model], schedule)
    schedule.forward_prefetch, schedule.backward_prefetch = forward_prefetch, prefetch
    schedule.keeps_parameters, schedule.keeps_gradients = row.keeps_parameters, row.keeps_gradients
    for unit in schedule.units:
        # Even if resharding frees no memory, it tells the other ranks that the main weights they read may change.
        unit.reshard_after_backward = not (row.keeps_parameters and unit.freed_nbytes)
    schedule.event_sink = event_sink
    mesh.end_sharding()
    return model


def _backward_prefetch(name: str) -> BackwardPrefetch:
    try:
        return BackwardPrefetch(str(name).upper())
    except ValueError:
        names = ", ".join(BackwardPrefetch)
        raise ConfigError(f"unknown backward_prefetch {name!r}", hint=f"use one of {names}") from None


def _plan_units(
    model: nn.Module,
    unit_modules: Sequence[nn.Module],
    weights: WeightSource | None,
    ignored: Iterable[nn.Parameter],
) -> list[UnitPlan]:
    """Assign every parameter to a unit, once each tensor that is to be sharded is a parameter."""
    prepare(model, is_read_later=weights is not None)
    if weights is not None:
        weights.start(model)
    plans = partition([model], unit_modules, ignored=ignored)
    _check_not_managed(plans)
    check_types(plans, [model])
    return plans


@functools.cache
def _begin() -> None:
    """Set up sharding once in a process, when something is sharded for the first time."""
    check_switches()
    begin_sharding()


def _make_unit(
    plan: UnitPlan,
    *,
    schedule: Schedule,
    policy: MixedPrecisionPolicy,
    storage: Storage,
    reshard_after_forward: bool | None,
    neighbours: int | None = None,
    model: nn.Module | None = None,
    init: InitFunction | None = None,
    sync_module_states: bool = False,
    weights: WeightSource | None = None,
) -> None:
    """Make a unit for `fully_shard`, or for the `model` that `shard_model` was given."""
    with _BEGINNING:
        _begin()
    mesh = schedule.mesh
    for slot in plan.slots:
        slot.compute_dtype = policy.override(slot.parameter)
    # Before the unit is made: its buckets copy the values that they find, and drop the rest.
    materialize(
        plan,
        mesh=mesh,
        stop_at=_units_in(plan.modules),
        model=model,
        init=init,
        sync_module_states=sync_module_states,
        buffer_dtype=policy.buffer_dtype,
        weights=weights,
    )
    unit = Unit(
        plan,
        policy=policy,
        storage=storage,
        schedule=schedule,
        reshard_after_forward=reshard_after_forward,
        weights=weights,
    )
    if neighbours is not None:
        unit.neighbours = mesh.neighbours(neighbours)
    # Named as by torch, or unchanged: then class names in configs, and look-ups of Transformers and PEFT, still work.
    prefix = "FSDP" if model is None else ""
    for module in plan.modules:
        make_fsdp_module(module, unit, prefix=prefix)
    watch_state_dicts(unit)


def _units_in(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [inner for module in modules for inner in module.modules() if unit_of(inner) is not None]


def _check_arguments(modules: Sequence[object], mesh: object, placement_fn: object) -> None:
    """Check the arguments; without a module there would be no unit."""
    others = [one for one in modules if not isinstance(one, nn.Module)]
    if others or not modules:
        found = type(others[0]).__name__ if others else "an empty list"
        raise ConfigError(f"fully_shard: expected a module or a list of them, got {found}", hint="hand the model over")
    if not isinstance(mesh, DeviceMesh | Mesh | None):
        raise ConfigError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}", hint="init_device_mesh makes one")
    if placement_fn is not None and not callable(placement_fn):
        raise ConfigError(
            f"shard_placement_fn: expected a function of a parameter, got {type(placement_fn).__name__}",
            hint="lambda p: Shard(0), or leave it out",
        )


def _ignored(parameters: Any) -> list[nn.Parameter]:
    """Return the parameters to leave alone; refuse names and a single parameter, whose rows would be taken."""
    if isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable | None):
        what = f"one {type(parameters).__name__}"
    else:
        found = [one for one in parameters or () if one is not None]  # a layer without a bias has None there
        others = [one for one in found if not isinstance(one, torch.Tensor)]
        if not others:
            return found
        what = type(others[0]).__name__
    raise ConfigError(f"ignored_params: expected parameters, got {what}", hint="set(m.parameters())")


def _check_can_be_unsharded(root: nn.Module, units: Iterable[nn.Module]) -> None:
    for module in units:
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
        if is_container and type(module).forward is nn.Module.forward:
            raise WrapError(
                "fully_shard does not support containers that do not implement forward: nothing would unshard a "
                f"{type(module).__name__}",
                hint="make each module in it a unit, or pass them as one: fully_shard(list(modules))",
            )
    for path, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise WrapError(
                f"{path or 'the module'} ({module.original_name}) is TorchScript, which would not see its parameters "
                "unsharded",
                hint="shard the module that it was made from",
            )
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise WrapError(
                f"{path or 'the module'} ({type(module).__name__}) does not know the shapes of its parameters yet",
                hint="run the model on a batch before it is sharded, as its first forward settles them",
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            warnings.warn(
                f"{path or 'the module'} ({type(module).__name__}): its gradient is a dense interval after backward, "
                "although it has sparse=True: an optimizer moves all of its rows, not only those that were looked up",
                stacklevel=3,
            )


def _check_not_managed(plans: Iterable[UnitPlan]) -> None:
    for slot in (slot for plan in plans for slot in plan.slots):
        held: Any = slot.parameter
        sharded = stands_for(held)
        if sharded is None:
            continue
        places = ", ".join(f"{type(m).__name__}.{attribute}" for m, attribute in slot.owners)
        if sharded is held:
            raise WrapError(
                f"the parameter at {places} is sharded already, as {sharded.name}: the module around it was sharded "
                "before it, or it was tied afterwards",
                hint="shard the children first: call fully_shard on each inner module and then on what is around them; "
                "tie parameters before that",
            )
        raise WrapError(
            f"the parameter at {places} is tied to {sharded.name}, which another unit owns already",
            hint="put both modules into one call, fully_shard([a, b]), or use shard_model, which finds their place",
        )


def _data_axes(mesh: object, dims: Any) -> DataAxes | None:
    """Return the mesh and its axes that `dims` names, if any."""
    if dims is None or not isinstance(mesh, DeviceMesh):
        return None
    names = list(mesh.mesh_dim_names or ())
    return mesh, frozenset(map(names.index, (*dims.replicate_names, *dims.shard_names)))


def _take_placements(plan: UnitPlan, shard_placement_fn: Callable[[nn.Parameter], Any]) -> None:
    """Note which parameters to cut between rows; another dim has no effect, and another mesh is refused."""
    for slot in plan.slots:
        wanted = shard_placement_fn(slot.parameter)
        is_shard = isinstance(wanted, Shard)
        is_dim = is_shard and -slot.parameter.ndim <= wanted.dim < slot.parameter.ndim
        if wanted is not None and not is_dim:
            places = ", ".join(f"{type(m).__name__}.{attribute}" for m, attribute in slot.owners)
            dim = f"Shard dim {wanted.dim} is invalid for {slot.parameter.ndim}D tensor. " if is_shard else ""
            raise PlacementError(
                f"{dim}shard_placement_fn gives {wanted!r} for {places} {tuple(slot.parameter.shape)}: expected None "
                "or a Shard of one of its dims",
                hint="a mesh for each parameter is not supported: shard modules over different meshes instead",
            )
        kind = kind_of(slot.parameter)
        slot.by_rows = is_dim and wanted.dim % slot.parameter.ndim == 0 and not kind.is_alone
        if slot.by_rows and (why := kind.why_no_rows(slot)):
            raise PlacementError(
                f"shard_placement_fn gives {wanted!r} for a parameter {tuple(slot.parameter.shape)}: {why}",
                hint="give None for it",
            )


def _reshard_after_forward(value: object, shard_size: int) -> tuple[bool | None, int | None]:
    """Return whether to free parameters between forward and backward, and how many neighbours share them."""
    if value is None or isinstance(value, bool):
        return value, None
    if not isinstance(value, int) or value < 1 or shard_size % value:
        raise ConfigError(
            f"reshard_after_forward = {value!r}: expected True, False, None or a number of ranks that is a divisor of "
            f"the shard size {shard_size}",
            hint="leave it out",
        )
    return value != 1, None if value in (1, shard_size) else value


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of a unit unshard it as its `forward` does: `encode`, `generate`. The name is torch's.

    Only what the method returns may be used for backward. On a module that is no unit this does nothing.

    Raises:
        WrapError: the module has no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise WrapError(f"{type(module).__name__} has no method {method_name!r}", hint="name one that it has")

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return unit.run_method(module, method, *args, **kwargs)

    setattr(module, method_name, run)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Do nothing: models on the same ranks share communicators and streams anyway. The name is torch's.

    Raises:
        WrapError: one of the modules is no unit.
    """
    for module in modules:
        if unit_of(module) is None:
            raise WrapError(f"share_comm_ctx: {type(module).__name__} is no unit", hint="call fully_shard on it first")
