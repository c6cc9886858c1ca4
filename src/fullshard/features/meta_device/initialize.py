"""Allocate parameters and buffers and give them the same values on every rank, before they are sharded.

This is done one unit at a time: tensors on the meta device are allocated, initialized by their own module, and
broadcast from rank 0. No rank therefore ever holds more than one unsharded unit of the model.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm.mesh import Mesh
from fullshard.comm.torch_dist import as_sent
from fullshard.comm.waiting import Waiting
from fullshard.core.errors import WrapError
from fullshard.engine.kinds import kind_of
from fullshard.engine.moving import move_to_device, own_modules
from fullshard.wrap.partition import Slot, UnitPlan, Values

WEIGHTS = "_fullshard_weights"
"""Name of the module attribute that holds the `WeightSource` for parameters on the meta device."""


class WeightSource(Values, Protocol):
    """A source of values for parameters on the meta device, from which a rank reads only its own part."""

    def start(self, model: nn.Module) -> None:
        """Match the model's parameters with the source before partitioning, and raise an error if one does not fit."""

    def make_whole(self, module: nn.Module, device: torch.device) -> None:
        """Fill tensors that are needed unsharded: persistent buffers, and weights to convert while loading."""

    def holds(self, slot: Slot) -> bool:
        """Return whether `read` can supply the values of this parameter."""

    def initialize(self, module: nn.Module) -> bool:
        """Initialize a module if the source defines its values without storing them, or else return False."""


def weight_source(model: nn.Module) -> WeightSource | None:
    """Return the weight source that is attached to `model` or to a module in it, or None if there is none."""
    return next((m.__dict__[WEIGHTS] for m in model.modules() if WEIGHTS in m.__dict__), None)


InitFunction = Callable[[nn.Module], Any]
"""Initializes the parameters and buffers of one module, but not those of its children."""


@contextlib.contextmanager
def meta_parameters() -> Iterator[None]:
    """Create parameters on the meta device inside the block, but allocate buffers as usual.

    No memory is allocated for the parameters until the model is sharded, one unit at a time. Non-persistent buffers
    have the values that the constructors assign, not uninitialized memory.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@torch.no_grad()
def materialize(
    plan: UnitPlan,
    *,
    mesh: Mesh,
    stop_at: Iterable[nn.Module],
    model: nn.Module,
    init: InitFunction | None,
    sync_module_states: bool,
    buffer_dtype: torch.dtype | None,
    weights: WeightSource | None = None,
) -> None:
    """Put the unit's parameters, and the buffers of its modules, on the mesh's device and give them their values.

    Modules of inner units (`stop_at`) are already real. `init` is called for each module that has tensors on the meta
    device. The default is `_init_weights` of a Transformers model, or else the module's own `reset_parameters`. With
    `sync_module_states`, tensors that were not on the meta device also get the values of rank 0. Tensors that `weights`
    supplies stay on the meta device; each rank reads only its interval of them later.
    """
    modules = own_modules(plan, stop_at)
    deferred: set[int] = set()
    initialize = init or _default_init(model, plan.modules)
    if weights is not None:
        for module in modules:
            weights.make_whole(module, mesh.device)
        deferred = {id(slot) for slot in plan.slots if weights.holds(slot)}
    own = {(id(m), attribute) for slot in plan.slots if id(slot) not in deferred for m, attribute in slot.owners}

    def init_one(module: nn.Module) -> None:
        if weights is None or not weights.initialize(module):
            initialize(module)

    is_made = [_initialize(module, own, device=mesh.device, init=init_one) for module in modules]
    move_to_device(plan, modules, device=mesh.device, buffer_dtype=buffer_dtype)
    if any(is_made) or sync_module_states:
        buffers = [b for m in modules for b in m._buffers.values() if b is not None]
        real = [slot.parameter for slot in plan.slots if id(slot) not in deferred]
        parameters = [tensor for parameter in real for tensor in kind_of(parameter).tensors(parameter)]
        names = {id(module): f"{name}." for name, module in model.named_modules()}
        owners = [(*slot.owners[0], tuple(slot.parameter.shape)) for slot in plan.slots]
        told = [f"{names.get(id(owner), '')}{attribute} {shape}" for owner, attribute, shape in owners]
        take_from_rank_0(parameters + buffers, mesh, told)


def _initialize(module: nn.Module, own: set[tuple[int, str]], *, device: torch.device, init: InitFunction) -> bool:
    """Allocate a module's meta tensors and run `init`, or return False. `own` has parameters as (id, attribute)."""
    owned = [(name, p) for name, p in module._parameters.items() if (id(module), name) in own]
    parameters = [(name, p) for name, p in owned if p is not None and p.is_meta]
    buffers = [(name, b) for name, b in module._buffers.items() if b is not None and b.is_meta]
    if not parameters and not buffers:
        return False
    held = (*module._parameters.values(), *module._buffers.values())
    kept = [(tensor, tensor.detach().clone()) for tensor in held if tensor is not None and not tensor.is_meta]
    fresh = [(name, torch.empty_like(tensor, device=device)) for name, tensor in (*parameters, *buffers)]
    for (name, data), (_, parameter) in zip(fresh, parameters, strict=False):
        module._parameters[name] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    module._buffers.update(fresh[len(parameters) :])
    for _, tensor in fresh:
        tensor.fill_(_sentinel(tensor.dtype))
    versions = [tensor._version for _, tensor in fresh]
    init(module)
    for tensor, value in kept:  # do not initialize tensors again that were already real, for example in another unit
        tensor.copy_(value)
    current = {**module._parameters, **module._buffers}
    missed = [
        name
        for (name, tensor), version in zip(fresh, versions, strict=True)
        if _is_untouched(current.get(name), tensor, version)
    ]
    if missed:
        raise WrapError(
            f"{type(module).__name__} was built on the meta device, and nothing initializes its {', '.join(missed)}",
            hint=(
                "use shard_model(model, ...), which finds the model's own initialization and accepts param_init_fn; "
                "or build the model under fullshard.meta_parameters(), which keeps buffers off the meta device"
            ),
        )
    return True


