"""The engine's extension points, through which features outside the kernel run at fixed moments of a step.

Each sharded model has one instance of each registered subclass of `Extension`. The kernel calls the methods that a
class overrides, in the order of registration. `fullshard.features` registers the extensions of the package. Other
classes can be registered before a model is sharded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from fullshard.comm.base import Inspector

if TYPE_CHECKING:
    from fullshard.comm.mesh import Mesh
    from fullshard.engine.bucket import Bucket
    from fullshard.engine.call import Call
    from fullshard.engine.schedule import Schedule
    from fullshard.engine.unit import Unit
    from fullshard.engine.unit_parameters import UnitParameters

ExtensionT = TypeVar("ExtensionT", bound="Extension")


class Extension:
    """Base class for a feature outside the kernel. Its methods are in the order of a step and do nothing by default.

    Args:
        model: the schedule of the sharded model, with its units, mesh and steps.

    Attributes:
        settings: attributes that the user sets on a model, with their defaults. A value set on part of a model also
            applies to the model that contains it.
    """

    settings: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, model: Schedule) -> None:
        self.model = model
        for name, default in self.settings.items():
            setattr(self, name, default)

    @classmethod
    def of(cls: type[ExtensionT], model: Schedule) -> ExtensionT:
        """Return the instance of this class that belongs to a model.

        Raises:
            LookupError: The class was not registered before the model was sharded.
        """
        return model.extensions.find(cls)

    def assembled(self) -> None:
        """Run when the units of the model are known. Run again if a model that contains it is sharded."""

    def postpones(self, unit: Unit) -> bool:
        """Return whether a new unit is to get its buckets later, instead of now.

        An extension that returns True must set the unit's `stand_ins` now and call its `allocate` later.
        """
        return False

    def materialized(self) -> None:
        """Run once all units have their buckets, which may be some time after `assembled`."""

    def absorbed(self, earlier: Extension) -> None:
        """Take over the state of `earlier`, the same extension of a model that is now part of this model."""

    def moves(self, unit: Unit, function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Move a unit if `function`, which `model.to(...)` applies to its tensors, does. Return whether it did."""
        return False

    def before_first_use(self, *, in_forward: bool) -> None:
        """Run before the parameters of the model are first gathered, in its first forward or earlier."""

    def loaded(self, unit: Unit) -> None:
        """Run when `load_state_dict` is about to load the parameters of a unit."""

    def before_forward(self) -> None:
        """Run before a forward of the model begins. Every unit must have its buckets when this returns."""

    def step_begins(self) -> None:
        """Run at the first forward after an optimizer step."""

    def forward_begins(self) -> None:
        """Run at the start of a forward of the model, before `call_begins` runs for its outermost unit."""

    def call_begins(self, unit: Unit) -> None:
        """Run before a unit is unsharded for its forward, but not before a recomputation of that forward."""

    def before_gather(self, unit: UnitParameters) -> None:
        """Run before the all-gathers of a unit are launched, whether in forward, in backward or elsewhere."""

    def unsharded(self, unit: UnitParameters) -> None:
        """Run after the modules of a unit have received its unsharded parameters."""

    def unit_ran(self, unit: Unit) -> None:
        """Run after a module of a unit has run or recomputed its forward, before the unit is resharded."""

    def call_ends(self, unit: Unit, call: Call) -> None:
        """Run after a forward of a unit if the forward may have a backward."""

    def resharded(self, unit: UnitParameters) -> None:
        """Run after the unsharded parameters of a unit have been freed."""

    def forward_ends(self, *, failed: bool) -> None:
        """Run at the end of a forward of the model. `failed` is set if an error or an interrupt ended it."""

    def backward_begins(self) -> None:
        """Run when backward reaches the model. Raise an error to prevent the backward.

        To make the reducer call `bucket_is_final` in this backward, set its `publishes_early` on all ranks.
        """

    def call_backward_begins(self, unit: Unit, call: Call) -> None:
        """Run when backward enters one call of a unit, after the parameters of the unit have been unsharded."""

    def reduced(self, part: torch.Tensor, terms: Mapping[int, torch.Tensor]) -> None:
        """Inspect part of a gradient just after its reduction, while it is in the cache (see `comm.base.Inspector`)."""

    def doubts_gradients(self) -> bool:
        """Return whether this rank found a fault that forbids using gradients before backward has ended."""
        return False

    def bucket_is_final(self, bucket: Bucket) -> None:
        """Run when the gradients of a bucket are published before the end of backward.

        This happens only if `backward_begins` has requested it and no extension doubts the gradients.
        """

    def message(self) -> bytes:
        """Return bytes to send at the end of backward, the same number on every rank. Also override `heard`."""
        return b""

    def heard(self, largest: bytes, smallest: bytes) -> None:
        """Read the combined messages of all ranks before gradients are published, unless they were published early.

        Raise an error on all ranks or on none.

        Args:
            largest: the byte-wise maximum over all ranks.
            smallest: the byte-wise minimum over all ranks.
        """

    def backward_fails(self) -> None:
        """Run when autograd discards a backward before its end, because an error was raised in it."""

    def backward_ends(self, used: Mapping[Bucket, bytearray]) -> None:
        """Run after a backward, when its gradients have been published.

        Args:
            used: for each reduced bucket, a flag per parameter, which is set if any rank used the parameter.
        """

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Run before an optimizer first uses the parameters of the model. Raise an error to reject it."""

    def before_clipping(self) -> None:
        """Run before the gradient norm is computed for clipping."""

    def before_step(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Run before an optimizer updates these buckets. Their gradients are final."""

    def before_save(self) -> None:
        """Run before all ranks save the model."""


