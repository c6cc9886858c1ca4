"""A simulated accelerator that stores no data.

Tensors are on the meta device, and operations on them advance the clocks. A dispatch mode intercepts every operation of
torch. The device tracks memory through the storages that operations create, resize and free. It provides streams and
events with torch's methods, so code that uses the device needs no changes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.api import torch_private
from fullshard.api.rehearsal.group import named_groups
from fullshard.api.virtual import costs
from fullshard.api.virtual.clock import DEVICE, Clock, Stream, Task
from fullshard.comm.device import answered
from fullshard.core.events import Event, EventKind
from fullshard.plan.hardware import Cluster
from fullshard.plan.host import HostCosts
from fullshard.plan.time import CONTENTION

_GRAIN = 512
"""CUDA's allocator rounds sizes up to a multiple of this number of bytes."""


class VirtualEvent:
    """A point in a stream, with the methods of `torch.Event`."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._task: Task | None = None  # of a stream, when it was recorded; nothing before

    def record(self, stream: VirtualStream | None = None) -> VirtualEvent:
        """Record the current position of a stream, by default the current stream."""
        self._task = (stream or self._device.current).queue.last
        return self

    def wait(self, stream: VirtualStream | None = None) -> None:
        """Make later tasks of a stream, by default the current stream, wait for the event."""
        (stream or self._device.current).wait_event(self)

    def query(self) -> bool:
        """Return whether the event has completed."""
        return self._device.clock.is_over(self._task)

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        self._device.clock.block(self._task)


class VirtualStream:
    """A stream with the methods of `torch.Stream`. As a context manager it becomes the current stream."""

    def __init__(self, device: VirtualDevice, name: str) -> None:
        self._device, self.queue = device, device.clock.stream(name)
        self._before: list[VirtualStream] = []

    def wait_event(self, event: VirtualEvent) -> None:
        """Make later tasks wait for the event."""
        self._device.clock.have_wait(self.queue, event._task)

    def wait_stream(self, other: VirtualStream) -> None:
        """Make later tasks wait for all tasks that are now in the other stream."""
        self._device.clock.have_wait(self.queue, other.queue.last)

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """Record an event at the current position of the stream."""
        return (event or VirtualEvent(self._device)).record(self)

    def query(self) -> bool:
        """Return whether all tasks in the stream have ended."""
        return self._device.clock.is_over(self.queue.last)

    def synchronize(self) -> None:
        """Make the host wait for all tasks in the stream."""
        self._device.clock.block(self.queue.last)

    def __enter__(self) -> VirtualStream:
        self._before.append(self._device.current)
        self._device.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._device.current = self._before.pop()


@dataclass(slots=True)
class _Memory:
    """The memory of one storage on the device. It belongs to the stream on which it was allocated."""

    nbytes: int
    stream: Stream
    death: weakref.ref[Any] | None = None
    users: list[Stream] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Begin:
    """The values of the device's counters at the start of a recording."""

    time: float = 0.0
    blocked: float = 0.0
    launches: int = 0
    collectives: int = 0
    allocated: int = 0


