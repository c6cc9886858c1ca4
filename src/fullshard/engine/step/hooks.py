"""Hooks before and after every optimizer's step, and the check that an optimizer can work on intervals."""

from __future__ import annotations

import itertools
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from fullshard.comm import torch_private
from fullshard.core.errors import OptimizerError
from fullshard.core.events import EventKind
from fullshard.core.journal import JOURNAL
from fullshard.engine.bucket import Bucket
from fullshard.engine.lookup import refuse_pinned, units_of
from fullshard.engine.parameter import are_same, sharded_parameter_of, sharded_parameters
from fullshard.engine.schedule import Schedule
from fullshard.engine.step.adapters import adapter_of
from fullshard.engine.step.plain_tensors import finish_step, use_plain_tensors
from fullshard.engine.step.state_dict import cut_state
from fullshard.engine.storage import by_storage

NEEDS_WHOLE_TENSORS: dict[str, frozenset[str]] = {
    "torch": frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"}),
    "transformers": frozenset({"Adafactor"}),
    "apex": frozenset({"FusedLAMB", "FusedLARS", "FusedMixedPrecisionLamb", "FusedNovoGrad"}),
    "came_pytorch": frozenset({"CAME"}),
    "dion": frozenset({"Dion", "Dion2", "Muon", "NorMuon"}),
    "distributed_shampoo": frozenset({"DistributedShampoo"}),
    "lomo_optim": frozenset({"AdaLomo", "Lomo"}),
    "muon": frozenset({"Muon", "MuonWithAuxAdam"}),
    "peft": frozenset({"LoraFAOptimizer", "RiemannianPreconditionedOptimizer"}),
    "pytorch_optimizer": frozenset(
        {"AdaFactor", "Alice", "CAME", "DASH", "DistributedMuon", "EmoFact", "Kron", "RACS", "Shampoo", "SM3", "SOAP"}
        | {"SPAM", "SPlus", "StableSPAM", "LOMO", "AdaLOMO"}
    ),
    "torch_optimizer": frozenset({"Adafactor", "Shampoo"}),
    **dict.fromkeys(("apollo_torch", "galore_torch"), frozenset({"Adafactor", "GaLoreAdafactor"})),
}
"""Optimizers whose update of an element depends on the rest of its tensor, and that neither compute it with torch's
functions of the tensor alone nor divide it over the ranks: by package. Other such optimizers see the whole tensor."""

_STEPS_IN_BACKWARD = frozenset({"Lomo", "AdaLomo", "LOMO", "AdaLOMO"})
"""Those of them that update whole parameters as gradients appear, in hooks of their own."""

_OF_ONE_PARAMETER = ("came_pytorch.", "pytorch_optimizer.", "torch_optimizer.")
"""Packages whose optimizers update a parameter by itself."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot work on sharded parameters.

    Raises:
        OptimizerError: it needs whole tensors, or holds original parameters, which never get a gradient.
    """
    name = type(optimizer).__name__
    if sharded_parameters(optimizer) and not adapter_of(optimizer).works_on_parts:
        _check_whole(type(optimizer))
    wrappers = (p for p in sharded_parameters(optimizer) if torch_private.has_own_dispatch(type(p.local)))
    wrapper = next(wrappers, None)
    is_ours = any(cls.__module__.startswith("fullshard.") for cls in type(optimizer).__mro__)
    if wrapper is not None and (is_ours or adapter_of(optimizer).needs_plain_memory):
        raise OptimizerError(
            f"{type(optimizer).__module__}.{name} computes with memory, of which {wrapper.name}, a "
            f"{type(wrapper.local).__name__}, has several pieces",
            hint="use an optimizer of torch's, which computes by the operations of the class",
        )
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            sharded = sharded_parameter_of(parameter)
            if sharded is not None and sharded is not parameter:
                raise OptimizerError(
                    f"{name}, parameter group {number}: holds {sharded.name} as it was before it was sharded, cast or "
                    "given memory (on the meta device), which never gets a gradient",
                    hint="make the optimizer after that, or call fullshard.repoint(optimizer)",
                )


def _check_whole(kind: type) -> None:
    """Refuse an optimizer that needs whole tensors; of one that may only be called like that, say what it costs."""
    name, names = f"{kind.__module__}.{kind.__name__}", {cls.__name__ for cls in kind.__mro__}
    ours = _in_place_of(kind, names)
    if any(cls.__name__ in NEEDS_WHOLE_TENSORS.get(cls.__module__.partition(".")[0], ()) for cls in kind.__mro__):
        instead = "use an element-wise optimizer such as AdamW, SGD or Lion"
        if names & _STEPS_IN_BACKWARD:
            instead = "use AdamW or SGD, which may step in backward, too"
        elif kind.__module__.startswith(_OF_ONE_PARAMETER) and not kind.__name__.startswith("Distributed"):
            instead = _on_owners(kind)
        raise OptimizerError(f"{name} needs whole tensors, of which each rank has a part", hint=ours or instead)
    if ours:
        warnings.warn(
            f"{name}: what it computes of whole matrices, every rank computes of all of them, gathered each time. If "
            f"it is what its name says, {ours}",
            stacklevel=5,
        )


