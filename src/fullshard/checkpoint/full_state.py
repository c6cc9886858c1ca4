"""Convert between a sharded model and the state dict of the unsharded model, with full tensors in memory."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.ranks import Ranks, all_come
from fullshard.checkpoint.tensors import LocalTensor, local_tensors, modules_with_extra_state, rest
from fullshard.checkpoint.values import decode_value, encode_value
from fullshard.core.errors import CheckpointError, LifecycleError
from fullshard.core.user_class import user_class
from fullshard.engine.lookup import clean_name, unit_of
from fullshard.engine.precision import cast_floating, dtype_name, torch_dtype
from fullshard.features import ShardedTensor


def full_tensor(local: LocalTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a parameter or buffer as a full tensor, cast to `dtype` before the gather. All ranks must call this."""
    held: torch.Tensor = cast_floating(local.held, dtype)
    return local.tensor.spec.gather(held) if isinstance(local.tensor, ShardedTensor) else held


ALONE_SECONDS = 10.0
"""A rank counts as saving alone if the others do not follow in this time. Between steps no rank is so far behind."""


def gather_when_all_save(model: nn.Module) -> None:
    """Make `model.save_pretrained(...)` save the full weights on the main process when every rank calls it.

    A caller that passes `is_main_process=`, as is usual with Accelerate, calls it on every rank, so the weights are
    gathered. Without this argument, it is possible that only one rank calls it. The rank then waits a short time for
    the other ranks. If they do not call it, the rank saves only if it has all elements; otherwise, it raises an error.
    Some `save_pretrained` methods, such as that of diffusers models, do not accept a state dict. They get the full
    weights from `model.state_dict()`, on the main process only.
    """
    save: Any = model.save_pretrained

    @functools.wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _by_name(save, args, kwargs)
        if kwargs.get("path_initial_model_for_weight_conversion") is not None:
            raise LifecycleError(
                "save_pretrained(path_initial_model_for_weight_conversion=...) adds the initial adapter to the model, "
                "which is not possible because the model is sharded",
                hint="save without this argument, and convert the saved adapter in a single process",
            )
        may_be_alone = kwargs.get("state_dict") is None and "is_main_process" not in kwargs and dist.is_initialized()
        if may_be_alone and not _is_whole_here(model) and all_come("save_pretrained", ALONE_SECONDS):
            kwargs["is_main_process"] = dist.get_rank() == 0
        is_main = kwargs.get("is_main_process", True)
        if kwargs.get("state_dict") is None and ("is_main_process" in kwargs or _is_whole_here(model)):
            kwargs["state_dict"] = full_state_dict(model, rank0_only=not is_main)
        if kwargs.get("state_dict") is None or _takes_state_dict(model):
            return save(*args, **kwargs)
        whole = kwargs.pop("state_dict")
        if not is_main or not whole:
            return None
        with whole_in_state_dicts(model, whole):
            return save(*args, **kwargs)

    model.save_pretrained = save_pretrained  # type: ignore[assignment]


