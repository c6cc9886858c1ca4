"""Optimizer steps within backward: update a bucket once its gradient is final, then free the gradient.

The gradients of the complete model therefore never exist at the same time. After each reduction, `Stepper.step` updates
the parameters of one bucket. The optimizer's own code computes the update. It runs in a *part*: an optimizer of the
same class, with the same state and hyperparameters, that holds only the parameters of one bucket.

Code that needs all gradients together does not work. Clipping and loss scaling read `.grad`, which raises an error
until `optimizer.step()`. A second backward before `optimizer.step()` raises an error, too.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import optim

from fullshard.core.errors import LifecycleError, OptimizerError
from fullshard.core.events import EventKind
from fullshard.engine.bucket import Bucket
from fullshard.engine.extension import Extension
from fullshard.engine.lookup import refuse_pinned
from fullshard.engine.parameter import ShardedParameter, are_same, sharded_parameters
from fullshard.engine.schedule import Schedule
from fullshard.engine.step.hooks import check_optimizer
from fullshard.engine.step.plain_tensors import ELEMENT_WISE, take_state, use_plain_tensors
from fullshard.features.steps_in_backward import torch_private

STEPS_IN_PARTS = ELEMENT_WISE
"""Optimizers that keep state only per parameter, so that their parts can step independently. Other optimizers may count
steps per group or globally."""

_NAME = "step_in_backward"

_was_asked_for = [False]
"""Whether any optimizer was set to step in backward in this process."""

_HALF_DONE = (
    "call optimizer.step() after each backward, and call model.set_is_last_backward(False) before the backward of each "
    "micro-batch except the last; if a backward has failed, call optimizer.step() and optimizer.zero_grad(), and load "
    "a checkpoint"
)


def step_in_backward(optimizer: optim.Optimizer) -> None:
    """Make backward update each bucket as soon as its gradient is final, and then free the gradient.

    The results are bit-identical to those of `optimizer.step()`. The training loop does not change: `optimizer.step()`
    ends the step and updates the parameters that are not sharded. If a step has several micro-batches, mark the last
    backward with `model.set_is_last_backward(number == last)`. Learning rates are read when backward begins.

    Args:
        optimizer: a torch optimizer that treats all elements in the same way, created from a sharded model. If it
            already steps in backward, this call adds the models that were sharded since then.

    Raises:
        OptimizerError: The optimizer cannot be stepped in parts, holds no sharded parameter, or shares a parameter with
            another optimizer that steps in backward. Or its state is offloaded, or its float16 parameters have
            loss-scaled gradients.
    """
    check_optimizer(optimizer)
    name = type(optimizer).__name__
    if type(optimizer) not in STEPS_IN_PARTS:
        raise OptimizerError(
            f"{type(optimizer).__module__}.{name} cannot step in backward, because it may keep data besides the state "
            "of each parameter, so it cannot step one bucket at a time",
            hint=f"use one of torch.optim's classes: {', '.join(cls.__name__ for cls in STEPS_IN_PARTS)}",
        )
    sharded = sharded_parameters(optimizer)
    if not sharded:
        raise OptimizerError(
            f"{name} holds no sharded parameters to step in backward", hint="shard the model first, or use repoint()"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(
            f"{name} has differentiable=True and cannot step in backward, which does not record a graph"
        )
    half = next((p for p in sharded if p.bucket.compute_dtype is torch.float16 and p.requires_grad), None)
    if half is not None:
        raise OptimizerError(
            f"{name} cannot step in backward: {half.name} computes in float16 with scaled gradients, and all "
            "gradients are needed to decide whether to skip the step",
            hint="use bf16, which needs no loss scale",
        )
    moved = next((p for p in sharded if p.bucket.plan.main_is_on_host or p.bucket.plan.state_visits_device), None)
    if moved is not None:
        raise OptimizerError(
            f"{name} cannot step in backward, because the main weights or the optimizer state of {moved.name} are on "
            "the host",
            hint="offload only compute shards, or do not use step_in_backward",
        )
    stepper = next((h for h in torch_private.step_pre_hooks(optimizer).values() if isinstance(h, Stepper)), None)
    models = [StepsInBackward.of(model) for model in dict.fromkeys(p.bucket.owner.schedule for p in sharded)]
    held = {id(p) for p in sharded}
    if _first_shared(models, held, stepper) is not None:
        gc.collect()  # a discarded optimizer may be part of a reference cycle
        if (shared := _first_shared(models, held, stepper)) is not None:
            raise OptimizerError(
                f"{name} shares parameter {shared} with another optimizer that steps in backward",
                hint="give each parameter to one optimizer",
            )
    stepper = stepper or Stepper(optimizer)
    for model in models:
        model.steppers.add(stepper)


def _first_shared(models: Iterable[StepsInBackward], held: set[int], stepper: Stepper | None) -> str | None:
    """Return the name of a parameter in `held` that another stepper of these models also steps, or None."""
    others = [other for model in models for other in model.steppers if other is not stepper]
    return next((name for other in others if (name := other.first_among(held)) is not None), None)


def anything_steps_in_backward() -> bool:
    """Return whether any optimizer was set to step in backward, so that the launcher can warn if none was."""
    return _was_asked_for[0]


@dataclass(slots=True)
class _Part:
    """An optimizer for the parameters of one bucket, with the class and the state of the user's optimizer."""

    optimizer: optim.Optimizer
    numbers: list[int] = field(default_factory=list)  # the optimizer's group for each group of the part
    parameters: list[ShardedParameter] = field(default_factory=list)


