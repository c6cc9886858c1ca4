"""Hooks that run before and after every optimizer step, and the check that an optimizer can work on intervals."""

import itertools
import weakref
from typing import Any

import torch

from fullshard.core.errors import LifecycleError, OptimizerError
from fullshard.core.events import EventKind
from fullshard.core.journal import JOURNAL
from fullshard.engine.bucket import Bucket
from fullshard.engine.lookup import refuse_pinned
from fullshard.engine.parameter import are_same, sharded_parameter_of, sharded_parameters
from fullshard.engine.schedule import Schedule
from fullshard.engine.step.adapters import adapter_of
from fullshard.engine.step.plain_tensors import take_state, use_plain_tensors
from fullshard.engine.storage import by_storage


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise `OptimizerError` if an extension does, or if an optimizer holds originals, which never get a gradient."""
    for schedule in dict.fromkeys(parameter.bucket.owner.schedule for parameter in sharded_parameters(optimizer)):
        for check in schedule.extensions.check_optimizer:
            check(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            sharded = sharded_parameter_of(parameter)
            if sharded is not None and sharded is not parameter:
                raise OptimizerError(
                    f"{type(optimizer).__name__}, parameter group {number}: it refers to {sharded.name} as it was "
                    "before sharding, casting or materializing from the meta device; it will never receive a gradient",
                    hint="create the optimizer after sharding, or call fullshard.repoint(optimizer)",
                )


_held: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[torch.Tensor], list[Bucket]]] = (
    weakref.WeakKeyDictionary()
)
"""Parameters and buckets of each optimizer at its last step. Without parameters if any was not sharded yet."""


def _checked_buckets(optimizer: torch.optim.Optimizer) -> list[Bucket]:
    """Return the buckets that the optimizer updates. Check the optimizer first if its parameters have changed."""
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
    """Check the optimizer before its step, and free everything gathered from weights that are about to change."""
    buckets = _checked_buckets(optimizer)
    if not buckets:
        return None
    JOURNAL.count(buckets[0].owner.schedule.steps + 1)
    own, args = args[:1], args[1:]  # the first is the optimizer itself
    if any(map(callable, (*args, *kwargs.values()))):
        args, kwargs = _tell_after_closure(optimizer, buckets, args, kwargs)
    else:
        _tell(optimizer, buckets)  # first: if it raises an error, the step has not begun
    use_plain_tensors(optimizer)
    for bucket in buckets:
        bucket.touch()  # before the step, because a failed step may also have changed weights
    schedules = dict.fromkeys(bucket.owner.schedule for bucket in buckets)
    for schedule in schedules:
        schedule.before_optimizer_step()
        refuse_pinned(schedule.units, "the optimizer cannot step", "step outside `with unsharded(model)`")
    for bucket in buckets:
        if bucket.has_gradient and bucket.gradient.keeps_unreduced:
            raise LifecycleError(
                f"{type(optimizer).__name__} cannot step: the gradients of {bucket.owner} are not reduced, "
                "because the last backward ran under no_sync or set_requires_gradient_sync(False)",
                hint="enable the reduction for the last backward before a step",
            )
    for storage, own_buckets in by_storage(buckets).items():
        storage.before_update(optimizer, own_buckets)  # after unsharded parameters are freed, to have more memory
    for schedule in schedules:
        if schedule.event_sink is not None:
            schedule.units[-1].emit(EventKind.OPTIMIZER_STEP)
    # Do this last, because nothing would undo it after an error above.
    args, kwargs = adapter_of(optimizer).before_step(optimizer, args, kwargs)
    return own + args, kwargs


def _tell(optimizer: torch.optim.Optimizer, buckets: list[Bucket]) -> None:
    """Notify the extensions of each model that the gradients for a step are final."""
    held: dict[Schedule, list[Bucket]] = {}
    for bucket in buckets:
        held.setdefault(bucket.owner.schedule, []).append(bucket)
    for schedule, own in held.items():
        for tell in schedule.extensions.before_step:
            tell(optimizer, own)


def _tell_after_closure(
    optimizer: torch.optim.Optimizer, buckets: list[Bucket], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Wrap the closure in the arguments of `step`, so that extensions are notified after each call of it."""

    def telling(closure: Any) -> Any:
        def call() -> Any:
            loss = closure()
            _tell(optimizer, buckets)
            return loss

        return call if callable(closure) else closure

    return tuple(map(telling, args)), {key: telling(value) for key, value in kwargs.items()}


def after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Undo the preparations for a step, and notify the storages. This runs after the step of every optimizer."""
    take_state(optimizer)
    # First, because state is stored under the sharded parameters.
    adapter_of(optimizer).restore(optimizer, has_stepped=True)
    if optimizer in _held:  # if not, the step began before anything was sharded
        for storage, buckets in by_storage(_held[optimizer][1]).items():
            storage.after_update(optimizer, buckets)
