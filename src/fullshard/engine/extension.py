"""The seam of the engine: capabilities beside the kernel are `Extension`s, called at fixed moments of a step.

One instance of each registered class belongs to each sharded model. The kernel calls their methods in the order of
registration, and only those that a class overrides: a moment without listeners costs one look at an empty tuple.
`fullshard.features` registers those of the package; any other class can be registered before a model is sharded.
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
    """A capability beside the kernel. Its methods stand in the order of a step; each does nothing unless overridden.

    Args:
        model: the schedule of the sharded model: its units, mesh and steps.

    Attributes:
        settings: attributes that the user sets on a model, with their defaults. Values set on a part hold for the
            model around it.
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
            LookupError: the class was not registered before the model was sharded.
        """
        return model.extensions.find(cls)

    # -- a model ------------------------------------------------------------------------------------------------

    def assembled(self) -> None:
        """Run when the model's units are known, and again when a model around it is sharded."""

    def postpones(self, unit: Unit) -> bool:
        """Return whether a new unit gets its buckets later. If so, set its `stand_ins` now and call `allocate` then."""
        return False

    def materialized(self) -> None:
        """Run when every unit has its buckets: after `assembled`, or when the last unit gets them."""

    def absorbed(self, earlier: Extension) -> None:
        """Take over the state of `earlier`, this extension of a model that is now a part of this one."""

    def before_first_use(self, *, in_forward: bool) -> None:
        """Run before the model is gathered for the first time, in its first forward or earlier."""

    def loaded(self, unit: Unit) -> None:
        """Run when `load_state_dict` is about to load a unit's parameters."""

    # -- forward ------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Run before a forward of the model begins. After it, every unit must have its buckets."""

    def step_begins(self) -> None:
        """Run at the first forward after an optimizer step."""

    def forward_begins(self) -> None:
        """Run at the start of a forward of the model; `call_begins` of its outermost unit follows."""

    def call_begins(self, unit: Unit) -> None:
        """Run before a unit is unsharded for its forward. Recomputations do not count."""

    def before_gather(self, unit: UnitParameters) -> None:
        """Run before a unit's all-gathers are launched, in forward, backward or elsewhere."""

    def unsharded(self, unit: UnitParameters) -> None:
        """Run when a unit's modules have their unsharded parameters."""

    def unit_ran(self, unit: Unit) -> None:
        """Run after a module of a unit has run forward, or recomputed, and before the unit is resharded."""

    def call_ends(self, unit: Unit, call: Call) -> None:
        """Run after a unit's forward that may have a backward."""

    def resharded(self, unit: UnitParameters) -> None:
        """Run after a unit's unsharded parameters are freed."""

    def forward_ends(self, *, failed: bool) -> None:
        """Run at the end of a forward of the model; `failed`: it raised, or was interrupted."""

    # -- backward -----------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Run when backward reaches the model; raise to refuse it.

        For `bucket_is_final` in this backward, set `publishes_early` of the model's reducer, on all ranks alike.
        """

    def call_backward_begins(self, unit: Unit, call: Call) -> None:
        """Run when backward enters one forward of a unit, whose parameters are unsharded."""

    def reduced(self, part: torch.Tensor, terms: Mapping[int, torch.Tensor]) -> None:
        """Look at a part of a reduced gradient while the cache has it; see `comm.base.Watch`."""

    def doubts_gradients(self) -> bool:
        """Return whether this rank has found a fault, so that no gradient may be used before the backward is over."""
        return False

    def bucket_is_final(self, bucket: Bucket) -> None:
        """Run when a bucket's gradients are published early: `backward_begins` asked for it, and none doubts them."""

    def message(self) -> bytes:
        """Return bytes for the message that ends a backward: as many on every rank. Override `heard`, too."""
        return b""

    def heard(self, largest: bytes, smallest: bytes) -> None:
        """Read what all ranks have said, before gradients are published, early ones aside; raise on all ranks, or none.

        Args:
            largest: the largest that any rank has, byte by byte.
            smallest: the smallest.
        """

    def backward_fails(self) -> None:
        """Run when autograd drops a backward before its end, because something in it raised."""

    def backward_ends(self, used: Mapping[Bucket, bytearray]) -> None:
        """Run after a backward, when its gradients are published.

        Args:
            used: the reduced buckets: for each parameter, whether any rank has used it.
        """

    # -- optimizer ----------------------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Run before an optimizer of the model's parameters is used for the first time; raise to refuse it."""

    def before_clipping(self) -> None:
        """Run before the norm of the gradients is computed."""

    def before_step(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Run before an optimizer updates these buckets, whose gradients are final."""

    # -- whole model --------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        """Run before all ranks save the model."""


_registered: list[type[Extension]] = []
_beginnings: list[Callable[[], object]] = []
_has_begun: list[bool] = []
_BEGINNING = threading.Lock()
"""Ranks may be threads of one process."""


def register(*kinds: type[Extension]) -> None:
    """Give models that are sharded from now on these extensions, after those registered before.

    Raises:
        TypeError: a class overrides only one of `message` and `heard`, so that what is said would be heard by others.
    """
    for kind in kinds:
        if (kind.message is Extension.message) != (kind.heard is Extension.heard):
            raise TypeError(f"{kind.__name__}: expected it to override both `message` and `heard`, or neither")
    _registered.extend(kind for kind in kinds if kind not in _registered)


def at_first_sharding(begin: Callable[[], object]) -> None:
    """Have `begin` called when something is sharded for the first time in this process."""
    _beginnings.append(begin)


def begin_sharding() -> None:
    """Call the functions that wait for something to be sharded."""
    with _BEGINNING:
        if not _has_begun:
            for begin in _beginnings:
                begin()
            _has_begun.append(True)


def anything_was_sharded() -> bool:
    """Return whether anything was sharded in this process; if not, the launcher warns at the end."""
    return bool(_has_begun)


class Extensions:
    """The extensions of one model. Each moment is an attribute: the methods to call, in order."""

    def __init__(self, model: Schedule) -> None:
        self._all = [kind(model) for kind in _registered]
        self._model = weakref.ref(model)
        _alive.add(self)
        for name in _MOMENTS:
            setattr(self, name, self._methods(name))

    if TYPE_CHECKING:

        def __getattr__(self, moment: str) -> tuple[Callable[..., Any], ...]:
            """Return the methods to call at a moment."""

    def _methods(self, name: str) -> tuple[Callable[..., Any], ...]:
        default = getattr(Extension, name)
        return tuple(getattr(one, name) for one in self._all if getattr(type(one), name) is not default)

    @property
    def watch(self) -> Watch | None:
        """Return the function that looks at parts of reduced gradients, or None."""
        methods = self.reduced
        if len(methods) < 2:
            return methods[0] if methods else None

        def watch(part: torch.Tensor, terms: Mapping[int, torch.Tensor]) -> None:
            for method in methods:
                method(part, terms)

        return watch

    def find(self, kind: type[ExtensionT]) -> ExtensionT:
        """Return the one of this class; `LookupError` if there is none."""
        for one in self._all:
            if type(one) is kind:
                return one
        raise LookupError(f"{kind.__name__} was not registered before the model was sharded")

    def absorb(self, earlier: Extensions) -> None:
        """Take over the settings and the state of a part's extensions, which are called no more."""
        _alive.discard(earlier)
        for old in earlier._all:
            new = next((one for one in self._all if type(one) is type(old)), None)
            if new is not None:
                take_settings(new, old, old.settings)
                new.absorbed(old)


def take_settings(new: object, old: object, defaults: Mapping[str, Any]) -> None:
    """Give `new` the attributes of `old` that differ from their defaults."""
    for name, default in defaults.items():
        if (value := getattr(old, name)) != default:
            setattr(new, name, value)


_alive: weakref.WeakSet[Extensions] = weakref.WeakSet()


def tell_before_clipping(meshes: Collection[Mesh]) -> None:
    """Tell the extensions of models on these meshes that the norm of gradients is about to be taken."""
    for extensions in list(_alive):
        model = extensions._model()
        if model is not None and model.mesh in meshes:
            for tell in extensions.before_clipping:
                tell()


_MOMENTS = [name for name, member in vars(Extension).items() if callable(member) and not name.startswith("_")]
