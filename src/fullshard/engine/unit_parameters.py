"""A unit's parameters: sharded at rest, and unsharded while code computes with them.

They are unsharded in two steps, with other work in between: `issue_unshard` launches the all-gathers, and `unshard`
waits for them and puts the original parameters into the modules. `reshard` undoes both. `engine.unit` calls these.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from fullshard.comm import torch_private
from fullshard.comm.base import Collectives
from fullshard.comm.waiting import Waiting
from fullshard.core.errors import LifecycleError
from fullshard.core.events import Event, EventKind
from fullshard.engine.binding import Binding
from fullshard.engine.bucket import Bucket
from fullshard.engine.parameter import ShardedParameter, mark_original
from fullshard.engine.precision import MixedPrecisionPolicy
from fullshard.engine.shard_spec import ReductionSettings
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.storage import Storage
from fullshard.wrap.partition import Slot, UnitPlan

if TYPE_CHECKING:
    from fullshard.engine.schedule import Schedule


class UnitState(Enum):
    """The state of a unit's parameters. Nothing else records whether they are unsharded.

    Unsharding goes through these states in order. Resharding goes back to GATHERED and then to SHARDED. It also goes
    from GATHERING to SHARDED if a gather is not needed any more.
    """

    SHARDED = auto()
    """The unsharded parameters have no memory."""
    GATHERING = auto()
    """The all-gather is in progress."""
    GATHERED = auto()
    """The parameters are gathered, but the modules hold the sharded ones."""
    UNSHARDED = auto()
    """The parameters are gathered, and the modules hold the original ones."""


class Postponed(Protocol):
    """Holds the tensors that are in the modules of a unit as long as the unit has no buckets."""

    entries: list[tuple[Slot, ShardedTensor]]

    def error(self, unit: UnitParameters) -> LifecycleError:
        """Return the error to raise if code uses the unit before it has buckets."""


_made = itertools.count()


class UnitParameters:
    """The parameters of one unit, and their current state.

    Attributes:
        stand_ins: the tensors that the modules hold while the unit has no buckets.
        neighbors: the ranks that keep the parameters sharded among themselves between forward and backward; None means
            all ranks of the shard axis.
        keeps_memory: whether the memory of the unsharded parameters stays allocated after resharding.
        made: the position of the unit in the order in which this process created its units.
    """

    buckets: list[Bucket]
    full_nbytes: int

    def __init__(self, plan: UnitPlan, *, policy: MixedPrecisionPolicy, storage: Storage, schedule: Schedule) -> None:
        self.schedule, self.slots = schedule, plan.slots
        self.modules, self.policy, self.storage = plan.modules, policy, storage
        self.mesh = schedule.mesh  # a model that contains this one may have another mesh
        self.reduction = ReductionSettings.of(self.mesh)
        self._waits: dict[tuple[str, str], Waiting] = {}
        self.name, self.number = "", 0
        self.state = UnitState.SHARDED
        self.is_pinned = False
        self.neighbors: Collectives | None = None
        self.keeps_memory = False
        self.stand_ins: Postponed | None = None
        self.made = next(_made)

    def __str__(self) -> str:
        return f"unit {self.name!r}" if self.name else "the outermost unit"

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Set the unit's buckets, and put their sharded parameters into the modules."""
        self.buckets = buckets
        self.full_nbytes = sum(bucket.full_nbytes for bucket in buckets)
        for bucket in buckets:
            for slot, sharded in zip(bucket.slots, bucket.sharded_parameters, strict=True):
                # An optimizer created earlier holds these, and must find out which parameters replace them.
                for original in (slot.parameter, *slot.replaced):
                    mark_original(original, sharded)
                for replaced in slot.replaced:
                    sharded.take_hooks(replaced)
        self._binding = Binding(_entries(buckets))
        self._binding.bind(unsharded=False)
        self.stand_ins = None

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes, such as the buckets before they have memory.
        if name in ("buckets", "full_nbytes") and (stand_ins := vars(self).get("stand_ins")) is not None:
            raise stand_ins.error(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def entries(self) -> Sequence[tuple[Slot, ShardedTensor]]:
        """Return, for each parameter, its slot and the tensor that the modules hold at rest."""
        if self.stand_ins is not None:
            return self.stand_ins.entries
        return _entries(self.buckets)

    def has_view(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` uses memory that will be freed when the parameters are resharded."""
        plain = torch_private.local_of(tensor) if isinstance(tensor, DTensor) else tensor
        if plain.layout is not torch.strided or torch_private.are_transforms_active():
            return False
        place = torch_private.storage_id(plain.untyped_storage())
        return any(place in bucket.storage_ids and not bucket.shares_main for bucket in self.buckets)

    def issue_unshard(self, *, exactly: bool = False) -> None:
        """Launch the all-gathers of the unit if it is sharded. With `exactly`, the values are sent unrounded."""
        if self.state is not UnitState.SHARDED:
            return
        for tell in self.schedule.extensions.before_gather:
            tell(self)
        self.state = UnitState.GATHERING  # before the launches: if one fails, `reshard` waits for the earlier ones
        self.emit(EventKind.UNSHARD_ISSUED, self.full_nbytes)
        with torch_private.without_transforms():  # memory made under transforms ends with them
            for bucket in self.buckets:
                bucket.issue_unshard(exactly=exactly)

    def unshard(self, *, exactly: bool = False) -> None:
        """Unshard the parameters and wait for the gathers to end. With `exactly`, values are sent unrounded."""
        self.issue_unshard(exactly=exactly)
        if self.state is UnitState.GATHERING:
            with self.waiting("unshard"), torch_private.without_transforms():
                for bucket in self.buckets:
                    bucket.wait_unshard()
            self.state = UnitState.GATHERED
            self.emit(EventKind.UNSHARD_READY, self.full_nbytes)
        if self.state is UnitState.GATHERED:
            self._bind(unsharded=True)
            for tell in self.schedule.extensions.unsharded:
                tell(self)

    def reshard(self, *, is_after_forward: bool = False) -> None:
        """Free the unsharded parameters, unless they are sharded already or pinned by `unsharded()`.

        Set `is_after_forward` if backward may follow. If the unit has `neighbors`, these ranks then keep the
        parameters until backward.
        """
        if self.state is UnitState.SHARDED or self.is_pinned:
            return
        if self.state is UnitState.GATHERING:  # gathered ahead but unused: report here which rank is missing
            with self.waiting("unshard"):
                for bucket in self.buckets:
                    bucket.wait_unshard()
        if self.state is UnitState.UNSHARDED:
            self._bind(unsharded=False)  # first, because it may raise an error
        for bucket in self.buckets:
            bucket.reshard(kept_by=self.neighbors if is_after_forward else None)
        for tell in self.schedule.extensions.resharded:
            tell(self)
        self.state = UnitState.SHARDED
        self.emit(EventKind.RESHARDED, self.full_nbytes)

    def reshard_if_outdated(self) -> None:
        """Reshard parameters kept across steps if main weights have been changed by anything but an optimizer."""
        if self.state is UnitState.GATHERED and any(bucket.is_outdated for bucket in self.buckets):
            self.reshard()

    @property
    def freed_nbytes(self) -> int:
        """Return how many bytes resharding frees. It frees none if ranks share memory or one rank owns everything."""
        return sum(bucket.full_nbytes for bucket in self.buckets if not bucket.buffer.is_persistent)

    def rest(self) -> None:
        """Put the sharded parameters back into the modules. Unlike `reshard`, this frees no memory.

        Outside forward and backward, `module.parameters()` must always yield sharded parameters. Otherwise clipping and
        `zero_grad()` would act on the original parameters, which never hold a gradient.
        """
        if self.state is UnitState.UNSHARDED and not self.is_pinned:
            self._bind(unsharded=False)

    def _bind(self, *, unsharded: bool) -> None:
        self._binding.check()  # before any change, because an error would leave it half done
        if not unsharded:
            for bucket in self.buckets:
                _check_unchanged(bucket)
        self._binding.bind(unsharded=unsharded)
        self.state = UnitState.UNSHARDED if unsharded else UnitState.GATHERED

    @property
    def is_at_rest(self) -> bool:
        """Return whether the modules hold sharded parameters, so that forward cannot run without unsharding."""
        return self.state is not UnitState.UNSHARDED

    def take_requires_grad(self) -> None:
        """Apply `requires_grad` changes made on original parameters to the sharded parameters, in every bucket."""
        for bucket in self.buckets:
            bucket.take_requires_grad()

    def emit(self, kind: EventKind, nbytes: int = 0, *, what: str = "", bucket: int = 0) -> None:
        """Report an event of this unit to the model's event sink, if it has one."""
        if self.schedule.event_sink is not None:
            self.schedule.event_sink(Event(kind, self.name, nbytes, what, bucket))

    def waiting(self, phase: str) -> Waiting:
        """Return a context manager in which this rank waits for others. It records the unit and `phase` for reports."""
        wait = self._waits.get((self.name, phase))
        if wait is None:
            wait = self._waits[self.name, phase] = Waiting(f"{self}, {phase}", [self.mesh.control_group])
        wait.step = self.schedule.steps + 1
        return wait


def _check_unchanged(bucket: Bucket) -> None:
    """Raise an error if unsharded parameters changed in place: the change would be lost or differ between ranks."""
    changed = bucket.originals.take_changes()
    if not changed or (bucket.shares_main and bucket.mesh.world_size == 1):
        return  # a single rank, whose `full` shares the memory of `main`
    names = ", ".join(str(bucket.sharded_parameters[index].name) for index in changed)
    raise LifecycleError(
        f"rank {bucket.mesh.rank}, {bucket.owner}: {names} changed in place while unsharded (clamp_, "
        "Embedding(max_norm=), ...), but other ranks have separate copies, and the change would be lost",
        hint="change parameters between steps, under unsharded(model, writeback=True), in the same way on all ranks",
    )


def _entries(buckets: Sequence[Bucket]) -> list[tuple[Slot, ShardedParameter]]:
    return [entry for b in buckets for entry in zip(b.slots, b.sharded_parameters, strict=True)]
