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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad as torch_clip
from torch.optim import optimizer as torch_optimizer

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import LifecycleError
from fullshard.engine.parameter import (
    ShardedParameter,
    mesh_of_gradient,
    sharded_parameters,
)
from fullshard.engine.slices import Slice
from fullshard.engine.step import hooks
from fullshard.engine.step import state_dict as state_dicts

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


def _local_norm(
    tensors: Sequence[torch.Tensor], order: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    """Torch's own, of tensors as they are."""
    norm: torch.Tensor = torch_private.total_norm.torchs(tensors, order, error_if_nonfinite, foreach)
    return norm


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
        return _local_norm(tensors, norm_type, error_if_nonfinite, foreach)
    norms = [_group_norm(mesh, part, float(norm_type), foreach) for mesh, part in sharded.items()]
    if ordinary:
        norms.append(_local_norm(ordinary, norm_type, False, foreach))
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
        local = _local_norm(parts, order, False, foreach).to(mesh.device, dtype)
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


def optimizer_of(state_dict: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """The optimizer whose `state_dict()` this is, recognised by the tensors in it; None for anything else."""
    install()  # without anything sharded, too, a state dict is of one that has stepped
    return state_dicts.optimizer_among_seen(state_dict)


@functools.cache
def install() -> None:
    """Put them in place. That happens when something is sharded for the first time, not when this is imported."""
    torch_private.allow_foreach(ShardedParameter)
    # No hook was there to see the steps that were taken before.
    state_dicts.SEEN.update(
        o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer) and vars(o).get("state")
    )
    torch_private.replace(
        {
            torch_private.total_norm: _total_norm,
            torch_private.unscale: _unscale_grads,
            torch_private.state_dict: state_dicts.state_dict,
            torch_private.load_state_dict: state_dicts.load_state_dict,
            torch_private.set_state: state_dicts.set_state,
            torch_private.check_in_vector: _check_param,
            torch_private.check_sent: _check_sent,
            torch_private.check_sent_list: _check_sent_list,
            torch_private.run_backward: _run_backward_to,
        }
    )
    torch_optimizer.register_optimizer_step_pre_hook(hooks.before_step)
    torch_optimizer.register_optimizer_step_post_hook(hooks.after_step)
