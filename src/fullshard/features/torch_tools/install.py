"""Replacements for functions of torch, so that torch's own tools do not use this rank's intervals as complete tensors.

Without them, these tools would silently give wrong results, and torch offers no hook in most of these places. Instead,
the one function that all calls go through (`core.imports.Replaced`) is replaced when a model or tensor is sharded for
the first time. The new function handles sharded parameters or raises an error for them.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.nn.utils import clip_grad as torch_clip
from torch.optim import optimizer as torch_optimizer

from fullshard.comm.mesh import Mesh, init_mesh, meshes
from fullshard.comm.torch_dist import all_reduce
from fullshard.comm.waiting import PROGRESS
from fullshard.core.errors import LifecycleError
from fullshard.core.imports import Replaced, after_import, replace
from fullshard.engine.extension import tell_before_clipping
from fullshard.engine.parameter import RowParameter, ShardedParameter, sharded_parameter_of, sharded_parameters
from fullshard.engine.shard_spec import Name, RaggedShard, ShardSpec
from fullshard.engine.sharded_tensor import RowTensor, ShardedTensor, dtensor_of
from fullshard.engine.step import hooks
from fullshard.features.torch_tools import torch_private


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm over all parameters and all ranks is at most `max_norm`. This is a collective.

    Args:
        parameters: a model, or parameters that may be sharded or plain. Plain parameters count only once and are
            assumed equal on all ranks.
        max_norm: maximum norm.
        norm_type: order of the p-norm; `inf` is the maximum.
        error_if_nonfinite: raise `RuntimeError` if the norm is not finite.

    Returns:
        The norm before clipping as a 0-D tensor, equal on every rank.
    """
    norm_type = float(norm_type)  # torch also accepts "inf"
    clipped = [each for p in _current(parameters) if (each := _Clipped.of(p)).grad is not None]
    norm = _norm_of([(each.spec, each.grad) for each in clipped], norm_type, error_if_nonfinite, None)
    nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)  # type: ignore[arg-type]
    return norm


@dataclass(slots=True)
class _Clipped:
    """A parameter as torch's clipping sees it. For a sharded parameter, `grad` is a plain tensor, which is faster."""

    grad: Any
    spec: ShardSpec | None

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Self:
        if isinstance(parameter, ShardedParameter) and not parameter.used_up_by:
            return cls(parameter.local_grad, parameter.spec)
        return cls(parameter.grad, None)


