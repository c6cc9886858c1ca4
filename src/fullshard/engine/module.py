"""What the user's module gains by being a unit: `FSDPModule`'s methods, and state dicts that understand slices."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Self, cast

import torch
from torch import nn

from fullshard.comm import torch_private
from fullshard.core.errors import LifecycleError
from fullshard.engine.callers import refuse_writers
from fullshard.engine.parameter import ShardedParameter, sharded_parameter_of
from fullshard.engine.schedule import Schedule, schedule_of
from fullshard.engine.slices import Slice
from fullshard.engine.unit import Unit

_UNIT = "_fullshard_unit"
_DDP = "torch.nn.parallel.distributed"
_made: list[str] = []
"""The class of the first module that became a unit in this process."""


class FSDPModule:
    """Mixed into the class of every module that is a unit. The names are torch's."""

    def unshard(self) -> None:
        """Make this unit's parameters whole, until `reshard()` or the next time the unit has run. A collective."""
        _unit(self).unshard()

    def reshard(self) -> None:
        """Free this unit's unsharded parameters."""
        _unit(self).reshard()

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As every module has it: sharded parameters, after a backward that failed too."""
        caller = sys._getframe(1)
        refuse_writers(caller, type(self).__name__)  # what get_state_dict and its kin begin with
        if caller.f_globals.get("__name__") == _DDP:
            raise _replicated(self, "DistributedDataParallel")
        schedule_of(_unit(self)).recover()
        return super().named_parameters(*args, **options)  # type: ignore[misc, no-any-return]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside reduces no gradients; the first one after it reduces their sum. FSDP1 and DDP have it."""
        with reducing(cast("nn.Module", self), reduces=False):
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; False keeps them unsharded, to be reduced by a later backward."""
        for unit in self._units(recurse):
            unit.reduce_gradients = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over the replicate axis too; False leaves that to a later backward."""
        for unit in self._units(recurse):
            for bucket in unit.buckets:
                bucket.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the parameters are freed between forward and backward."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether they are freed after backward; False saves gathers between micro-batches."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends an accumulation: in no other does an optimizer step (`step_in_backward`).

        For the whole model. No effect without an optimizer that steps in backward.
        """
        schedule_of(_unit(self)).is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of gradients over all ranks is divided by, instead of the number of ranks."""
        for bucket in _unit(self).buckets:
            bucket.divisor = factor

    def set_modules_to_forward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Units to unshard while this one runs forward, instead of the next in recorded order."""
        _unit(self).forward_prefetch = [_unit(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Units to unshard while this one runs backward, instead of the one before it in forward order."""
        _unit(self).backward_prefetch = [_unit(module) for module in modules]

    def _units(self, recurse: bool) -> list[Unit]:
        return units_of(self) if recurse else [_unit(self)]  # type: ignore[arg-type]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        units = units_of(self)  # type: ignore[arg-type]
        for unit in units:
            _check_apply(unit, fn)
        return super()._apply(_except_on_host(units, fn), recurse)  # type: ignore[misc, no-any-return]

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise _replicated(self, "DataParallel")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise LifecycleError(
            f"cannot copy or pickle a sharded {type(self).__name__}: its parameters are only this rank's slices",
            hint="deepcopy before sharding; save with fullshard.checkpoint; or build a second model and load the state",
        )


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `module` is, if it is one."""
    return module.__dict__.get(_UNIT)


def _unit(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise LifecycleError(f"{type(module).__name__} is not a unit", hint="call fully_shard on it first")
    return unit


def _replicated(module: FSDPModule, wrapper: str) -> LifecycleError:
    return LifecycleError(
        f"{wrapper} around a sharded {type(module).__name__} would make replicas of this rank's slices",
        hint="leave it out: the units reduce gradients over all ranks themselves",
    )


def anything_was_sharded() -> bool:
    """Whether any module was ever a unit in this process; the launcher warns at the end if not."""
    return bool(_made)


@contextlib.contextmanager
def reducing(model: nn.Module, *, reduces: bool) -> Iterator[None]:
    """Inside, backward reduces gradients, or keeps them unsharded until it does."""
    units = units_of(model)
    before = [unit.reduce_gradients for unit in units]
    for unit in units:
        unit.reduce_gradients = reduces
    try:
        yield
    finally:
        for unit, value in zip(units, before, strict=True):
            unit.reduce_gradients = value


def units_of(model: nn.Module) -> list[Unit]:
    """All units in `model`, inner units before the units around them."""
    found: dict[Unit, None] = {}
    for module in reversed(list(model.modules())):
        unit = unit_of(module)
        if unit is not None:
            found[unit] = None
    return list(found)


def make_fsdp_module(module: nn.Module, unit: Unit) -> None:
    """Attach the unit, and swap in a class of the same name that has `FSDPModule`'s methods."""
    cls = type(module)
    _made[:] = _made or [cls.__name__]
    # The name stays: layer class names in configs and exported architectures are read from it.
    members: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    members["forward"] = _entered_directly(cls.forward)
    for name, member in vars(cls).items():
        # torch asks of its own methods (`get_extra_state`) whether they are those of nn.Module
        if inspect.isfunction(member) and not name.startswith("_") and not hasattr(nn.Module, name):
            members[name] = _entered_past_forward(name, member)
    module.__class__ = type(cls.__name__, (FSDPModule, cls), members)
    module.__dict__[_UNIT] = unit
    # Tells dynamo that parameters are swapped behind its back; torch's own FSDP sets the same.
    for inner in module.modules():
        inner.__dict__[torch_private.MANAGED] = True
        inner._fsdp_use_orig_params = True  # type: ignore[assignment]
        if hasattr(inner, "save_pretrained") and "save_pretrained" not in inner.__dict__:
            inner.save_pretrained = _saves_no_slices(inner)  # type: ignore[assignment]
        if hasattr(inner, "prepare_inputs_for_generation") and "generate" not in inner.__dict__:
            inner.generate = _generates(inner, unit)  # type: ignore[assignment]
        if hasattr(inner, "resize_token_embeddings") and "resize_token_embeddings" not in inner.__dict__:
            inner.resize_token_embeddings = _resizes_nothing(inner)  # type: ignore[assignment]
    module.register_state_dict_post_hook(_after_state_dict)
    module.register_load_state_dict_pre_hook(_before_load_state_dict)


