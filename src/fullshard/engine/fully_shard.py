"""`fully_shard`, which turns modules into units, in place. It has the signature of torch's `fully_shard`."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn.modules.lazy import LazyModuleMixin

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh, init_mesh
from fullshard.core.errors import ConfigError, PlacementError, RepeatedError, WrapError
from fullshard.core.user_class import user_class
from fullshard.engine.extension import begin_sharding
from fullshard.engine.kinds import DataAxes, check_kinds, check_types, kind_of, prepare
from fullshard.engine.lookup import unit_of
from fullshard.engine.module import assemble, make_fsdp_module
from fullshard.engine.moving import move_to_device, own_modules
from fullshard.engine.parameter import stands_for
from fullshard.engine.precision import MixedPrecisionPolicy
from fullshard.engine.schedule import Schedule
from fullshard.engine.storage import Storage, storage_of
from fullshard.engine.unit import Unit
from fullshard.wrap.partition import UnitPlan, Values, partition

ModuleT = TypeVar("ModuleT", bound=nn.Module)


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
    """Make `module` a unit, in place: shard all its parameters that do not belong to units inside it.

    Call it on inner modules first and on the model last. Parameters on the meta device stay there until
    `model.to_empty(device=)` or `load_state_dict`. After `to_empty`, they are NaN until they are initialized.

    Args:
        module: the module, or a list of modules that are unsharded together.
        mesh: a 1-D mesh shards over all its ranks; a 2-D mesh is (replicate, shard). Default: 1-D over all ranks.
        reshard_after_forward: whether to free the unsharded parameters between forward and backward. Default: True, but
            False for the outermost unit, because backward needs it immediately. With an integer n, groups of n
            neighboring ranks keep the parameters sharded among themselves until backward. n must divide the size of
            the shard axis: 1 means False, the full size means True. If ranks of a host share memory, n means True,
            because unsharding then costs nothing.
        shard_placement_fn: a function that is called for each parameter and may return a placement, as in torch.
            `Shard(0)` gives each rank the same rows as torch's `fully_shard`, but requires a separate gather and
            reduction for each such parameter. None and other dims give each rank an interval. Another mesh is an error.
        mp_policy: a `MixedPrecisionPolicy` from fullshard or torch.
        offload_policy: an `OffloadPolicy` or `CPUOffloadPolicy` from fullshard or torch.
        ignored_params: parameters that are neither sharded nor reduced.
        dp_mesh_dims: torch's `DataParallelMeshDims`, which names the (replicate, shard) axes of `mesh`. Several axes
            are combined into one. Without a shard axis, every rank holds all elements. Parameters that are DTensors
            over all of `mesh`, replicated along these axes, are also DTensors in forward.

    Returns:
        `module`, which is now an `FSDPModule`.

    Raises:
        ConfigError: An argument is not supported.
        WrapError: A module is already a unit, or has no parameters where some are required. Or a parameter is tied to
            one in another unit, or is a DTensor that is not over another axis of the same mesh. Or its tensor subclass
            wraps other tensors and does not define how it is gathered.
    """
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_arguments(modules, mesh, shard_placement_fn)
    ignored = ignored_parameters(ignored_params)
    if dp_mesh_dims is not None:
        resolved = _data_parallel(mesh, dp_mesh_dims)
    else:
        resolved = mesh if isinstance(mesh, Mesh) else init_mesh(device_mesh=mesh)
    reshard, neighbors = _reshard_after_forward(reshard_after_forward, resolved.shard_size)
    for one in modules:
        if unit_of(one) is not None:
            raise RepeatedError(
                f"{user_class(one).__name__} is already a unit. Each distinct composable distributed API can only be "
                "applied to a module once.",
                hint="call fully_shard once per module",
            )
    for one in modules:
        check_can_be_unsharded(one, [one])
        prepare(one)
    [plan] = partition(modules, ignored=ignored, stop_at=units_in(modules))
    check_not_managed([plan])
    check_types([plan], modules)
    check_kinds([plan], modules, resolved, _data_axes(mesh, dp_mesh_dims))
    if shard_placement_fn is not None:
        _take_placements(plan, shard_placement_fn)
    schedule, policy = Schedule(resolved), MixedPrecisionPolicy.of(mp_policy)
    storage = storage_of(offload_policy, resolved.device)
    begin_sharding()
    for slot in plan.slots:
        slot.compute_dtype = policy.override(slot.parameter)  # first, because moving may replace the object
    inside = own_modules(plan, units_in(modules))
    move_to_device(plan, inside, device=resolved.device, buffer_dtype=policy.buffer_dtype)
    unit = make_unit(plan, schedule=schedule, policy=policy, storage=storage, reshards_after_forward=reshard)
    unit.neighbors = None if neighbors is None else resolved.neighbors(neighbors)
    assemble(modules, schedule)
    return module


def make_unit(
    plan: UnitPlan,
    *,
    schedule: Schedule,
    policy: MixedPrecisionPolicy,
    storage: Storage,
    reshards_after_forward: bool | None,
    values: Values | None = None,
    prefix: str = "FSDP",
) -> Unit:
    """Make a unit from parameters that are already on the device where the unit will compute.

    `values` supplies the values of parameters without memory. `prefix` is put before the class names of the modules.
    """
    unit = Unit(plan, policy=policy, storage=storage, schedule=schedule, reshards_after_forward=reshards_after_forward)
    if values is not None or not any(postpones(unit) for postpones in schedule.extensions.postpones):
        unit.allocate(values)
    for module in plan.modules:
        make_fsdp_module(module, unit, prefix=prefix)
    return unit


def units_in(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those modules that are units, among `modules` and all modules inside them."""
    return [inner for module in modules for inner in module.modules() if unit_of(inner) is not None]