def _in_place_of(kind: type, names: set[str]) -> str:
    """Return the line to write in place of an optimizer that needs whole tensors; empty if there is none."""
    if "Adafactor" in names:
        home = next(one.__module__ for one in kind.__mro__ if one.__name__ == "Adafactor")
        ours = "TransformersAdafactor" if home.startswith("transformers.") else "Adafactor"
        is_known = home.startswith(("torch.", "transformers."))
        alike = "the same arguments and numbers" if is_known else "torch's arguments"
        return f"write fullshard.optim.{ours}(model.parameters(), ...) instead: {alike}"
    if "Muon" in names:
        return "write fullshard.optim.Muon(model, lr=...) instead: the same numbers, each matrix computed by one rank"
    return _on_owners(kind) if names & {"SOAP", "Shampoo"} else ""


def _on_owners(kind: type) -> str:
    return f"write fullshard.optim.OnOwners(model, {kind.__name__}, ...) instead: each matrix computed by one rank"


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
                optimizer.state[sharded] = cut_state(optimizer.state.pop(parameter), sharded, optimizer=optimizer)
    check_optimizer(optimizer)
    if model is not None:
        own = {id(p) for unit in units_of(model) for bucket in unit.buckets for p in bucket.sharded_parameters}
        own |= {id(p) for p in model.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise OptimizerError(
                f"{type(optimizer).__name__} holds no parameter of {type(model).__name__}",
                hint="make the optimizer from this model's parameters",
            )


_held: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[torch.Tensor], list[Bucket]]] = (
    weakref.WeakKeyDictionary()
)
"""An optimizer's parameters at its last step: all, if every one was sharded, else none, because the others may be
sharded later; and the buckets that the sharded ones are in."""


def _checked_buckets(optimizer: torch.optim.Optimizer) -> list[Bucket]:
    """Return the buckets that the optimizer updates; check it first, unless its parameters are the same."""
    parameters = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
    known, buckets = _held.get(optimizer, ([], []))
    if buckets and are_same(parameters, known):
        return buckets
    check_optimizer(optimizer)
    sharded = sharded_parameters(optimizer)
    buckets = list(dict.fromkeys(p.bucket for p in sharded))
    _held[optimizer] = parameters if len(sharded) == len(parameters) else [], buckets
    return buckets


def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Check the optimizer before its step, and drop what was gathered from weights about to change."""
    buckets = _checked_buckets(optimizer)
    if not buckets:
        return None
    if not JOURNAL.is_told:
        JOURNAL.step = buckets[0].owner.schedule.steps + 1
    own, args = args[:1], args[1:]  # the first is the optimizer itself
    if any(map(callable, (*args, *kwargs.values()))):
        args, kwargs = _tell_after_closure(optimizer, buckets, args, kwargs)
    else:
        _tell(optimizer, buckets)  # first: if it raises, no part of a step has begun
    use_plain_tensors(optimizer)
    for bucket in buckets:
        bucket.touch()  # before the step: a step that fails half-way has changed weights too
    schedules = dict.fromkeys(bucket.owner.schedule for bucket in buckets)
    for schedule in schedules:
        schedule.before_optimizer_step()
        refuse_pinned(schedule.units, "optimizer step", "step outside `with unsharded(model)`")
    for storage, own_buckets in by_storage(buckets).items():
        storage.before_update(optimizer, own_buckets)  # after unsharded parameters are freed, which makes room
    for schedule in schedules:
        if schedule.event_sink is not None:
            schedule.units[-1].emit(EventKind.OPTIMIZER_STEP)
    # Last: after an error above, nothing would undo it.
    args, kwargs = adapter_of(optimizer).before_step(optimizer, args, kwargs)
    return own + args, kwargs


def _tell(optimizer: torch.optim.Optimizer, buckets: list[Bucket]) -> None:
    """Tell the extensions of each model that the gradients of a step are final."""
    held: dict[Schedule, list[Bucket]] = {}
    for bucket in buckets:
        held.setdefault(bucket.owner.schedule, []).append(bucket)
    for schedule, own in held.items():
        for tell in schedule.extensions.before_step:
            tell(optimizer, own)


def _tell_after_closure(
    optimizer: torch.optim.Optimizer, buckets: list[Bucket], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step whose closure runs backward; extensions are told after each call of it."""

    def telling(closure: Any) -> Any:
        def call() -> Any:
            loss = closure()
            _tell(optimizer, buckets)
            return loss

        return call if callable(closure) else closure

    return tuple(map(telling, args)), {key: telling(value) for key, value in kwargs.items()}


def after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Undo what was done for the step, and tell storages, after every optimizer's step."""
    finish_step(optimizer)
    adapter_of(optimizer).rest(optimizer, has_stepped=True)  # first: state is looked for under the sharded parameters
    if optimizer in _held:  # otherwise the step began before anything was sharded
        for storage, buckets in by_storage(_held[optimizer][1]).items():
            storage.after_update(optimizer, buckets)