def _entered_directly(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the user's class, which unshards where it is called past the module, and so past hooks."""

    @functools.wraps(forward)
    def entered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (unit := unit_of(self)) is None or not unit.is_at_rest:
            return forward(self, *args, **kwargs)
        return unit.run_method(self, functools.partial(forward, self), *args, **kwargs)

    return entered


def _entered_past_forward(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the user's class: unshards within a forward or backward of the model, where every rank calls it.

    Elsewhere one rank may be alone in calling it, and would wait for the others; if it fails then, the error says so.
    """

    @functools.wraps(method)
    def entered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (unit := unit_of(self)) is None or not unit.is_at_rest:
            return method(self, *args, **kwargs)
        if unit.is_under_way:
            return unit.run_method(self, functools.partial(method, self), *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if unit.is_at_rest:
                error.add_note(
                    f"fullshard: rank {unit.mesh.rank}, unit {unit.name!r}: {type(self).__name__}.{name} was called "
                    f"past forward, where parameters are sharded\n"
                    f"hint: call fullshard.register_fsdp_forward_method(module, {name!r}) after fully_shard"
                )
            raise

    return entered


def _saves_no_slices(module: nn.Module) -> Callable[..., Any]:
    """Transformers' and PEFT's `save_pretrained`, which would write slices as if they were whole, as an error then."""
    save: Any = module.save_pretrained

    @functools.wraps(save)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(save).bind(*args, **kwargs).arguments
        given = arguments.get("state_dict", kwargs.get("state_dict"))
        tensors = module.parameters() if given is None else given.values()
        if any(isinstance(tensor, ShardedParameter) for tensor in tensors):
            raise LifecycleError(
                f"{type(module).__name__}.save_pretrained would write this rank's slices as if they were the weights",
                hint="call trainer.save_model, Accelerator.save_model or fullshard.checkpoint.export_hf on every rank; "
                "or pass state_dict=fullshard.checkpoint.full_state_dict(model)",
            )
        return save(*args, **kwargs)

    return save_pretrained


def _generates(module: nn.Module, unit: Unit) -> Callable[..., Any]:
    """Transformers' `generate`, which computes between forwards, too: features of images, encoders' outputs.

    What it calls then may hold parameters of the outermost unit, so that one is unsharded until the end.
    """
    method: Any = module.generate

    @functools.wraps(method)
    def generate(*args: Any, **kwargs: Any) -> Any:
        schedule = schedule_of(unit)
        outermost = schedule.units[-1]
        if not outermost.is_at_rest:
            return method(*args, **kwargs)
        schedule.recover()
        outermost.unshard()
        outermost.is_pinned = True
        try:
            made = method(*args, **kwargs)
        finally:  # after a failure without waiting for others, who may be elsewhere
            outermost.is_pinned = False
            outermost.reshard()
        schedule.settle()
        return made

    return generate


def _resizes_nothing(module: nn.Module) -> Callable[..., Any]:
    """Transformers' `resize_token_embeddings`, which would put parameters in that no unit owns, as an error then."""
    resize: Any = module.resize_token_embeddings

    @functools.wraps(resize)
    def resize_token_embeddings(new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        embeddings: Any = module.get_input_embeddings()  # type: ignore[operator]
        weight = sharded_parameter_of(embeddings.weight)
        rows = embeddings.weight.shape[0] if weight is None else weight.global_shape[0]
        if new_num_tokens in (None, rows) and not any((*args, *kwargs.values())):
            return embeddings
        raise LifecycleError(
            f"{type(module).__name__}.resize_token_embeddings({new_num_tokens}) on a sharded model of {rows} tokens: "
            "which parameters there are was settled when it was sharded",
            hint="resize before fully_shard, shard_model or prepare",
        )

    return resize_token_embeddings


def assemble(modules: list[nn.Module], schedule: Schedule) -> None:
    """Give the units in and below `modules` that schedule and their names, `modules` being the outermost unit."""
    units = list(dict.fromkeys(unit for module in modules for unit in units_of(module)))
    schedule.assemble(units)
    paths: dict[int, list[str]] = {}
    for module in modules:
        for path, inner in module.named_modules(remove_duplicate=False):
            paths.setdefault(id(inner), []).append(clean_name(path))
    for unit in units:
        unit.name = ", ".join(paths[id(module)][0] for module in unit.modules)
        unit.reshard_after_forward = (
            unit.modules[0] is not modules[0]
            if unit.requested_reshard_after_forward is None
            else unit.requested_reshard_after_forward
        )
        for bucket in unit.buckets:
            for slot, parameter in zip(bucket.slots, bucket.sharded_parameters, strict=True):
                names = [join(path, attribute) for m, attribute in slot.owners for path in paths[id(m)]]
                parameter.names = tuple(dict.fromkeys(names))


def clean_name(path: str) -> str:
    """A module path without the parts that torch's wrappers add."""
    return ".".join(part for part in path.split(".") if part not in torch_private.WRAPPERS)


def join(path: str, attribute: str) -> str:
    """`path.attribute`, or the attribute alone at the root."""
    return f"{path}.{attribute}" if path else attribute


# -- guards and state dicts -------------------------------------------------------------------------------------


def _check_apply(unit: Unit, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`model.to(...)` and friends may not move or cast sharded parameters; where they change nothing they may run."""
    for bucket in unit.buckets:
        # What is on the host computes elsewhere: a model that is moved there stays as it is.
        probe = torch.empty(0, dtype=bucket.dtype, device=bucket.mesh.device)
        result = fn(probe)
        if result.device != probe.device or result.dtype != probe.dtype:
            raise LifecycleError(
                f"unit {unit.name!r}: cannot turn sharded parameters from {probe.dtype} on {probe.device} into "
                f"{result.dtype} on {result.device}",
                hint="move or cast the model before sharding it; for mixed precision use mp_policy",
            )


def _except_on_host(
    units: Iterable[Unit], fn: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`fn` for all but shards and gradients that are offloaded."""
    on_host = [p for unit in units for b in unit.buckets if b.main_is_on_host for p in b.sharded_parameters]
    held = {_memory_of(tensor) for p in on_host for tensor in (p, p.grad) if tensor is not None}
    return (lambda tensor: tensor if _memory_of(tensor) in held else fn(tensor)) if held else fn


def _memory_of(tensor: torch.Tensor) -> int:
    return torch_private.storage_id(tensor.untyped_storage())


def _entries(module: nn.Module, prefix: str) -> list[tuple[str, ShardedParameter]]:
    """(state dict key, sharded parameter) of every place of the unit's own parameters below `module`."""
    unit = _unit(module)
    places: dict[int, list[str]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        places.setdefault(id(inner), []).append(path)
    entries = []
    for bucket in unit.buckets:
        for slot, parameter in zip(bucket.slots, bucket.sharded_parameters, strict=True):
            for owner, attribute in slot.owners:
                paths = [prefix + join(_state_dict_path(path), attribute) for path in places.get(id(owner), ())]
                entries += [(path, parameter) for path in paths]
    return entries


def _after_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """At rest the values are sharded parameters, which know their place (`full_tensor()`), not bare slices."""
    if _unit(module).is_pinned:
        return
    for key, parameter in _entries(module, prefix):
        if key in state_dict:
            state_dict[key] = parameter


def _state_dict_path(path: str) -> str:
    """A module path as state dicts have it: of torch's wrappers, the one for checkpointing hides itself there."""
    return ".".join(part for part in path.split(".") if part != torch_private.HIDDEN_WRAPPER)


def _before_load_state_dict(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> None:
    """Cut whole tensors down to this rank's slice."""
    unit = _unit(module)
    schedule = schedule_of(unit)
    schedule.loads += 1
    unit.reshard()
    schedule.settle()
    if local_metadata.get("assign_to_params_buffers"):
        raise LifecycleError(
            f"unit {unit.name!r}: load_state_dict(assign=True) would replace sharded parameters",
            hint="leave assign out: values are copied into the shards",
        )
    if unit.is_pinned:
        return
    for key, parameter in _entries(module, prefix):
        value = state_dict.get(key)
        if not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, (ShardedParameter, Slice)):
            if value.interval != parameter.interval or value.global_shape != parameter.global_shape:
                error_messages.append(f"{key}: got the slice {value}, expected {parameter}")
            elif isinstance(value, Slice):
                state_dict[key] = value.plain()
        elif value.shape == parameter.global_shape:
            state_dict[key] = value.detach().reshape(-1)[parameter.interval.start : parameter.interval.stop]
        elif value.shape != parameter.shape:
            error_messages.append(
                f"{key}: got shape {tuple(value.shape)}, expected {tuple(parameter.global_shape)} "
                f"(or this rank's slice of {parameter.numel()} elements)"
            )
            state_dict[key] = parameter.detach()