def _by_name(
    save: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments by keyword, unless some belong to `*args`. Raise `TypeError` if they do not fit."""
    signature = inspect.signature(save)
    signature.bind(*args, **kwargs)
    names = [name for name, each in signature.parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        return args, kwargs
    return (), dict(zip(names, args, strict=False)) | kwargs


def _is_whole_here(model: nn.Module) -> bool:
    """Return whether this rank has all elements of all parameters, as with one rank or replicated parameters."""
    return all(parameter.spec.owns_all for parameter in model.parameters() if isinstance(parameter, ShardedTensor))


def _takes_state_dict(model: nn.Module) -> bool:
    """Return whether the model's `save_pretrained` saves a given state dict, which PEFT's signature does not show."""
    cls: Any = user_class(model)
    save = cls.save_pretrained
    return "state_dict" in inspect.signature(save).parameters or save.__module__.startswith("peft.")


def full_state_dict(model: nn.Module, *, rank0_only: bool = True, cpu: bool = True) -> dict[str, Any]:
    """Return the state dict of the unsharded model. All ranks must call this.

    Parameters are gathered one at a time, so in addition to the shards, the device needs memory for the largest
    parameter.

    Args:
        model: sharded or not.
        rank0_only: return an empty dict on all ranks except 0.
        cpu: move every tensor to host memory as soon as it is gathered.

    Returns:
        Copies under the names that the unsharded model uses, in the same order. Tied names share one tensor.

    Raises:
        CheckpointError: called inside `unsharded(model)`.
    """
    rest(model)
    keep = Ranks.of(model).rank == 0 or not rank0_only
    whole: dict[str, Any] = {}
    for local in local_tensors(model):
        tensor = full_tensor(local)
        if not keep:
            continue
        if not local.is_sharded:
            tensor = tensor.clone()
        whole |= dict.fromkeys(local.names, tensor.cpu() if cpu else tensor)
    if not keep:
        return {}
    whole |= {name: module.get_extra_state() for name, module in _extra_states(model).items()}
    # Entries that modules add to their state dicts (for example about quantization) are the same on every rank.
    return {clean_name(name): whole.get(clean_name(name), value) for name, value in model.state_dict().items()}


@contextlib.contextmanager
def whole_in_state_dicts(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Make `state_dict()` of the model and of each of its modules return full tensors, on this rank only.

    Use this for code that saves a model in its own way, one module at a time. A forward inside the context raises an
    error: parameters cannot be gathered, because the other ranks do not take part.
    """
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    tensors = {
        id(parameter.spec): whole[names[id(parameter)]]
        for parameter in model.parameters()
        if isinstance(parameter, ShardedTensor)
    }

    def put_in(_module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: object) -> None:
        for name, value in state_dict.items():
            if name.startswith(prefix) and isinstance(value, ShardedTensor):
                state_dict[name] = tensors.get(id(value.spec), value)

    def refuse(module: nn.Module, _inputs: object) -> None:
        raise LifecycleError(
            f"{user_class(module).__name__} is sharded, but its forward was called while only one rank was saving the "
            "model",
            hint="compute the values to save beforehand, on every rank",
        )

    hooks = [module.register_state_dict_post_hook(put_in) for module in model.modules()]
    hooks += [module.register_forward_pre_hook(refuse, prepend=True) for module in model.modules() if unit_of(module)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def local_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's part of every parameter and buffer, in host memory. This is not a collective.

    Returns:
        Copies under the names that the unsharded model uses: flat intervals of sharded parameters, and all other
        tensors in full.

    Raises:
        CheckpointError: called inside `unsharded(model)`.
    """
    rest(model)
    return {name: local.held.cpu().clone() for local in local_tensors(model) for name in local.names}


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load full tensors into a sharded model. All ranks must call this.

    Only the `state_dict` of rank 0 is read. Its tensors are sent one at a time, and every rank keeps its interval.
    Values are cast to the parameters' dtypes, as torch's `load_state_dict` does. The extra state of modules is loaded,
    too, if `save_checkpoint` can store it.

    Args:
        model: sharded or not.
        state_dict: names and full tensors on rank 0. Ignored on the other ranks, which may pass None.
        strict: raise an error for missing and unexpected names.

    Returns:
        The missing and the unexpected names. Both lists are empty if `strict` is set.

    Raises:
        CheckpointError: shapes or, if `strict`, names differ (the error lists all of them), or `save_checkpoint` cannot
            store the extra state. Every rank raises it.
    """
    ranks = Ranks.of(model)
    ranks.together("loading a state dict", lambda: rest(model))
    locals_ = local_tensors(model)
    extra = {k: m for k, m in _extra_states(model).items() if type(m).set_extra_state is not nn.Module.set_extra_state}
    given = state_dict if ranks.rank == 0 and state_dict is not None else {}
    tensors: dict[str, torch.Tensor] = {}

    def match() -> Any:
        states = {clean_name(name): value for name, value in given.items() if clean_name(name) in extra}
        encoded = encode_value(states, where="extra state", tensors=tensors)
        sizes = {name: (dtype_name(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
        return *match_names(locals_, given, extra, strict=strict), encoded, sizes

    found = ranks.on_rank_0("loading a state dict", match)
    names, missing, unexpected, encoded, sizes = ranks.broadcast(found)
    for local, name in zip(locals_, names, strict=True):
        if name is None:
            continue
        whole = ranks.broadcast_tensor(given.get(name), local.shape, local.tensor.dtype)
        part = local.tensor.spec.cut(whole) if isinstance(local.tensor, ShardedTensor) else whole
        local.held.copy_(part.view(local.held.shape))
    for name, (dtype, shape) in sizes.items():
        tensors[name] = ranks.broadcast_tensor(tensors.get(name), shape, torch_dtype(dtype))
    for name, state in decode_value(encoded, tensors).items():
        extra[name].set_extra_state(state)
    return missing, unexpected


def _extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have extra state, keyed by the name of this state in state dicts."""
    modules = modules_with_extra_state(model).items()
    return {f"{path}._extra_state" if path else "_extra_state": module for path, module in modules}


def match_names(
    locals_: list[LocalTensor], state_dict: Mapping[str, Any], extra: Iterable[str] = (), *, strict: bool
) -> tuple[list[str | None], list[str], list[str]]:
    """Return each tensor's name in the state dict or None, and the missing and unexpected names, or raise an error."""
    given = {clean_name(name): name for name in state_dict}
    names: list[str | None] = []
    missing, problems = [], []
    for local in locals_:
        present = [given[name] for name in local.names if name in given]
        names.append(present[0] if present else None)
        if not present:
            missing.append(local.name)
        elif not isinstance(value := state_dict[present[0]], torch.Tensor):
            problems.append(f"{local.name!r} must be a tensor, got a {type(value).__name__}")
        elif tuple(value.shape) != local.shape:
            problems.append(f"{local.name!r} has shape {local.shape}, got {tuple(value.shape)}")
    missing += [name for name in extra if name not in given]
    known = {*extra, *(name for local in locals_ for name in local.names)}
    unexpected = [name for clean, name in given.items() if clean not in known]
    if strict:
        problems += [f"{name!r} is missing" for name in missing]
        problems += [f"{name!r} is not in the model" for name in unexpected]
    if problems:
        raise CheckpointError("the state dict does not match the model:\n" + "\n".join(problems))
    return names, missing, unexpected
