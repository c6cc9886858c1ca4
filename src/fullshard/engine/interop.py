"""Makes torch's own tools see whole gradients instead of this rank's slices.

    torch.nn.utils.clip_grad_norm_     the norm over all ranks, not the local one
    torch.amp.GradScaler               an overflow on one rank makes every rank skip the step
    optimizer.state_dict               its tensors say that they are slices, and where from
    optimizer.load_state_dict          takes whole tensors too, and keeps this rank's intervals of them
    torch.nn.utils.parameters_to_vector refused, and so is the way back
    torch.distributed.all_reduce       and every other collective: refused, as each rank has other elements
    torch.autograd.grad, backward(inputs=)  refused for sharded parameters, which no graph has
    any optimizer                      refused if it needs whole matrices or was made before sharding

Each of them would otherwise run and be wrong without a word. torch offers no hook in most of these places, so the one
function each goes through is replaced by one that behaves the same for everything but sharded parameters. That is done
when something is sharded for the first time; until then torch is as it was.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad as torch_clip
from torch.optim import optimizer as torch_optimizer

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import LifecycleError, OptimizerError
from fullshard.core.events import EventKind
from fullshard.engine.bucket import Bucket, bucket_of
from fullshard.engine.module import units_of
from fullshard.engine.parameter import (
    ShardedParameter,
    are_same,
    mesh_of_gradient,
    sharded_parameter_of,
    sharded_parameters,
)
from fullshard.engine.schedule import schedule_of
from fullshard.engine.slices import Slice
from fullshard.engine.step.offloaded_state import bring_state, send_state
from fullshard.engine.step.segments import finish_step, use_segments
from fullshard.engine.unit import Unit, owner_of

NEEDS_WHOLE_TENSORS = frozenset(
    {"Adafactor", "Adalomo", "CAME", "LAMB", "Lamb", "FusedLAMB", "LARS", "Lars", "LBFGS"}
    | {"Muon", "Shampoo", "DistributedShampoo", "SOAP", "SparseAdam"}
)
"""Optimizers whose update of an element depends on the rest of its tensor; wrong on slices."""


# -- clipping ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their norm over all parameters and all ranks is at most `max_norm`. A collective.

    Args:
        parameters: a model or parameters, sharded and ordinary ones mixed. Ordinary ones count once, as equal on all
            ranks.
        max_norm: the largest norm allowed.
        norm_type: which p-norm; `inf` is the maximum.
        error_if_nonfinite: raise `RuntimeError` if the norm is not finite.

    Returns:
        The norm before clipping, a 0-D tensor, the same on every rank.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    norm: torch.Tensor = torch_clip.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    return norm


def clip_grad_value_(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp every gradient element to [-clip_value, clip_value]. No communication."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    torch_clip.clip_grad_value_(parameters, clip_value)


def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Torch's total norm, with the sharded gradients' part summed over their shard group."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    sharded: dict[Mesh, list[torch.Tensor]] = {}
    ordinary = []
    for tensor in tensors:
        mesh = mesh_of_gradient(tensor)
        tensor = tensor.plain() if isinstance(tensor, Slice) else tensor
        if mesh is None:
            ordinary.append(tensor)
        else:
            sharded.setdefault(mesh, []).append(tensor)
    if not sharded:
        return torch_private.total_norm.torchs(tensors, norm_type, error_if_nonfinite, foreach)
    norms = [_group_norm(mesh, part, float(norm_type), foreach) for mesh, part in sharded.items()]
    if ordinary:
        norms.append(torch_private.total_norm.torchs(ordinary, norm_type, False, foreach))
    device = norms[0].device
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of gradients is {total.item()}, so it cannot be clipped"
        )
    return total


def _group_norm(mesh: Mesh, gradients: Sequence[torch.Tensor], order: float, foreach: bool | None) -> torch.Tensor:
    """Norm over one shard group, in float32 or wider. Empty slices are left out: most are at large world sizes."""
    parts = [gradient for gradient in gradients if gradient.numel()]
    # of all gradients, not of the parts: the same on every rank
    dtype = functools.reduce(torch.promote_types, {gradient.dtype.to_real() for gradient in gradients}, torch.float32)
    if parts:
        local = torch_private.total_norm.torchs(parts, order, False, foreach).to(mesh.device, dtype)
    else:
        local = torch.zeros((), device=mesh.device, dtype=dtype)
    if mesh.shard_group is None:
        return local
    if order == float("inf"):
        dist.all_reduce(local, op=dist.ReduceOp.MAX, group=mesh.shard_group)
        return local
    if order == 0:  # a count
        dist.all_reduce(local, group=mesh.shard_group)
        return local
    powered = local**order
    dist.all_reduce(powered, group=mesh.shard_group)
    return powered ** (1 / order)


# -- loss scaling -----------------------------------------------------------------------------------------------


def _unscale_grads(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    """Torch's unscaling, then agree on whether any rank found an overflow."""
    found: dict[torch.device, torch.Tensor] = torch_private.unscale.torchs(
        scaler, optimizer, inv_scale, found_inf, allow_fp16
    )
    for mesh in dict.fromkeys(p.mesh for p in sharded_parameters(optimizer)):  # in the same order on every rank
        if mesh.world_group is None:
            continue
        flag = sum((f.to(mesh.device) for f in found.values()), torch.zeros((), device=mesh.device))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=mesh.world_group)
        found = {device: flag.to(device) for device in found or {mesh.device: flag}}
    return found


