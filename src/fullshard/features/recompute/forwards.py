"""Activation checkpointing and compilation, which change the forward of modules in place, before sharding.

Only `module.forward` is replaced, with a bound method of the same module. As a result, no parameter is renamed, and no
wrapper appears in the module tree. Hooks on the module, including those for sharding, run outside the new forward.
`copy.deepcopy` binds the copied method to the copied module.
"""

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullshard.core.errors import WrapError
from fullshard.core.user_class import inner_forward, is_unit
from fullshard.features.recompute import torch_private

_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")
"""Argument names with which Transformers models pass a key/value cache to a layer."""

_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
"""The matrix product kernels that `nn.Linear` and Transformers' `Conv1D` call."""


def checkpoint_modules(
    model: nn.Module, modules: Iterable[nn.Module], *, reentrant: bool = False, selective: bool = False
) -> list[nn.Module]:
    """Recompute the activations of `modules` in backward instead of keeping them in memory.

    Call it before the model is sharded. If modules are nested, only the outermost is checkpointed, because recomputing
    the inner one again within the recomputation would cost time and save little memory. The recomputation uses the same
    random numbers (dropout), autocast settings and buffers. It leaves buffers unchanged, so a batch norm counts its
    inputs only once. A checkpointed layer does not receive an empty key/value cache, because the recomputation would
    fill it twice.

    Args:
        model: the model that contains the modules.
        modules: usually the model's units.
        reentrant: use PyTorch's older implementation. It requires an input that requires grad, and it does not find
            tensors inside tuples or dicts.
        selective: keep tensors that are expensive to compute for their size (the output of attention and every second
            matrix product), and recompute the rest. This repeats about 40 % of a forward, and takes half the memory of
            keeping everything.

    Returns:
        The modules that were changed.

    Raises:
        WrapError: A module is not in the model, is already a unit, or is already checkpointed; the model's own
            gradient checkpointing is on; a module is compiled and `selective` is set; or both `reentrant` and
            `selective` are set.
    """
    if reentrant and selective:
        raise WrapError(
            "reentrant checkpointing recomputes everything, so it cannot be selective",
            hint="set either reentrant or selective, not both",
        )
    names = {id(module): name for name, module in model.named_modules()}
    chosen = outermost(modules)
    if any(map(_checkpoints_itself, model.modules())):
        raise WrapError(
            f"{type(model).__name__} has its own gradient checkpointing enabled, and using both would recompute twice",
            hint="call model.gradient_checkpointing_disable(), or turn off activation checkpointing",
        )
    for module in chosen:
        if id(module) not in names:
            raise WrapError(f"the {type(module).__name__} to checkpoint is not part of {type(model).__name__}")
        where = f"module {names[id(module)] or 'root'!r} ({type(module).__name__})"
        if is_unit(module):
            raise WrapError(f"{where} is already sharded", hint="checkpoint activations before sharding the model")
        if "_recomputed_forward" in module.__dict__:
            raise WrapError(f"the activations of {where} are already checkpointed")
        if selective and torch_private.is_compiled_function(module.forward):
            raise WrapError(f"{where} is compiled, but selective checkpointing needs to see individual operations")
    for module in chosen:
        # None means the forward of the class, so that a deep copy uses its own.
        module.__dict__["_recomputed_forward"] = module.__dict__.get("forward")
        module.__dict__["_recomputed_buffers"] = [inner for inner in module.modules() if inner._buffers]
        module.__dict__["_recomputed_by"] = _reentrantly if reentrant else _selectively if selective else _wholly
        module.forward = MethodType(_checkpointed_forward, module)
    return chosen


def compile_modules(modules: Iterable[nn.Module], **options: Any) -> None:
    """Compile the forward of each module separately, so that hooks and communication stay outside the graphs.

    Args:
        modules: usually the model's units. Call it before sharding, and before or after `checkpoint_modules`.
        options: keyword arguments for `torch.compile`.

    Raises:
        WrapError: A module is already a unit, or it is checkpointed selectively. Selective checkpointing must see each
            operation, which a compiled graph hides.
    """
    for module in {id(module): module for module in modules}.values():
        if is_unit(module):
            raise WrapError(
                f"{type(module).__name__} cannot be compiled, because it is already sharded",
                hint="compile modules before sharding",
            )
        if module.__dict__.get("_recomputed_by") is _selectively:
            raise WrapError(
                f"the {type(module).__name__} to compile is checkpointed selectively, which needs to see individual "
                "operations",
                hint="checkpoint the complete module or nothing: compiled graphs recompute cheap operations",
            )
        if "_recomputed_forward" in module.__dict__:
            # Compile inside the checkpoint, which then calls one opaque function and is not traced.
            module.__dict__["_recomputed_forward"] = torch.compile(
                inner_forward(module, "_recomputed_forward"), **options
            )
        else:
            module.forward = torch.compile(module.forward, **options)