def _sentinel(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _is_untouched(current: torch.Tensor | None, fresh: torch.Tensor, version: int) -> bool:
    """Return whether `init` neither replaced nor wrote to `fresh`, whose version counter was `version` before."""
    if current is None or fresh.numel() == 0:
        return False
    if fresh.dtype is torch.bool:  # bool has no unused value for a marker
        return current is fresh and fresh._version == version
    if fresh.dtype.is_floating_point or fresh.dtype.is_complex:
        return bool(current.isnan().all())
    return bool((current == _sentinel(fresh.dtype)).all())


def _default_init(model: nn.Module, roots: Iterable[nn.Module]) -> InitFunction:
    """Return `_init_weights` of the Transformers model, or else a call of the module's own `reset_parameters`."""
    around: list[Any] = [model, *(m for root in roots for m in root.modules())]
    transformers_model = next((m for m in around if hasattr(m, "_init_weights")), None)
    if transformers_model is not None:
        return transformers_model._init_weights  # type: ignore[no-any-return]

    def init(module: nn.Module) -> None:
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:  # otherwise the tensors keep their marker and are reported by name
            reset()

    return init


def take_from_rank_0(tensors: list[torch.Tensor], mesh: Mesh, names: Sequence[str] = ()) -> None:
    """Copy the values of the mesh's first rank to all its ranks, in place. All ranks must call this."""
    if mesh.world_group is None:
        return
    lines = [f"tensor {i}: {tuple(t.shape)} {t.dtype}" for i, t in enumerate(tensors)]
    mesh.check_agreement(
        [*names, *["no further parameter"] * bool(names), *lines], what="the parameters and buffers to take from rank 0"
    )
    for tensor in tensors:
        whole = tensor.contiguous()
        with Waiting("weights from rank 0", [mesh.world_group]):  # the timeout applies to each tensor
            dist.broadcast(as_sent(whole.reshape(-1)), group=mesh.world_group, group_src=0)
        if whole is not tensor:
            tensor.copy_(whole)