# -- optimizer state --------------------------------------------------------------------------------------------

_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that have stepped or loaded a state, so all that have one."""


@functools.wraps(torch_private.state_dict.torchs)
def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Torch's, with a `Slice` in place of each tensor that is one."""
    return _map_states(optimizer, torch_private.state_dict.torchs(optimizer), _as_slices)


def _as_slices(state: dict[str, Any], parameter: ShardedParameter) -> dict[str, Any]:
    return {
        key: Slice.of(value, parameter) if type(value) is torch.Tensor and value.shape == parameter.shape else value
        for key, value in state.items()
    }


@functools.wraps(torch_private.load_state_dict.torchs)
def _load_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Torch's loading, after whole tensors are cut to this rank's intervals."""
    torch_private.load_state_dict.torchs(optimizer, _map_states(optimizer, state_dict, _cut_state))
    _seen.add(optimizer)


@functools.wraps(torch_private.set_state.torchs)
def _setstate(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Where every optimizer's loading ends: each `Slice` becomes a plain tensor, if it is this rank's."""
    states = state.get("state", {})
    for parameter, held in states.items():
        if isinstance(parameter, ShardedParameter) and any(isinstance(value, Slice) for value in held.values()):
            states[parameter] = {key: _own(value, parameter, key) for key, value in held.items()}
    torch_private.set_state.torchs(optimizer, state)


def _own(value: Any, parameter: ShardedParameter, key: str) -> Any:
    if not isinstance(value, Slice):
        return value
    if value.interval != parameter.interval or value.global_shape != parameter.global_shape:
        raise OptimizerError(
            f"rank {parameter.mesh.rank}: state {key!r} of {'='.join(parameter.names)} {tuple(parameter.global_shape)} "
            f"is that of {'='.join(value.names)} {tuple(value.global_shape)}, its elements {value.interval.start} to "
            f"{value.interval.stop}, expected {parameter.interval.start} to {parameter.interval.stop}",
            hint="load whole tensors, or a checkpoint with fullshard.checkpoint.load_checkpoint",
        )
    return value.plain()


def _map_states(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    function: Callable[[dict[str, Any], ShardedParameter], dict[str, Any]],
) -> dict[str, Any]:
    """`state_dict` with `function` applied to the state of each sharded parameter."""
    saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    held = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    state = dict(state_dict["state"])
    for key, parameter in zip(saved, held, strict=False):  # other lengths are torch's to refuse
        if key in state and isinstance(parameter, ShardedParameter):
            state[key] = function(state[key], parameter)
    return {**state_dict, "state": state}


