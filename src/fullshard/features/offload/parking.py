"""Park a model: move what it and its optimizer keep on the device to host memory, and back again later.

Reinforcement learning trains a model and generates text with an inference engine on the same device, in turns. While
one of them runs, the other one must leave the memory to it.

    what moves    each storage as a whole: main weights, compute shards, gradients, optimizer state, buffers
    what is freed unsharded parameters, which the next forward gathers again
    at most       one storage is in both places at a time

The storage keeps its identity and only loses its memory, so views that the engine or autograd hold are valid again
when it returns. Until then, tensors that other code can reach are views of the copy on the host. They can be read,
changed and saved.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import torch
from torch import nn

from fullshard.comm import torch_private
from fullshard.config.switches import OFFLOAD
from fullshard.core.errors import ConfigError, LifecycleError
from fullshard.engine.bucket import Bucket
from fullshard.engine.extension import Extension
from fullshard.engine.lookup import refuse_pinned, require_units
from fullshard.engine.schedule import Schedule
from fullshard.engine.sharded_tensor import ShardedTensor
from fullshard.engine.unit import Unit
from fullshard.features.offload.host import Host, StorageView, bytes_of, host_of, plain_tensors, put


class HasState(Protocol):
    """An optimizer, or an `EMA`: `state` holds tensors by name for each parameter."""

    @property
    def state(self) -> Mapping[Any, Mapping[str, Any]]:
        """Return the state."""


Optimizers = HasState | Sequence[HasState] | None


@dataclass(frozen=True, slots=True)
class _Parked:
    """A storage without memory, its copy on the host, and the views of the copy, each with its previous contents."""

    storage: torch.UntypedStorage
    copy: torch.UntypedStorage
    views: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, tensors: list[torch.Tensor], host: Host) -> Self:
        """Copy the storage that `tensors` share to the host, and free its memory."""
        storage = tensors[0].untyped_storage()
        copy = host.copy_of(bytes_of(storage), to_host=True).untyped_storage()
        host.finish()
        views = [(each, put(each, StorageView.of(each).of_storage(copy))) for each in dict.fromkeys(tensors)]
        storage.resize_(0)
        return cls(storage, copy, views)

    def bring_back(self) -> None:
        """Allocate the storage's memory again, and copy its bytes from the host."""
        self.storage.resize_(self.copy.nbytes())
        bytes_of(self.storage).copy_(bytes_of(self.copy), non_blocking=self.copy.is_pinned())
        for tensor, data in self.views:
            put(tensor, data)