def _check_arguments(modules: Sequence[object], mesh: object, placement_fn: object) -> None:
    """Check the types of the arguments. An empty list of modules is an error, because it would not form a unit."""
    others = [one for one in modules if not isinstance(one, nn.Module)]
    if others or not modules:
        found = type(others[0]).__name__ if others else "an empty list"
        raise ConfigError(f"fully_shard: expected a module or a list of modules, got {found}", hint="pass the model")
    if not isinstance(mesh, DeviceMesh | Mesh | None):
        raise ConfigError(
            f"mesh: expected a DeviceMesh, got {type(mesh).__name__}", hint="create one with init_device_mesh"
        )
    if placement_fn is not None and not callable(placement_fn):
        raise ConfigError(
            f"shard_placement_fn: expected a function of a parameter, got {type(placement_fn).__name__}",
            hint="pass a function such as lambda p: Shard(0), or omit the argument",
        )


def ignored_parameters(parameters: Any) -> list[nn.Parameter]:
    """Return the parameters to ignore. Reject names, and a single tensor, whose rows would be taken for parameters."""
    if isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable | None):
        what = f"one {type(parameters).__name__}"
    else:
        found = [one for one in parameters or () if one is not None]  # a layer without a bias yields None
        others = [one for one in found if not isinstance(one, torch.Tensor)]
        if not others:
            return found
        what = type(others[0]).__name__
    raise ConfigError(
        f"ignored_params: expected parameters, got {what}", hint="pass a set of parameters, such as set(m.parameters())"
    )