def optimizer_of(state_dict: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """The optimizer whose `state_dict()` this is, recognised by the tensors in it; None for anything else."""
    install()  # without anything sharded, too, a state dict is of one that has stepped
    given = _owner_ids(state_dict["state"])
    return next((optimizer for optimizer in _seen if given & _owner_ids(optimizer.state)), None)


def _owner_ids(state: Mapping[Any, Mapping[str, Any]]) -> set[int]:
    """Of the sharded parameters that an optimizer or its state dict has state of, and of the tensors of other state."""
    values = itertools.chain.from_iterable(values.values() for values in state.values())
    ids = {id(v.parameter if isinstance(v, Slice) else v) for v in values if isinstance(v, torch.Tensor)}
    return ids | {id(key) for key in state if isinstance(key, ShardedParameter)}


# -- optimizers -------------------------------------------------------------------------------------------------


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot work on sharded parameters.

    Raises:
        OptimizerError: it needs whole tensors, or holds original parameters, which never get a gradient.
    """
    name = type(optimizer).__name__
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    if names & NEEDS_WHOLE_TENSORS and sharded_parameters(optimizer):
        raise OptimizerError(
            f"{name} needs whole tensors and would be wrong on slices without a word",
            hint="use an element-wise optimizer such as AdamW, SGD or Lion",
        )
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            sharded = sharded_parameter_of(parameter)
            if sharded is not None and sharded is not parameter:
                raise OptimizerError(
                    f"{name}, parameter group {number}: holds {sharded.name} as it was before sharding, which never "
                    "gets a gradient",
                    hint="make the optimizer after fully_shard, or call fullshard.repoint(optimizer)",
                )


def repoint(optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
    """Replace original parameters by the sharded ones that stand for them, in place, group by group.

    Hyper-parameters and the order of groups stay. Optimizer state is cut to this rank's interval.

    Args:
        optimizer: made before the model was sharded; others are left as they are.
        model: the model, to check that the optimizer holds something of it.

    Raises:
        OptimizerError: as `check_optimizer`; or nothing in the optimizer belongs to `model`.
    """
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            sharded = sharded_parameter_of(parameter)
            if sharded is None or sharded is parameter:
                continue
            group["params"][index] = sharded
            if parameter in optimizer.state:
                optimizer.state[sharded] = _cut_state(optimizer.state.pop(parameter), sharded)
    check_optimizer(optimizer)
    if model is not None:
        own = {id(p) for unit in units_of(model) for bucket in unit.buckets for p in bucket.sharded_parameters}
        own |= {id(p) for p in model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise OptimizerError(
                f"{type(optimizer).__name__} holds no parameter of {type(model).__name__}",
                hint="make the optimizer from this model's parameters",
            )


def _cut_state(state: dict[str, Any], sharded: ShardedParameter) -> dict[str, Any]:
    interval = sharded.interval
    cut = {}
    for key, value in state.items():
        # The step count is a 0-D tensor, and so is all state of a scalar parameter.
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, Slice)
        per_element = is_tensor and value.shape == sharded.global_shape and key != "step"
        cut[key] = value.reshape(-1)[interval.start : interval.stop].clone() if per_element else value
    return cut


@dataclass(frozen=True, slots=True)
class _Held:
    """What an optimizer held at its last step.

    Attributes:
        parameters: all of them, if every one was sharded; else none, for the others may be sharded later.
        buckets: that the sharded ones are in.
    """

    parameters: list[torch.Tensor]
    buckets: list[Bucket]


_held: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Held] = weakref.WeakKeyDictionary()


def _checked_buckets(optimizer: torch.optim.Optimizer) -> list[Bucket]:
    """The buckets that the optimizer updates; checks it first, unless it holds what it held at its last step."""
    parameters = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
    known = _held.get(optimizer)
    if known is not None and are_same(parameters, known.parameters):
        return known.buckets
    check_optimizer(optimizer)
    sharded = sharded_parameters(optimizer)
    buckets = list(dict.fromkeys(map(bucket_of, sharded)))
    _held[optimizer] = _Held(parameters if len(sharded) == len(parameters) else [], buckets)
    return buckets


def _before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Runs before every optimizer's step: check it, and drop what was gathered from weights about to change."""
    buckets = _checked_buckets(optimizer)
    _seen.add(optimizer)
    if any(cls.__module__.startswith("bitsandbytes.") for cls in type(optimizer).__mro__):
        # Its kernels are launched per parameter, and CUDA refuses a launch for the many slices that are empty.
        for parameter in sharded_parameters(optimizer):
            if parameter.numel() == 0:
                parameter.grad = None
    use_segments(optimizer)
    for bucket in buckets:
        bucket.touch()
    schedules = dict.fromkeys(schedule_of(owner_of(bucket)) for bucket in buckets)
    for schedule in schedules:
        schedule.before_optimizer_step()
        pinned = next((unit for unit in schedule.units if unit.is_pinned), None)
        if pinned is not None:
            raise _pinned(pinned)
    if any(bucket.main_is_on_host for bucket in buckets):
        for name in ("grad_scale", "found_inf"):  # GradScaler's, for fused optimizers, which would not wait for a copy
            if isinstance(value := getattr(optimizer, name, None), torch.Tensor):
                setattr(optimizer, name, value.cpu())
    bring_state(optimizer, buckets)
    for schedule in schedules:
        if schedule.event_sink is not None:
            schedule.units[-1].emit(EventKind.OPTIMIZER_STEP)


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Runs after every optimizer's step."""
    finish_step(optimizer)
    held = _held.get(optimizer)
    if held is not None:  # else the step began before anything was sharded
        send_state(optimizer, held.buckets)


def _pinned(unit: Unit) -> LifecycleError:
    return LifecycleError(
        f"optimizer step while unit {unit.name!r} is kept unsharded", hint="step outside `with unsharded(model)`"
    )


# -- one vector of all parameters -------------------------------------------------------------------------------


def _check_param(param: torch.Tensor, old_param_device: int | None) -> int:
    """Torch's check of each parameter that becomes a part of a vector, or is made of one."""
    if isinstance(param, (ShardedParameter, Slice)):
        raise LifecycleError(
            f"a vector of all parameters would have only this rank's slice of {'='.join(param.names)}",
            hint="call it inside `with fullshard.unsharded(model)`, or use .full_tensor() of each on every rank",
        )
    device: int = torch_private.check_in_vector.torchs(param, old_param_device)
    return device


# -- collectives of the script's -------------------------------------------------------------------------------


def _check_sent(param: object, param_name: str) -> None:
    """Torch's check of a tensor that a collective is given."""
    _refuse_to_send(param)
    torch_private.check_sent.torchs(param, param_name)


def _check_sent_list(param: object, param_name: str) -> None:
    """The same for a list of them."""
    for tensor in param if isinstance(param, list) else ():
        _refuse_to_send(tensor)
    torch_private.check_sent_list.torchs(param, param_name)


def _refuse_to_send(tensor: object) -> None:
    if isinstance(tensor, (ShardedParameter, Slice)):
        parameter = tensor if isinstance(tensor, ShardedParameter) else tensor.parameter
        if parameter.mesh.shard_size > 1:
            raise LifecycleError(
                f"rank {parameter.mesh.rank}: a collective of the slice of {'='.join(parameter.names)}, of which every "
                "rank has other elements",
                hint="leave it out: gradients are averaged over all ranks already; the whole is .full_tensor()",
            )


# -- gradients that autograd hands to its caller ----------------------------------------------------------------


def _run_backward_to(roots: Any, *args: Any, **options: Any) -> Any:
    """Where every backward begins: an error, where a sharded parameter's gradient would be None without a word."""
    inputs = args[3] if len(args) > 3 else ()
    wanted = [(index, p) for index, p in enumerate(inputs) if isinstance(p, ShardedParameter)]
    if wanted and options.get("accumulate_grad"):
        raise _no_graph_has(wanted[0][1])
    found = torch_private.run_backward.torchs(roots, *args, **options)
    for index, parameter in wanted:
        if found[index] is None:
            raise _no_graph_has(parameter)
    return found


def _no_graph_has(parameter: ShardedParameter) -> LifecycleError:
    return LifecycleError(
        f"rank {parameter.mesh.rank}: no graph has sharded parameter {'='.join(parameter.names)}, but the whole one",
        hint="inside `with unsharded(model)` model.parameters() are the whole ones; or call backward() and read .grad",
    )


@functools.cache
def install() -> None:
    """Put them in place. That happens when something is sharded for the first time, not when this is imported."""
    torch_private.allow_foreach(ShardedParameter)
    # No hook was there to see the steps that were taken before.
    _seen.update(o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer) and vars(o).get("state"))
    torch_private.replace(
        {
            torch_private.total_norm: _total_norm,
            torch_private.unscale: _unscale_grads,
            torch_private.state_dict: _state_dict,
            torch_private.load_state_dict: _load_state_dict,
            torch_private.set_state: _setstate,
            torch_private.check_in_vector: _check_param,
            torch_private.check_sent: _check_sent,
            torch_private.check_sent_list: _check_sent_list,
            torch_private.run_backward: _run_backward_to,
        }
    )
    torch_optimizer.register_optimizer_step_pre_hook(_before_step)
    torch_optimizer.register_optimizer_step_post_hook(_after_step)
