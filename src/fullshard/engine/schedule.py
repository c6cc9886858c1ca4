"""The schedule of one model: what its units share, and what happens before a forward, a step or a save."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import torch_private
from fullshard.comm.mesh import Mesh
from fullshard.core.errors import LifecycleError
from fullshard.core.events import EventSink
from fullshard.core.schedule import BackwardPrefetch
from fullshard.engine.backward import Backward
from fullshard.engine.bucket import Bucket
from fullshard.engine.extension import Extensions, take_settings
from fullshard.engine.forward import Forward
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.unit import Unit

_SETTINGS: Mapping[str, Any] = {
    "event_sink": None,
    "forward_prefetch": True,
    "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
    "is_last_backward": True,
}
"""Attributes that a script may set on any part of a model, with their defaults."""


class Schedule:
    """The state shared by the units of one model: settings, steps and order of work. Extensions call it `model`.

    Attributes:
        units: the units, inner ones before the units that contain them; empty until the model is assembled.
        steps: the number of optimizer steps so far.
        after_step: a function that is called with the number of steps before the first forward after a step.
        is_last_backward: whether the next backward ends a gradient accumulation.
        keeps_parameters: whether parameters stay unsharded until the step, in units with `reshards_after_backward` set
            to False.
        keeps_gradients: whether every backward except the last of a step leaves its gradients unsharded and unreduced.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.units: list[Unit] = []
        self.event_sink: EventSink | None = None
        self.forward_prefetch = True
        self.backward_prefetch = BackwardPrefetch.BACKWARD_PRE
        self.steps = 0
        self.after_step: Callable[[int], None] | None = None
        self.extensions = Extensions(self)
        self.is_last_backward = True
        self.keeps_parameters = self.keeps_gradients = False
        self._has_begun = False
        self._stepped_since_forward = False
        self._thread = threading.get_ident()
        self.forward, self.backward = Forward(self), Backward(self)
        self._outer_groups: list[dist.ProcessGroup] | None = None

    def assemble(self, units: Sequence[Unit]) -> None:
        """Take over the units of a model, including units that other schedules have managed as separate models."""
        for earlier in dict.fromkeys(other for unit in units if (other := unit.schedule) is not self):
            take_settings(self, earlier, _SETTINGS)
            self.extensions.absorb(earlier.extensions)
        self.units = list(units)
        self.backward.hookless_calls.units = self.units
        for number, unit in enumerate(units):
            unit.schedule, unit.number = self, number
            unit.reduction.inspector = self.extensions.inspector
        for tell in self.extensions.assembled:
            tell()
        self.know_buckets()

    def know_buckets(self) -> None:
        """Assign numbers to the buckets and notify the extensions. Do nothing if a unit has no buckets yet."""
        if any(unit.stand_ins is not None for unit in self.units):
            return
        self._number_buckets(0)
        for tell in self.extensions.materialized:
            tell()

    def _number_buckets(self, first: int) -> None:
        for tag, bucket in enumerate(self.buckets(), first):
            bucket.tag = tag

    def before_save(self) -> None:
        """Notify the extensions that all ranks are about to save the model."""
        for tell in self.extensions.before_save:
            tell()

    def before_forward(self) -> None:
        """Prepare the model for a forward: reset after a failed backward, and detect changes between steps."""
        if self.backward.is_under_way:
            self.reset()  # the last backward raised an error
        for tell in self.extensions.before_forward:
            tell()
        self._thread = threading.get_ident()
        if self._stepped_since_forward and torch.is_grad_enabled():
            self.steps, self._stepped_since_forward = self.steps + 1, False
            for tell in self.extensions.step_begins:
                tell()
            if self.after_step is not None:
                self.after_step(self.steps)
        if not self._has_begun:
            self.begin_use(in_forward=True)
            self._has_begun = True
            self._number_buckets(self.mesh.take_tags(len(self.buckets())))  # tags that no other model uses
        # The user may have changed things between steps: frozen parameters, loaded weights.
        for unit in self.units:
            unit.take_requires_grad()
            unit.reshard_if_outdated()

    def begin_use(self, *, in_forward: bool = False) -> None:
        """Notify the extensions that parameters will be gathered, unless a forward of the model has already begun."""
        if not self._has_begun:
            for tell in self.extensions.before_first_use:
                tell(in_forward=in_forward)

    def parameters(self) -> list[ShardedParameter]:
        """Return all sharded parameters of the model."""
        return [parameter for bucket in self.buckets() for parameter in bucket.sharded_parameters]

    def outer_groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups along axes outside the mesh whose ranks share the model."""
        if self._outer_groups is None:
            groups = (parameter.spec.outer_group for parameter in self.parameters())
            self._outer_groups = list(dict.fromkeys(group for group in groups if group is not None))
        return self._outer_groups

    def buckets(self) -> list[Bucket]:
        """Return all buckets of the model, unit by unit."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    def reset(self) -> None:
        """Return the model to its state between steps after a failure: nothing is in progress, all is sharded."""
        for unit in self.units:
            unit.reset()
        self.forward.reset()
        self.backward.reset()

    def reset_if_failed(self) -> None:
        """Reset after a backward that raised an error, which autograd does not report to the engine.

        This happens only in the thread that trains: others cannot distinguish such a backward from one in progress.
        """
        is_over = self.backward.is_under_way and torch_private.backward_under_way() == -1
        if is_over and threading.get_ident() == self._thread:
            self.reset()

    @property
    def optimizer_steps(self) -> int:
        """Return the number of optimizer steps so far. It includes a step after which no forward has begun yet."""
        return self.steps + self._stepped_since_forward

    def before_optimizer_step(self) -> None:
        """Free everything that was gathered from the old main weights, because a step is about to change them."""
        self.reset_if_failed()  # first, because reductions of a failed backward may still write to gradients
        self.forward.end_interrupted()
        if self.keeps_gradients and not self.is_last_backward:
            raise LifecycleError(
                "the optimizer cannot step, because set_is_last_backward(False) applied to the last backward, so its "
                "gradients are not reduced",
                hint="call model.set_is_last_backward(True) before the last backward of a step",
            )
        for bucket in self.buckets():
            if bucket.has_gradient:
                bucket.gradient.main.check_not_torn()
        self._stepped_since_forward = True  # only once if there are several optimizers
        for unit in self.units:
            unit.reshard()
        self.settle()  # a peer may still be reading main weights in place

    def units_by_backward(self) -> list[Unit]:
        """Return the units in the reverse order of the last forward, followed by units that did not run in it."""
        return list(dict.fromkeys([*reversed(self.forward.order), *self.units]))

    def settle(self) -> None:
        """Wait until no other rank and no copy is reading the main weights, so that they may change."""
        for storage in {unit.storage for unit in self.units}:
            storage.settle()
        for mesh in dict.fromkeys(unit.mesh for unit in self.units):
            with self.units[-1].waiting("after the last reshard"):
                mesh.gather.wait_for_readers()