def clip_grad_value_(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp every gradient element to [-clip_value, clip_value]. This does not communicate."""
    torch_clip.clip_grad_value_(_current(parameters), clip_value)


def _current(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters. Parameters that existed before sharding are replaced by the sharded ones."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [p if (sharded := sharded_parameter_of(p)) is None else sharded for p in given]


def _local_norm(
    tensors: Sequence[torch.Tensor], order: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    """Return the total norm of these tensors as computed by torch's own function, on this rank only."""
    norm: torch.Tensor = torch_private.total_norm.torchs(tensors, order, error_if_nonfinite, foreach)
    return norm


def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the total norm as torch does, but combine the norms of sharded gradients over their ranks."""
    norm_type = float(norm_type)  # torch also accepts "inf"
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    specs = [tensor.spec if isinstance(tensor, ShardedTensor) else None for tensor in tensors]
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return _local_norm(tensors, norm_type, error_if_nonfinite, foreach)
    locals_ = (tensor.local if isinstance(tensor, ShardedTensor) else tensor for tensor in tensors)
    norm = _norm_of(list(zip(specs, locals_, strict=True)), norm_type, error_if_nonfinite, foreach)
    return dtensor_of(norm, spec)  # as torch does for its own sharded parameters


def _norm_of(
    parts: Sequence[tuple[ShardSpec | None, torch.Tensor]],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """Return the total norm of tensors, each of which has a spec if it is sharded, or None if it is not."""
    sharded: dict[tuple[Mesh, tuple[dist.ProcessGroup, ...]], list[torch.Tensor]] = {}
    ordinary = []
    for spec, tensor in parts:
        if spec is None:
            ordinary.append(tensor)
        else:
            sharded.setdefault((spec.mesh, spec.groups), []).append(tensor)
    tell_before_clipping({mesh for mesh, _ in sharded})
    norms = [_group_norm(mesh, groups, part, norm_type, foreach) for (mesh, groups), part in sharded.items()]
    if ordinary or not norms:
        norms.append(_local_norm(ordinary, norm_type, False, foreach))
    device = norms[0].device
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the gradients cannot be clipped: their total norm of order {norm_type} is {total.item()}")
    return total


def _group_norm(
    mesh: Mesh,
    groups: Sequence[dist.ProcessGroup],
    gradients: Sequence[torch.Tensor],
    order: float,
    foreach: bool | None,
) -> torch.Tensor:
    """Return the norm of sharded gradients, over all ranks that share them, in float32 or wider."""
    parts = [gradient for gradient in gradients if gradient.numel()]
    # computed over all gradients, so it is equal on every rank
    dtype = functools.reduce(torch.promote_types, {gradient.dtype.to_real() for gradient in gradients}, torch.float32)
    if parts:
        local = _local_norm(parts, order, False, foreach).to(mesh.device, dtype)
    else:
        local = torch.full((), math.inf if order < 0 else 0.0, device=mesh.device, dtype=dtype)
    if not groups:
        return local
    is_root = order not in (0, math.inf, -math.inf)  # not a count, maximum or minimum
    op = {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}.get(order, dist.ReduceOp.SUM)
    summed = local**order if is_root else local
    all_reduce(summed, "the norm of gradients", groups, op)
    return summed ** (1 / order) if is_root else summed


def _unscale_grads(
    self: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """Unscale gradients as torch does, and let all ranks agree on whether any of them found an overflow."""
    parameters = sharded_parameters(optimizer)
    if any(p.bucket.plan.main_is_on_host for p in parameters):  # gradients are there; torch does not wait
        inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
    found: dict[torch.device, torch.Tensor] = torch_private.unscale.torchs(
        self, optimizer, inv_scale, found_inf, allow_fp16
    )
    groups = {p.mesh.world_group: p.mesh.device for p in parameters}  # in the same order on every rank
    groups |= {p.spec.outer_group: p.mesh.device for p in parameters}
    for group, device in groups.items():
        if group is None:
            continue
        flag = sum((f.to(device) for f in found.values()), torch.zeros((), device=device))
        all_reduce(flag, "unscaling gradients", [group], dist.ReduceOp.MAX)
        found = {each: flag.to(each) for each in found or {device: flag}}
    return found


def _check_sent(param: object, param_name: str) -> None:
    """Check a tensor that is passed to a collective as torch does, but raise an error if the tensor is sharded."""
    _refuse_to_send(param)
    torch_private.check_sent.torchs(param, param_name)


def _check_sent_list(param: object, param_name: str) -> None:
    """Check a list of tensors that is passed to a collective as torch does, but raise an error if one is sharded."""
    for tensor in param if isinstance(param, list) else ():
        _refuse_to_send(tensor)
    torch_private.check_sent_list.torchs(param, param_name)


def _refuse_to_send(tensor: object) -> None:
    if isinstance(tensor, ShardedTensor) and tensor.spec.mesh.shard_size > 1:
        raise LifecycleError(
            f"rank {tensor.spec.mesh.rank}: a collective was called with {tensor.name}, but each rank holds different "
            "elements of it",
            hint="remove the collective: gradients are already averaged over all ranks; full_tensor() gathers them",
        )


def _distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **options: Any,
) -> DTensor:
    """Distribute a tensor as torch does, but also accept the placements of a sharded parameter."""
    if isinstance(tensor, DTensor) and (tensor.device_mesh, tensor.placements) == (
        device_mesh,
        tuple(placements or ()),
    ):
        return tensor  # torch also returns a tensor that already has these placements
    if device_mesh is not None and device_mesh.size() == 1:
        options["src_data_rank"] = None  # nothing is sent, and no process group is needed
    return _made(torch_private.distribute_tensor, tensor, device_mesh, placements, **options)


def _redistribute(
    self: DTensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
) -> DTensor:
    """Redistribute a DTensor as torch does, but also accept the placements of a sharded parameter."""
    return _made(torch_private.redistribute, self, device_mesh or self.device_mesh, placements, **options)


def _from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    shape: torch.Size | None = None,
    **options: Any,
) -> DTensor:
    """Make a DTensor from this rank's elements as torch does, but also accept a sharded parameter's placements."""
    ragged = _ragged_of(placements)
    if ragged is None or device_mesh is None:
        made: DTensor = torch_private.from_local.torchs(local_tensor, device_mesh, placements, shape=shape, **options)
        return made
    if shape is None:
        raise LifecycleError(
            f"an interval of {local_tensor.numel()} elements does not determine the shape of the complete tensor",
            hint="use DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())",
        )
    spec = _spec_of(device_mesh, shape, ragged)
    if local_tensor.shape == shape:  # PEFT passes unsharded tensors, because it expects tensor parallelism
        local_tensor = spec.cut(local_tensor)
    if local_tensor.numel() != spec.interval.numel:
        raise LifecycleError(
            f"rank {spec.mesh.rank} should hold {spec.interval.numel} elements of a tensor {tuple(shape)} with the "
            f"placement {ragged}, but got {local_tensor.numel()}",
            hint="pass the elements of p.to_local(), or use distribute_tensor(whole, p.device_mesh, p.placements)",
        )
    _check_no_graph(local_tensor)
    return ShardedTensor(local_tensor.detach().reshape(spec.local_shape), spec)


def _make_dtensor(
    init_op: Any,
    size: torch.Size,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **options: Any,
) -> DTensor:
    """Make a DTensor of zeros, ones or similar as torch does, but also accept a sharded parameter's placements."""
    return _made(torch_private.make_dtensor, init_op, size, device_mesh, placements, **options)


def _made(torchs: Replaced, *args: Any, **options: Any) -> DTensor:
    """Make a DTensor as torch does, or a sharded tensor if the placements are those of a sharded parameter."""
    *given, device_mesh, placements = args
    ragged = _ragged_of(placements)
    if ragged is None or device_mesh is None:
        made: DTensor = torchs.torchs(*args, **options)
        return made
    whole: DTensor = torchs.torchs(*given, device_mesh, [Replicate()] * device_mesh.ndim, **options)
    _check_no_graph(whole)
    spec = _spec_of(whole.device_mesh, whole.shape, ragged)
    own = spec.cut(whole.to_local().detach()).clone()
    return ShardedTensor(own, spec, requires_grad=whole.requires_grad)


def _ragged_of(placements: Sequence[Placement] | None) -> RaggedShard | None:
    return next((p for p in placements or () if isinstance(p, RaggedShard)), None)


def _mesh_of(device_mesh: DeviceMesh) -> Mesh | None:
    """Return the mesh of the package that matches torch's mesh, or None if there is none."""
    if not dist.is_initialized():
        return init_mesh(device=torch.device(device_mesh.device_type))  # all meshes of a single process are equivalent
    alike = (mesh for mesh in meshes() if mesh.device_mesh == device_mesh)
    return next((mesh for mesh in alike if mesh.shard_size == device_mesh.shape[-1]), None)  # without a replicate axis


def _spec_of(device_mesh: DeviceMesh, shape: torch.Size, ragged: RaggedShard) -> ShardSpec:
    mesh = _mesh_of(device_mesh)
    if mesh is None:
        raise LifecycleError(f"nothing is sharded over {device_mesh}", hint="pass the parameter's own device_mesh")
    return ShardSpec(mesh, shape, ragged, Name())


def _check_no_graph(tensor: torch.Tensor) -> None:
    """Raise `LifecycleError` if a tensor has a gradient function, because autograd would silently lose its gradient."""
    if tensor.grad_fn is not None:
        raise LifecycleError(
            f"a tensor {tuple(tensor.shape)} that requires gradients cannot be distributed like a sharded parameter",
            hint="call detach() first, or compute it under torch.no_grad()",
        )


def _distribute_tensors(local_state_dict: dict[str, Any], keys: Iterable[str], *args: Any, **options: Any) -> None:
    """Fill DTensors and sharded parameters from the pairs (DTensor, complete tensor) in `local_state_dict`."""
    others = []
    for key in keys:
        pair = local_state_dict.get(key)
        if isinstance(pair, tuple) and isinstance(pair[0], ShardedTensor):
            sharded, whole = pair
            own = sharded.spec.cut(whole)
            local_state_dict[key] = ShardedTensor(own.clone(), sharded.spec) if sharded.is_meta else sharded
            sharded.local.copy_(own)
        else:
            others.append(key)
    torch_private.distribute_tensors.torchs(local_state_dict, others, *args, **options)


def _zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """Clear gradients as torch does, but without reading `.grad`, which would create a DTensor for each gradient."""
    if set_to_none:
        held = [parameter for parameter in sharded_parameters(self) if parameter.local_grad is not None]
        for parameter in held:
            parameter.publish(None)
        for bucket in dict.fromkeys(p.bucket for p in held):
            if bucket.has_gradient:
                bucket.gradient.main.free_if_cleared()
    torch_private.zero_grad.torchs(self, set_to_none)


def _run_backward_to(t_outputs: Any, *args: Any, **options: Any) -> Any:
    """Run a backward, but raise `LifecycleError` if it would return None as the gradient of a sharded parameter."""
    inputs = args[3] if len(args) > 3 else ()
    wanted = [(index, p) for index, p in enumerate(inputs) if isinstance(p, ShardedParameter)]
    if wanted and options.get("accumulate_grad"):
        raise _no_graph_has(wanted[0][1])
    try:
        found = torch_private.run_backward.torchs(t_outputs, *args, **options)
    except Exception as error:
        PROGRESS.watcher.explain(error)
        if wanted and "not have been used in the graph" in str(error):
            raise _no_graph_has(wanted[0][1]) from error
        raise
    for index, parameter in wanted:
        if found[index] is None:
            raise _no_graph_has(parameter)
    return found


def _no_graph_has(parameter: ShardedParameter) -> LifecycleError:
    return LifecycleError(
        f"rank {parameter.mesh.rank}: the autograd graph contains the unsharded parameter instead of sharded "
        f"parameter {parameter.name}",
        hint="use model.parameters() inside `with unsharded(model)`, or call backward() and read .grad",
    )


def _give_whole_adapters(module: ModuleType) -> None:
    """Make PEFT's `get_peft_model_state_dict` return plain tensors for adapters that this process holds completely."""
    place = Replaced.of(module, "get_peft_model_state_dict")

    @functools.wraps(place.torchs)
    def get_peft_model_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: _plain(value) for name, value in place.torchs(*args, **kwargs).items()}

    replace({place: get_peft_model_state_dict})