class VirtualDevice(torch_private.DispatchMode):
    """Simulates the device of one rank.

    Attributes:
        current: the stream on which operations run.
        launches: number of kernels launched so far.
        curve: a pair (seconds on the host's clock, allocated bytes) for each change of the allocated memory.
        phase: the phase of the step in which tasks are launched.
        begin: the values of the counters at the start of the recording.
    """

    def __init__(self, cluster: Cluster, host: HostCosts | None = None) -> None:
        super().__init__()
        self.cluster, self.host = cluster, host or HostCosts()
        self.clock = Clock(CONTENTION)
        self.allocated = self.peak_allocated = 0
        self.current = self.default = VirtualStream(self, "compute")
        self.launches = self.collectives = 0
        self.curve: list[tuple[float, int]] = []
        self.phase = ""
        self.begin = _Begin()
        self.sending: dict[int, Any] = {}
        self._known: dict[int, _Memory] = {}
        self._imagined = 0
        self._leaving: list[tuple[int, list[Task]]] = []

    def begin_record(self) -> None:
        """Start to record the peak of the allocated memory and its curve over time."""
        self.peak_allocated = self.allocated
        self.curve.clear()
        self.begin = _Begin(self.clock.host, self.clock.blocked, self.launches, self.collectives, self.allocated)

    def note_event(self, event: Event) -> None:
        """Note which unit of the engine runs, so that tasks are labeled with it. This method is an event sink."""
        if event.kind in (EventKind.FORWARD_BEGIN, EventKind.BACKWARD_BEGIN):
            self.phase = f"{self.phase.partition(' ')[0]} {event.unit}"

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named = named or {}
        if self._imagined or any(map(torch_private.is_for_shapes, types)):  # torch asks for a shape only
            return function(*given, **named)
        if any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types):
            return NotImplemented  # a subclass takes it apart first
        if function is torch_private.read_item.default:
            if given[0].is_meta:
                self.clock.block(self.current.queue.last)
                return 0.0 if given[0].is_floating_point() else 0
            return function(*given, **named)
        if function is torch_private.wait_tensor.default:
            if work := self.sending.pop(torch_private.storage_id(given[0].untyped_storage()), None):
                work.wait()
            return given[0]
        if function is torch_private.wrap_to_wait.default:
            return torch_private.Unfinished(given[0])
        made = function(*given, **named)
        outputs = costs.tensors_of(made)
        if not any(t.is_meta for t in outputs) and not any(t.is_meta for t in costs.tensors_of(given)):
            return made
        if function.namespace == torch_private.wait_tensor.default.namespace:
            self._send(function, given, made)
            return made
        if costs.is_view(function):
            self.clock.host += self.host.view
        else:
            self.clock.host += self.host.launch
            self.launches += 1
            work = costs.seconds(function, given, named, made, self.cluster.device)
            self.clock_task(str(function.overloadpacket._qualified_op_name), DEVICE, work)
        for tensor in outputs:
            self._note(tensor, given)
        return made

    def _send(self, function: Any, given: Any, made: torch.Tensor) -> None:
        """Simulate one of torch's functional collectives. An all-to-all with one message is a step of a ring."""
        group = named_groups[given[-1]] if isinstance(given[-1], str) else given[-1]
        what = function.name().partition("::")[2]
        is_ring = what == "all_to_all_single" and sum(map(bool, given[2])) == 1
        self._note(made, given)
        self.sending[torch_private.storage_id(made.untyped_storage())] = group.carry(
            "ring" if is_ring else what.replace("_", "-"),
            [given[0] if is_ring else max(made, given[0], key=torch.numel)],
            times=1 + (what == "all_reduce"),
        )

    def clock_task(self, name: str, resource: str, work: float, latency: float = 0.0) -> Task:
        """Launch a task on the current stream."""
        task = self.clock.launch(self.current.queue, name, resource, work, latency)
        task.phase = self.phase
        return task

    def _note(self, tensor: torch.Tensor, given: Any) -> None:
        if not tensor.is_meta:
            return
        storage, id_of = tensor.untyped_storage(), torch_private.storage_id
        key = id_of(storage)
        if key in self._known or any(id_of(t.untyped_storage()) == key for t in costs.tensors_of(given)):
            return
        self._take(storage, storage.nbytes())

    def _take(self, storage: Any, nbytes: int) -> None:
        while self._leaving and all(map(self.clock.is_over, self._leaving[0][1])):
            self._count(-self._leaving.pop(0)[0])
        key = torch_private.storage_id(storage)
        memory = self._known.get(key)
        if memory is None:
            memory = self._known[key] = _Memory(0, self.current.queue)
            memory.death = weakref.ref(storage, lambda _: self._give(self._known.pop(key, None)))
        memory.nbytes, memory.stream = -(-nbytes // _GRAIN) * _GRAIN, self.current.queue
        self._count(memory.nbytes)

    def _give(self, memory: _Memory | None) -> None:
        """Free memory. If other streams have used it, it counts as allocated until they are done with it."""
        if memory is None:
            return
        if tasks := [stream.last for stream in memory.users if stream.last is not None]:
            self._leaving.append((memory.nbytes, tasks))
        else:
            self._count(-memory.nbytes)
        memory.nbytes, memory.users = 0, []

    def _count(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.curve.append((self.clock.host, self.allocated))

    def resize(self, storage: Any, nbytes: int) -> None:
        """Update the allocated memory for a storage that is about to be resized."""
        memory = self._known.get(torch_private.storage_id(storage))
        if memory is not None:
            self._give(memory)
        self._take(storage, nbytes)

    def used_by(self, tensor: torch.Tensor, stream: VirtualStream) -> None:
        """Record that a stream uses the tensor, like `tensor.record_stream(stream)`."""
        memory = self._known.get(torch_private.storage_id(tensor.untyped_storage()))
        if memory is not None and stream.queue is not memory.stream and stream.queue not in memory.users:
            memory.users.append(stream.queue)

    @contextlib.contextmanager
    def running(self) -> Iterator[VirtualDevice]:
        """Let this device simulate all operations on the meta device within the block."""
        storages: Any = torch.UntypedStorage
        tensors: Any = torch.Tensor
        resize, record = storages.resize_, tensors.record_stream

        def resize_(storage: Any, nbytes: int) -> Any:
            if storage.device.type == "meta":
                self.resize(storage, nbytes)
            return resize(storage, nbytes)

        def record_stream(tensor: torch.Tensor, stream: Any) -> None:
            if isinstance(stream, VirtualStream):
                self.used_by(tensor, stream)
            else:
                record(tensor, stream)

        with contextlib.ExitStack() as stack:
            stack.enter_context(instead(storages, "resize_", resize_))
            stack.enter_context(instead(tensors, "record_stream", record_stream))
            for place in torch_private.shapes_learned:
                stack.enter_context(instead(place.owner, place.name, self._imagined_by(place.torchs)))
            stack.enter_context(self)
            stack.enter_context(answered())
            yield self

    def _imagined_by(self, function: Any) -> Any:
        """Wrap a torch function that creates tensors only to infer shapes, so that these tensors take no memory."""

        def imagine(*given: Any) -> Any:
            self._imagined += 1
            try:
                return function(*given)
            finally:
                self._imagined -= 1

        return imagine


@contextlib.contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace the attribute `name` of an object with `value` within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