def _checkpoints_itself(module: nn.Module) -> bool:
    # Older Transformers releases keep this flag on the model, newer ones on every layer.
    return getattr(module, "gradient_checkpointing", False) is True


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether a module recomputes activations, by `checkpoint_modules` or by Transformers' own switch."""
    return "_recomputed_forward" in module.__dict__ or _checkpoints_itself(module)


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not inside another of these modules, in the given order and without duplicates."""
    unique = list({id(module): module for module in modules}.values())
    inner = {id(child) for module in unique for child in module.modules() if child is not module}
    return [module for module in unique if id(module) not in inner]


def _checkpointed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    inner = inner_forward(self, "_recomputed_forward")
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    args, kwargs = _without_cache(self, args, kwargs)
    return self.__dict__["_recomputed_by"](_with_buffers(self, inner), *args, **kwargs)


def _wholly(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(run, *args, use_reentrant=False, **kwargs)


def _selectively(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(run, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)


def _reentrantly(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    keys = tuple(kwargs)

    # Reentrant checkpointing takes positional arguments only, and only tensors among them get gradients.
    def positional(*flat: Any) -> Any:
        split = len(flat) - len(keys)
        return run(*flat[:split], **dict(zip(keys, flat[split:], strict=True)))

    return checkpoint(positional, *args, *kwargs.values(), use_reentrant=True)


def _with_buffers(module: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `inner` each time with copies of the buffers that the first run started with."""
    holders: list[nn.Module] = module.__dict__["_recomputed_buffers"]
    if not holders or torch.compiler.is_compiling():  # a compiled graph changes buffers only once
        return inner
    before: list[dict[str, torch.Tensor | None]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not before:
            before.extend(_copies(holder._buffers) for holder in holders)
            versions = [_versions(holder) for holder in holders]
            output = inner(*args, **kwargs)
            for holder, copies, earlier in zip(holders, before, versions, strict=True):
                for name, _ in _versions(holder).items() & earlier.items():
                    del copies[name]  # unchanged buffers (masks, tables) need no copy
            return output
        kept = [dict(holder._buffers) for holder in holders]
        try:
            for holder, buffers in zip(holders, before, strict=True):
                holder._buffers.update(_copies(buffers))
            return inner(*args, **kwargs)
        finally:
            for holder, buffers in zip(holders, kept, strict=True):
                holder._buffers.update(buffers)

    return run


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the id and version of each buffer by name, or nothing for a batch norm, whose kernels count no changes."""
    if isinstance(module, torch_private.NormBase):
        return {}
    return {name: (id(b), b._version) for name, b in module._buffers.items() if b is not None}


def _copies(buffers: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in buffers.items()}


def _selective_contexts() -> Any:
    """Return contexts for forward and recomputation. Both count matrix products, so that they keep the same ones."""
    seen = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operation in torch_private.ATTENTION_KERNELS
        if operation in _PRODUCTS:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with empty key/value caches replaced by None."""
    caches = {name: kwargs[name] for name in _CACHE_ARGUMENTS if kwargs.get(name) is not None}
    positional = {f"argument {i}": arg for i, arg in enumerate(args) if hasattr(arg, "get_seq_length")}
    if not caches and not positional:
        return args, kwargs
    for name, cache in (caches | positional).items():
        length = getattr(cache, "get_seq_length", None)
        if length is None or length() != 0:
            raise WrapError(
                f"{type(module).__name__} received a non-empty key/value cache ({name}) while its activations are "
                "checkpointed",
                hint="turn off activation checkpointing, or do not use prefix tuning or cached prompts with it",
            )
    off = {"use_cache": False} if "use_cache" in kwargs else {}
    return tuple(None if hasattr(arg, "get_seq_length") else arg for arg in args), kwargs | dict.fromkeys(caches) | off