class Parking(Extension):
    """Keeps track of the parked parts of a model, and refuses to use them.

    Attributes:
        units: for each parked unit, its storages.
        others: storages of buffers and of parameters that are not sharded.
        states: for each parked optimizer, the storages of its state.
    """

    def __init__(self, model: Schedule) -> None:
        super().__init__(model)
        self.units: dict[Unit, list[_Parked]] = {}
        self.others: list[_Parked] = []
        self.states: weakref.WeakKeyDictionary[HasState, list[_Parked]] = weakref.WeakKeyDictionary()
        self._keeps_weights = False

    def absorbed(self, earlier: Extension) -> None:
        """Take over the parked storages of a model that is now part of this model."""
        assert isinstance(earlier, Parking)  # noqa: S101 -- for the type checker
        self.units.update(earlier.units)
        self.others += earlier.others
        self.states.update(earlier.states)
        self._keeps_weights |= earlier._keeps_weights

    def park(self, units: Iterable[Unit], others: Iterable[torch.Tensor], *, keeps_weights: bool) -> None:
        """Free the unsharded parameters of units, and move the rest of their memory to the host."""
        units = list(units)
        refuse_pinned(units, "a model is parked", "leave `with unsharded(model)` first")
        if self.model.forward.is_under_way or torch_private.backward_under_way() != -1:
            raise LifecycleError("a model cannot be parked during its forward or backward", hint="park it afterwards")
        self.model.reset_if_failed()
        self._keeps_weights = keeps_weights
        for unit in units:
            unit.reshard()
            for bucket in unit.buckets:
                if not bucket.buffer.is_persistent:
                    bucket.buffer.free()
        self.model.settle()
        for unit in units:
            moved = self.units.setdefault(unit, [])
            for bucket in unit.buckets:
                moved += _leave(_memory_of(bucket, keeps_weights=keeps_weights), unit.mesh.device)
        self.others += _leave(others, self.model.mesh.device)

    def park_state(self, optimizer: HasState) -> None:
        """Move the state of an optimizer to the host."""
        tensors = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
        self.states.setdefault(optimizer, []).extend(_leave(tensors, self.model.mesh.device))

    def unpark(self, units: Iterable[Unit]) -> None:
        """Move the memory of units back to the device."""
        for unit in units:
            _return(self.units.pop(unit, []))
            for bucket in unit.buckets:
                bucket.touch()  # code may have changed the weights meanwhile
        _return(self.others)

    def moves(self, unit: Unit, function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Park or unpark a unit if `function`, which `model.to(...)` applies to its tensors, moves it."""
        device, host = unit.mesh.device, torch.device("cpu")
        if device.type == host.type:
            return False
        is_parked = unit in self.units
        dtypes = {parameter.dtype for _, parameter in unit.entries}
        made = (function(torch.empty(0, dtype=dtype, device=host if is_parked else device)) for dtype in dtypes)
        results = {(result.device, result.dtype) for result in made}
        if results == {(host, dtype) for dtype in dtypes}:
            self.park([unit], (), keeps_weights=False)
        elif is_parked and results == {(device, dtype) for dtype in dtypes}:
            self.unpark([unit])
        else:
            self._refuse(is_parked, "be converted")
            return False
        return True

    def before_forward(self) -> None:
        """Raise an error if the model is parked, unless it has kept its weights for a forward without gradients."""
        self._refuse(self.units and (torch.is_grad_enabled() or not self._keeps_weights), "run its forward")

    def before_gather(self, unit: object) -> None:
        """Raise an error if the weights of a unit are parked."""
        self._refuse(unit in self.units and not self._keeps_weights, "gather weights")

    def backward_begins(self) -> None:
        """Raise an error if the model is parked."""
        self._refuse(self.units, "run its backward")

    def before_step(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """Raise an error if the parameters or the state of the optimizer are parked."""
        self._refuse(optimizer in self.states or any(bucket.owner in self.units for bucket in buckets), "be updated")

    def _refuse(self, is_parked: object, what: str) -> None:
        if is_parked:
            message = f"rank {self.model.mesh.rank}: a parked model or optimizer cannot {what}"
            raise LifecycleError(message, hint="call fullshard.unpark(model, optimizer) first")


@torch.no_grad()
def park(model: nn.Module, optimizer: Optimizers = None, *, keep: Literal["weights"] | None = None) -> None:
    """Move everything that a sharded model and its optimizer keep on the device to page-locked host memory.

    The memory is returned to the driver, so that another program or an inference engine can use it. After `unpark`,
    training is bit-identical to a run without parking, even in the middle of gradient accumulation. Call both
    on every rank. Neither communicates. A second call to `park` parks the tensors that are still on the device.

    While the model is parked, its parameters, gradients and optimizer state are on the host, and a checkpoint can be
    saved. On a CPU no memory moves, but the same errors are raised.

    Args:
        model: a model with sharded modules.
        optimizer: one optimizer or several, whose state moves as well. An `EMA` counts as one.
        keep: `weights` leaves the weights and buffers, which a forward without gradients needs, on the device.

    Raises:
        ConfigError: `keep` has another value.
        LifecycleError: The model is not sharded, is on the meta device, is inside `unsharded(model)`, or is running
            its forward or backward. Later: a forward, a backward, a gather or a step while the model is parked.
    """
    if keep not in (None, "weights"):
        raise ConfigError(f"park: keep is {keep!r}", hint="expected None or 'weights'")
    units = require_units(model)
    others = [] if keep else [t for t in (*model.parameters(), *model.buffers()) if not isinstance(t, ShardedTensor)]
    others += [t.grad for t in model.parameters() if not isinstance(t, ShardedTensor) and t.grad is not None]
    schedules = dict.fromkeys(unit.schedule for unit in units)
    for schedule in schedules:
        parking = Parking.of(schedule)
        parking.park([u for u in units if u.schedule is schedule], others, keeps_weights=bool(keep))
        others = []
    for each in _optimizers(optimizer):
        parking.park_state(each)
    if (device := units[-1].mesh.device).type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
        torch.accelerator.empty_cache()


@torch.no_grad()
def unpark(model: nn.Module, optimizer: Optimizers = None) -> None:
    """Move a parked model, and the state of its optimizers, back to the device. It does nothing if none is parked.

    State that is parked and not named here stays on the host, for example while weights are only read.

    Raises:
        LifecycleError: The model is not sharded.
    """
    units = require_units(model)
    for schedule in dict.fromkeys(unit.schedule for unit in units):
        parking = Parking.of(schedule)
        parking.unpark([u for u in units if u.schedule is schedule])
        for each in _optimizers(optimizer):
            _return(parking.states.pop(each, []))


def _optimizers(optimizer: Optimizers) -> list[HasState]:
    found = list(optimizer) if isinstance(optimizer, Sequence) else [] if optimizer is None else [optimizer]
    return [getattr(each, "optimizer", each) for each in found]  # Accelerate wraps optimizers


def _memory_of(bucket: Bucket, *, keeps_weights: bool) -> Iterator[torch.Tensor]:
    """Yield the tensors through which the memory of a bucket can be reached."""
    if not keeps_weights or bucket.compute_shard is not bucket.main:
        yield from (*bucket.stored, *(parameter.local for parameter in bucket.sharded_parameters))
    if not keeps_weights:
        yield bucket.compute_shard
    for parameter in bucket.sharded_parameters:
        if parameter.local_grad is not None:
            yield parameter.local_grad
    if bucket.has_gradient:
        yield from (tensor.detach() for tensor in bucket.gradient.held)  # nothing else reads them


def _leave(tensors: Iterable[object], device: torch.device) -> list[_Parked]:
    """Move the storages of those tensors that are on `device` to the host. Skip values that are not tensors."""
    if device.type == "cpu" and OFFLOAD.read() != "rehearse":
        return []
    host, together = host_of(device, pins=True, overlaps=False), dict[int, list[torch.Tensor]]()
    for plain in itertools.chain.from_iterable(map(plain_tensors, tensors)):
        storage = plain.untyped_storage()
        if plain.device.type == device.type and storage.nbytes() and storage.resizable():
            together.setdefault(torch_private.storage_id(storage), []).append(plain)
    return [_Parked.of(same, host) for same in together.values()]


def _return(parked: list[_Parked]) -> None:
    while parked:
        parked.pop().bring_back()  # the last one first: a copy may have been parked again