def check_can_be_unsharded(root: nn.Module, units: Iterable[nn.Module]) -> None:
    """Reject `units` that cannot unshard their parameters. Warn about sparse gradients that will become dense.

    `root` is the model, or the part of it that contains these units.
    """
    for module in units:
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
        if is_container and type(module).forward is nn.Module.forward:
            raise WrapError(
                "fully_shard does not support containers that do not implement forward: nothing would unshard a "
                f"{type(module).__name__}",
                hint="make each module in it a unit, or pass them as one unit: fully_shard(list(modules))",
            )
    for path, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise WrapError(
                f"{path or 'the module'} ({module.original_name}) is TorchScript, and its compiled code would not use "
                "the unsharded parameters",
                hint="shard the module that it was scripted from",
            )
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise WrapError(
                f"{path or 'the module'} ({type(module).__name__}) does not know the shapes of its parameters yet",
                hint="run the model on a batch before you shard it, because its first forward determines the shapes",
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            warnings.warn(
                f"{path or 'the module'} ({type(module).__name__}): its gradient is a dense interval after backward in "
                "spite of sparse=True, so an optimizer updates all of its rows, not only those that were looked up",
                stacklevel=3,
            )


def check_not_managed(plans: Iterable[UnitPlan]) -> None:
    """Raise an error if another unit already owns one of the parameters."""
    for slot in (slot for plan in plans for slot in plan.slots):
        held: Any = slot.parameter
        sharded = stands_for(held)
        if sharded is None:
            continue
        places = ", ".join(f"{type(m).__name__}.{attribute}" for m, attribute in slot.owners)
        if sharded is held:
            raise WrapError(
                f"the parameter at {places} is already sharded as {sharded.name}: either the module that contains it "
                "was sharded first, or it was tied afterwards",
                hint="shard inner modules before the modules that contain them, and tie parameters before sharding",
            )
        raise WrapError(
            f"the parameter at {places} is tied to {sharded.name}, which another unit already owns",
            hint=(
                "pass both modules in one call, fully_shard([a, b]), or use shard_model, which handles tied parameters"
            ),
        )


def _data_axes(mesh: object, dims: Any) -> DataAxes | None:
    """Return the mesh and the positions of the axes that `dims` names, or None if `dims` is None."""
    if dims is None or not isinstance(mesh, DeviceMesh):
        return None
    names = list(mesh.mesh_dim_names or ())
    return mesh, frozenset(map(names.index, (*dims.replicate_names, *dims.shard_names)))


def _take_placements(plan: UnitPlan, shard_placement_fn: Callable[[nn.Parameter], Any]) -> None:
    """Record which parameters are to be cut by rows. Ignore placements on other dims, and reject other meshes."""
    for slot in plan.slots:
        wanted = shard_placement_fn(slot.parameter)
        is_shard = isinstance(wanted, Shard)
        is_dim = is_shard and -slot.parameter.ndim <= wanted.dim < slot.parameter.ndim
        if wanted is not None and not is_dim:
            places = ", ".join(f"{type(m).__name__}.{attribute}" for m, attribute in slot.owners)
            dim = f"Shard dim {wanted.dim} is invalid for {slot.parameter.ndim}D tensor. " if is_shard else ""
            raise PlacementError(
                f"{dim}shard_placement_fn returned {wanted!r} for {places} {tuple(slot.parameter.shape)}: expected "
                "None or a Shard of one of its dims",
                hint="shard modules over different meshes instead, because a mesh per parameter is not supported",
            )
        kind = kind_of(slot.parameter)
        slot.by_rows = is_dim and wanted.dim % slot.parameter.ndim == 0 and not kind.is_alone
        if slot.by_rows and (why := kind.why_no_rows(slot)):
            raise PlacementError(
                f"shard_placement_fn returned {wanted!r} for a parameter that cannot be split by rows: {why}",
                hint="return None for this parameter",
            )


def _reshard_after_forward(value: object, shard_size: int) -> tuple[bool | None, int | None]:
    """Return whether to reshard after forward, and how many neighbors share the parameters until backward, if any."""
    if value is None or isinstance(value, bool):
        return value, None
    if not isinstance(value, int) or value < 1 or shard_size % value:
        raise ConfigError(
            f"reshard_after_forward = {value!r}: expected True, False, None or a number of ranks that divides the "
            f"shard size {shard_size}",
            hint="omit it to use the default",
        )
    return value != 1, None if value in (1, shard_size) else value


def _data_parallel(device_mesh: Any, dims: Any) -> Mesh:
    """Return a mesh of the data-parallel axes, with axes of the same kind combined. All ranks must call this."""
    names = (device_mesh.mesh_dim_names if isinstance(device_mesh, DeviceMesh) else None) or ()
    wanted = [tuple(dims.replicate_names), tuple(dims.shard_names)]
    named = [name for part in wanted for name in part]
    unknown = [name for name in named if name not in names]
    what = f"dp_mesh_dims = {dims} of a mesh with axes {names}"
    if unknown:
        hint = "use names of axes of the mesh passed to fully_shard"
        raise ConfigError(f"{what}: {unknown} not found in mesh.mesh_dim_names", hint=hint)
    if len(set(named)) < len(named) or any(list(part) != sorted(part, key=names.index) for part in wanted):
        raise ConfigError(
            f"{what} repeats axes or lists them out of order", hint="name each axis once, in the order of the mesh"
        )
    parts = [device_mesh[part] if part else None for part in wanted]
    replicate, shard = (torch_private.flattened(p) if p is not None and p.ndim > 1 else p for p in parts)
    if shard is None:
        return init_mesh(device_mesh=replicate, shard_size=1)
    return init_mesh(device_mesh=shard if replicate is None else torch_private.joined([replicate, shard]))