_registered: list[type[Extension]] = []
_beginnings: list[Callable[[], object]] = []
_has_begun: list[bool] = []
_BEGINNING = threading.Lock()
"""Guards `begin_sharding`, because ranks may be threads of one process."""


def register(*kinds: type[Extension]) -> None:
    """Register extension classes for models that are sharded from now on, after the classes registered earlier.

    Raises:
        TypeError: A class overrides `message` but not `heard`, or the reverse. Messages would reach the wrong class.
    """
    for kind in kinds:
        if (kind.message is Extension.message) != (kind.heard is Extension.heard):
            raise TypeError(f"{kind.__name__} must override both `message` and `heard`, or neither")
    _registered.extend(kind for kind in kinds if kind not in _registered)


def at_first_sharding(begin: Callable[[], object]) -> None:
    """Register `begin`, to be called before this process shards a module for the first time."""
    _beginnings.append(begin)


def begin_sharding() -> None:
    """Call the functions registered with `at_first_sharding`, unless they have been called already."""
    with _BEGINNING:
        if not _has_begun:
            for begin in _beginnings:
                begin()
            _has_begun.append(True)


def anything_was_sharded() -> bool:
    """Return whether this process has sharded any module. The launcher warns at the end if it has not."""
    return bool(_has_begun)


class Extensions:
    """The extensions of one model. For each moment, an attribute contains the methods to call, in order."""

    def __init__(self, model: Schedule) -> None:
        self._all = [kind(model) for kind in _registered]
        self._model = weakref.ref(model)
        _alive.add(self)
        for name in _MOMENTS:
            setattr(self, name, self._methods(name))

    if TYPE_CHECKING:

        def __getattr__(self, moment: str) -> tuple[Callable[..., Any], ...]:
            """Return the methods to call at this moment."""

    def _methods(self, name: str) -> tuple[Callable[..., Any], ...]:
        default = getattr(Extension, name)
        return tuple(getattr(one, name) for one in self._all if getattr(type(one), name) is not default)

    @property
    def inspector(self) -> Inspector | None:
        """Return the function that inspects parts of reduced gradients, or None if no extension does."""
        methods = self.reduced
        if len(methods) < 2:
            return methods[0] if methods else None

        def inspect(part: torch.Tensor, terms: Mapping[int, torch.Tensor]) -> None:
            for method in methods:
                method(part, terms)

        return inspect

    def find(self, kind: type[ExtensionT]) -> ExtensionT:
        """Return the model's instance of class `kind`. Raise `LookupError` if there is none."""
        for one in self._all:
            if type(one) is kind:
                return one
        raise LookupError(f"{kind.__name__} was not registered before the model was sharded")

    def absorb(self, earlier: Extensions) -> None:
        """Take over the settings and state of `earlier`, the extensions of a model that this one now contains."""
        _alive.discard(earlier)
        for old in earlier._all:
            new = next((one for one in self._all if type(one) is type(old)), None)
            if new is not None:
                take_settings(new, old, old.settings)
                new.absorbed(old)


def take_settings(new: object, old: object, defaults: Mapping[str, Any]) -> None:
    """Copy those attributes of `old` to `new` that differ from their defaults."""
    for name, default in defaults.items():
        if (value := getattr(old, name)) != default:
            setattr(new, name, value)


_alive: weakref.WeakSet[Extensions] = weakref.WeakSet()


def tell_before_clipping(meshes: Collection[Mesh]) -> None:
    """Notify the extensions of all models on these meshes that the gradient norm is about to be computed."""
    for extensions in list(_alive):
        model = extensions._model()
        if model is not None and model.mesh in meshes:
            for tell in extensions.before_clipping:
                tell()


_MOMENTS = [name for name, member in vars(Extension).items() if callable(member) and not name.startswith("_")]