def _plain(value: Any) -> Any:
    """Return a plain tensor for a sharded one if this rank holds all of its elements, or else the value itself."""
    is_whole = isinstance(value, ShardedTensor) and value.spec.owns_all
    return value.detach().full_tensor() if is_whole else value


def describe_intervals(module: ModuleType) -> None:
    """Make verl's `ShardSpec` describe an interval, which verl would take for a tensor that all ranks hold."""
    theirs = module.ShardSpec.from_param

    def from_param(param: torch.Tensor) -> Any:
        described = theirs(param)
        if isinstance(param, ShardedTensor) and _ragged_of(param.placements) is not None:
            spec = param.spec
            if type(spec) is not ShardSpec:
                raise LifecycleError(
                    f"verl's export of changed elements does not support {param.name}, which is also cut along another "
                    "axis than the shard axis",
                    hint="use get_per_tensor_param, which gives complete tensors",
                )
            described.place, described.gather_group = spec.interval.start, spec.mesh.shard_group
            described.contributes = spec.mesh.replicate_rank == 0
        return described

    module.ShardSpec.from_param = from_param


@functools.cache
def install() -> None:
    """Replace torch's functions. This is called when a model or tensor is sharded for the first time, not on import."""
    torch_private.let_dtensors_compute()
    for kind in (ShardedTensor, ShardedParameter, RowTensor, RowParameter):
        torch_private.allow_foreach(kind)
    replace(
        {
            torch_private.zero_grad: _zero_grad,
            torch_private.total_norm: _total_norm,
            torch_private.unscale: _unscale_grads,
            torch_private.check_sent: _check_sent,
            torch_private.distribute_tensor: _distribute_tensor,
            torch_private.redistribute: _redistribute,
            torch_private.from_local: staticmethod(_from_local),
            torch_private.make_dtensor: _make_dtensor,
            torch_private.distribute_tensors: _distribute_tensors,
            torch_private.check_sent_list: _check_sent_list,
            torch_private.run_backward: _run_backward_to,
        }
    )
    after_import("torch.distributed.checkpoint.hf_storage", torch_private.keep_every_box)
    after_import("peft.utils.save_and_load", _give_whole_adapters)
    after_import("verl.workers.engine.spec", describe_intervals)
    torch_optimizer.register_optimizer_step_pre_hook(hooks.before_step)
    torch_optimizer.register_optimizer_step_post_hook(hooks.after_step)