class Stepper:
    """Steps one optimizer bucket by bucket. The stepper is a step pre-hook of the optimizer, which keeps it alive."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._held: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._parts: dict[Bucket, _Part] = {}
        self._options: list[dict[str, Any]] = []
        self._versions: list[dict[str, int]] = []
        self._stepped: dict[Schedule, None] = {}
        optimizer.register_step_pre_hook(self)
        _was_asked_for[0] = True

    def first_among(self, parameters: set[int]) -> str | None:
        """Return the name of the first sharded parameter of the optimizer whose id is in `parameters`, or None."""
        optimizer = self._optimizer()
        held = [] if optimizer is None else sharded_parameters(optimizer)
        return next((p.name for p in held if id(p) in parameters), None)

    def begin(self, model: Schedule) -> bool:
        """Prepare for a backward pass, and return whether the optimizer will step during it."""
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        name = type(optimizer).__name__
        if model in self._stepped:
            raise LifecycleError(
                f"a second backward ran before optimizer.step(), but {name} already stepped during the first backward",
                hint=_HALF_DONE,
            )
        if not model.is_last_backward:
            return False
        if torch.is_grad_enabled():
            raise LifecycleError(f"{name} steps in backward, which does not support create_graph=True")
        if any(hook is not self for hook in torch_private.step_pre_hooks(optimizer).values()):
            raise LifecycleError(
                f"{name} steps in backward, but it has a step pre-hook, which would run too late",
                hint="remove the hook, or do not use step_in_backward",
            )
        refuse_pinned(model.units, "backward steps the optimizer", "train outside `with unsharded(model)`")
        self._prepare(optimizer)
        return True

    def _prepare(self, optimizer: optim.Optimizer) -> None:
        """Read the hyperparameters, and rebuild the parts if the optimizer's list of parameters has changed."""
        if not self._stepped:
            self._options = [_options(group) for group in optimizer.param_groups]
            self._versions = [_versions(options) for options in self._options]
        groups = [group["params"] for group in optimizer.param_groups]
        held, sizes = list(itertools.chain.from_iterable(groups)), [len(group) for group in groups]
        if sizes == self._sizes and are_same(held, self._held):
            return
        self._parts, self._held, self._sizes = {}, held, sizes
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if isinstance(parameter, ShardedParameter):
                    self._add(optimizer, number, parameter)

    def _add(self, optimizer: optim.Optimizer, number: int, parameter: ShardedParameter) -> None:
        bucket = parameter.bucket
        part = self._parts.get(bucket)
        if part is None:
            part = self._parts[bucket] = _Part(_part_of(optimizer))
        if number not in part.numbers:
            part.numbers.append(number)
            part.optimizer.param_groups.append({"params": []})
        part.optimizer.param_groups[-1]["params"].append(parameter)
        part.parameters.append(parameter)

    def step(self, bucket: Bucket) -> bool:
        """Update the parameters in a bucket and free their published gradients. Return False if there are none."""
        part, optimizer = self._parts.get(bucket), self._optimizer()
        if part is None or optimizer is None:
            return False
        parameters = [parameter for parameter in part.parameters if parameter.grad is not None]
        if not parameters:
            return False
        part.optimizer.state = optimizer.state  # load_state_dict replaces it
        for number, group in zip(part.numbers, part.optimizer.param_groups, strict=True):
            group.update(self._options[number])
        step: Any = type(optimizer).step
        step.__wrapped__(part.optimizer)  # without hooks, which belong to `optimizer.step()`
        take_state(part.optimizer)
        # From here on a second backward is an error, because part of the weights are already updated.
        self._stepped[bucket.owner.schedule] = None
        for parameter in parameters:
            parameter.grad, parameter.used_up_by = None, _NAME
        bucket.gradient.unsharded.used_up_by = _NAME
        return True

    def __call__(self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make gradients readable again after `step()`. Refuse a closure or options that changed since backward."""
        if any(argument is not None for argument in (*args[1:], *kwargs.values())):
            raise LifecycleError(
                f"{type(optimizer).__name__}.step(closure) would run backward inside step(), and with "
                "step_in_backward that backward would update the parameters",
                hint="call backward before step(), or do not use step_in_backward",
            )
        for part in self._parts.values():
            for parameter in part.parameters:
                parameter.used_up_by = ""
        for bucket in self._parts:
            if bucket.has_gradient:
                bucket.gradient.unsharded.used_up_by = ""
        stepped_early = bool(self._stepped)
        self._stepped.clear()
        if stepped_early:  # last, so that code that catches an error can read gradients and continue
            self._check_unchanged(optimizer)

    def _check_unchanged(self, optimizer: optim.Optimizer) -> None:
        for number, (before, versions) in enumerate(zip(self._options, self._versions, strict=True)):
            now = _options(optimizer.param_groups[number])
            for key, value in before.items():
                is_same = now[key] is value if key in versions else now[key] == value
                if not is_same or _versions(now) != versions:
                    raise LifecycleError(
                        f"{key} of parameter group {number} was changed (from {value} to {now[key]}) after backward, "
                        "but the optimizer has already stepped in that backward",
                        hint=f"set {key} before backward, or after optimizer.step()",
                    )


class StepsInBackward(Extension):
    """Runs the `steppers` of one model. Each optimizer keeps its own stepper alive."""

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self.steppers: weakref.WeakSet[Stepper] = weakref.WeakSet()

    def absorbed(self, earlier: Extension) -> None:
        """Take over the steppers of a model that became part of this one."""
        self.steppers |= cast("StepsInBackward", earlier).steppers

    def backward_begins(self) -> None:
        """Publish gradients as soon as they are final if an optimizer will step in this backward."""
        begun = [stepper.begin(self.model) for stepper in self.steppers]
        self.model.backward.reducer.publishes_early = any(begun)

    def bucket_is_final(self, bucket: Bucket) -> None:
        """Update the parameters of the bucket, and free their gradients."""
        with bucket.owner.waiting("step in backward"):
            bucket.buffer.wait_for_readers()  # the step changes `main`, which other ranks may be gathering
        nbytes = bucket.gradient.main.nbytes  # read before the step frees it
        stepped = [stepper.step(bucket) for stepper in self.steppers]
        if any(stepped):
            bucket.owner.emit(EventKind.BUCKET_STEP, nbytes)


def _part_of(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Return an optimizer of the same class with the same options, but without parameters."""
    part = object.__new__(type(optimizer))
    own = (torch_private.INIT_GROUP, "step")
    part.__dict__.update({key: value for key, value in vars(optimizer).items() if key not in own})
    part.param_groups = []
    use_plain_tensors(part)
    return part


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _versions(options: dict[str, Any]) -> dict[str, int]:
    """Return the version counter of each option that is a tensor, by name of the option."""
    return {key: value._version for key, value in options.items() if isinstance(value, torch.Tensor)}
