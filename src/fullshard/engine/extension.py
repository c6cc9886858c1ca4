"""The engine's extension points: features outside the kernel are `Extension`s, called at fixed moments of a step.

Each sharded model has one instance of each registered class. The kernel calls their methods in the order of
registration, and only those that a class overrides: a moment without listeners costs one look at an empty tuple.
`fullshard.features` registers the extensions of the package. Any other class can be registered before a model is
sharded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from fullshard.comm.base import Watch

if TYPE_CHECKING:
    from fullshard.comm.mesh import Mesh
    from fullshard.engine.bucket import Bucket
    from fullshard.engine.call import Call
    from fullshard.engine.schedule import Schedule
    from fullshard.engine.unit import Unit
    from fullshard.engine.unit_parameters import UnitParameters

ExtensionT = TypeVar("ExtensionT", bound="Extension")


class Extension:
    """Base class for a feature outside the kernel. Its methods follow the order of a step and do nothing by default.

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
        """Return the extension of this class that belongs to a model.

        Raises:
            LookupError: The class was not registered before the model was sharded.
        """
        return model.extensions.find(cls)

    # -- a model ------------------------------------------------------------------------------------------------

    def assembled(self) -> None:
        """Run when the units of the model are known, and again when a model that contains it is sharded."""

    def postpones(self, unit: Unit) -> bool:
        """Return whether a new unit gets its buckets later.

        If so, set its `stand_ins` now and call its `allocate` later.
        """
        return False

    def materialized(self) -> None:
        """Run when every unit has its buckets: after `assembled`, or when the last unit gets them."""

    def absorbed(self, earlier: Extension) -> None:
        """Take over the state of `earlier`, the same extension of a model that is now part of this one."""

    def before_first_use(self, *, in_forward: bool) -> None:
        """Run before the first gather of the model, in its first forward or earlier."""

    def loaded(self, unit: Unit) -> None:
        """Run when `load_state_dict` is about to load the parameters of a unit."""

    # -- forward ------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Run before a forward of the model begins. Every unit must have its buckets when this returns."""

    def step_begins(self) -> None:
        """Run at the first forward after an optimizer step."""

    def forward_begins(self) -> None:
        """Run at the start of a forward of the model, before `call_begins` of its outermost unit."""

    def call_begins(self, unit: Unit) -> None:
        """Run before a unit is unsharded for its forward, but not for a recomputation."""

    def before_gather(self, unit: UnitParameters) -> None:
        """Run before a unit's all-gathers are launched, in forward, backward or elsewhere."""

    def unsharded(self, unit: UnitParameters) -> None:
        """Run when the modules of a unit hold its unsharded parameters."""

    def unit_ran(self, unit: Unit) -> None:
        """Run after a module of a unit has run or recomputed its forward, before the unit is resharded."""

    def call_ends(self, unit: Unit, call: Call) -> None:
        """Run after a forward of a unit that may have a backward."""

    def resharded(self, unit: UnitParameters) -> None:
        """Run after the unsharded parameters of a unit have been freed."""

    def forward_ends(self, *, failed: bool) -> None:
        """Run at the end of a forward of the model. `failed` is set if it raised an error or was interrupted."""

    # -- backward -----------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Run when backward reaches the model. Raise an error to prevent the backward.

        To get `bucket_is_final` calls in this backward, set `publishes_early` of the model's reducer on all ranks.
        """

    def call_backward_begins(self, unit: Unit, call: Call) -> None:
        """Run when backward enters one forward of a unit. The parameters of the unit are unsharded."""

    def reduced(self, part: torch.Tensor, terms: Mapping[int, torch.Tensor]) -> None:
        """Inspect part of a reduced gradient while it is in the cache (`comm.base.Watch`)."""

    def doubts_gradients(self) -> bool:
        """Return whether this rank found a fault, so that no gradient may be used until backward has ended."""
        return False

    def bucket_is_final(self, bucket: Bucket) -> None:
        """Run when the gradients of a bucket are published early.

        This happens if `backward_begins` has requested it and no extension doubts the gradients.
        """

    def message(self) -> bytes:
        """Return bytes for the message that ends a backward, equally many on every rank. Also override `heard`."""
        return b""

    def heard(self, largest: bytes, smallest: bytes) -> None:
        """Read the messages of all ranks before gradients are published, except those published early.

        Raise an error on all ranks or on none.

        Args:
            largest: the byte-wise maximum over all ranks.
            smallest: the byte-wise minimum.
        """

    def backward_fails(self) -> None:
        """Run when autograd drops a backward before its end because part of it raised an error."""

    def backward_ends(self, used: Mapping[Bucket, bytearray]) -> None:
        """Run after a backward, when its gradients have been published.

        Args:
            used: for each reduced bucket, a flag per parameter that says whether any rank used it.
        """

    # -- optimizer ----------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Run before an optimizer first uses the parameters of the model. Raise an error to reject it."""

    def before_clipping(self) -> None:
        """Run before the norm of the gradients is computed."""

    def before_step(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Run before an optimizer updates these buckets. Their gradients are final."""

    # -- whole model --------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        """Run before all ranks save the model."""


_registered: list[type[Extension]] = []
_beginnings: list[Callable[[], object]] = []
_has_begun: list[bool] = []
_BEGINNING = threading.Lock()
"""Guards `begin_sharding`, because ranks may be threads of one process."""


def register(*kinds: type[Extension]) -> None:
    """Add these extensions to models that are sharded from now on, after the classes registered earlier.

    Raises:
        TypeError: A class overrides only one of `message` and `heard`, so another class would read its message.
    """
    for kind in kinds:
        if (kind.message is Extension.message) != (kind.heard is Extension.heard):
            raise TypeError(f"{kind.__name__} must override both `message` and `heard`, or neither")
    _registered.extend(kind for kind in kinds if kind not in _registered)


def at_first_sharding(begin: Callable[[], object]) -> None:
    """Call `begin` when this process shards something for the first time."""
    _beginnings.append(begin)


def begin_sharding() -> None:
    """Call the functions registered with `at_first_sharding`."""
    with _BEGINNING:
        if not _has_begun:
            for begin in _beginnings:
                begin()
            _has_begun.append(True)


def anything_was_sharded() -> bool:
    """Return whether this process has sharded anything. If it has not, the launcher warns at the end."""
    return bool(_has_begun)


class Extensions:
    """The extensions of one model. Each moment is an attribute with the methods to call, in order."""

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
    def watch(self) -> Watch | None:
        """Return the function that inspects parts of reduced gradients, or None if no extension does."""
        methods = self.reduced
        if len(methods) < 2:
            return methods[0] if methods else None

        def watch(part: torch.Tensor, terms: Mapping[int, torch.Tensor]) -> None:
            for method in methods:
                method(part, terms)

        return watch

    def find(self, kind: type[ExtensionT]) -> ExtensionT:
        """Return the extension of this class. Raise `LookupError` if there is none."""
        for one in self._all:
            if type(one) is kind:
                return one
        raise LookupError(f"{kind.__name__} was not registered before the model was sharded")

    def absorb(self, earlier: Extensions) -> None:
        """Take over the settings and state of the extensions of a part, which are not called any more."""
        _alive.discard(earlier)
        for old in earlier._all:
            new = next((one for one in self._all if type(one) is type(old)), None)
            if new is not None:
                take_settings(new, old, old.settings)
                new.absorbed(old)


def take_settings(new: object, old: object, defaults: Mapping[str, Any]) -> None:
    """Copy the attributes of `old` that differ from their defaults to `new`."""
    for name, default in defaults.items():
        if (value := getattr(old, name)) != default:
            setattr(new, name, value)


_alive: weakref.WeakSet[Extensions] = weakref.WeakSet()


def tell_before_clipping(meshes: Collection[Mesh]) -> None:
    """Notify the extensions attached to models on these meshes before the gradient norm is computed."""
    for extensions in list(_alive):
        model = extensions._model()
        if model is not None and model.mesh in meshes:
            for tell in extensions.before_clipping:
                tell()


_MOMENTS = [name for name, member in vars(Extension).items() if callable(member) and not name.startswith("_")]
