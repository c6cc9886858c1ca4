"""Clocks: one of the host, one per stream. Knows no tensors.

The host launches tasks into streams, which run them in order. What runs on a stream takes a resource: kernels share the
device, collectives share the links, copies share a way between host and device; n tasks on one resource have an n-th of
it each. The host runs ahead until it must wait for a task.

Everything launched so far is known when the host waits, and what it launches later begins no earlier: so the clocks are
exact although they are only wound then.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

DEVICE = "device"
"""The resource of kernels. All others are of communication."""


@dataclass(slots=True, eq=False)
class Task:
    """Something that a stream runs.

    Attributes:
        stream, name: for people.
        resource: that it takes; "" for a task that only waits.
        work: seconds of the resource that it takes, after `latency` seconds that pass whatever else runs; what is left.
        launched: when the host launched it.
        waits_for: another that must be over before.
        start, end: when it ran, once that is known.
        phase: of the script at that time.
    """

    stream: str
    name: str
    resource: str
    launched: float
    work: float = 0.0
    latency: float = 0.0
    waits_for: Task | None = None
    start: float = math.inf
    end: float = math.inf
    phase: str = ""


@dataclass(slots=True, eq=False)
class Stream:
    """Tasks in order: all that were pushed, and the queue of those that are not over."""

    name: str
    tasks: list[Task] = field(default_factory=list)
    queue: deque[Task] = field(default_factory=deque)

    @property
    def last(self) -> Task | None:
        """The task that was pushed last: an event recorded now waits for it."""
        return self.tasks[-1] if self.tasks else None

    def push(self, task: Task) -> Task:
        """Queue a task."""
        self.queue.append(task)
        self.tasks.append(task)
        return task


@dataclass(slots=True)
class Clock:
    """The clocks of one rank.

    Attributes:
        contention: by how much more a kernel takes while a collective runs beside it.
        host: the time on the host's clock.
        device: until when the streams' clocks have been wound.
        blocked: seconds that the host has waited for the device.
    """

    contention: float = 0.0
    host: float = 0.0
    device: float = 0.0
    blocked: float = 0.0
    streams: list[Stream] = field(default_factory=list)

    def stream(self, name: str) -> Stream:
        """Return a new stream."""
        self.streams.append(Stream(name))
        return self.streams[-1]

    def launch(self, stream: Stream, name: str, resource: str, work: float, latency: float = 0.0) -> Task:
        """Launch a task from the host, which takes time of its stream, and none of the host."""
        return stream.push(Task(stream.name, name, resource, self.host, work, latency))

    def have_wait(self, stream: Stream, task: Task | None) -> None:
        """Make tasks launched into `stream` from now on begin after `task`."""
        if task is not None and task is not stream.last and task.end > self.device:
            stream.push(Task(stream.name, "wait", "", self.host, waits_for=task))

    def block(self, task: Task | None) -> None:
        """Let the host wait for `task`."""
        if task is not None:
            self._start()  # tasks that take no time are over then
            while task.end > self.device:
                self._next()
            self.blocked += max(0.0, task.end - self.host)
            self.host = max(self.host, task.end)

    def block_all(self) -> None:
        """Let the host wait for all streams."""
        for stream in self.streams:
            self.block(stream.last)

    def is_over(self, task: Task | None) -> bool:
        """Return whether a task is over, by the host's clock."""
        while task is not None and task.end == math.inf and self.device < self.host and self._next(self.host):
            pass
        return task is None or task.end <= self.host

    def _next(self, until: float = math.inf) -> bool:
        """Wind the streams' clocks to the next moment at which anything changes; False if nothing will before."""
        running = self._start()
        busy = Counter(task.resource for task in running if task.latency <= 0.0)
        slow = 1.0 + self.contention * any(task.resource.startswith("link") for task in running)
        rates = []
        for task in running:
            rate = 1.0 if task.latency > 0.0 else 1.0 / busy[task.resource]
            rates.append(rate / slow if task.resource == DEVICE else rate)
        ends = [self.device + (t.latency or t.work) / rate for t, rate in zip(running, rates, strict=True)]
        heads = [stream.queue[0] for stream in self.streams if stream.queue]
        starts = [task.launched for task in heads if task.start == math.inf and task.launched > self.device]
        moment = min([until, *ends, *starts])
        if moment == math.inf:
            raise RuntimeError("the streams wait for one another")
        self._wind(moment, running, rates)
        self._start()  # tasks that only waited are over now
        return bool(running) or moment < until

    def _start(self) -> list[Task]:
        """Start the tasks that can start, and return those that run."""
        is_changed = True
        while is_changed:
            is_changed = False
            for stream in self.streams:
                while stream.queue and (task := stream.queue[0]).start == math.inf:
                    other = task.waits_for
                    if task.launched > self.device or (other is not None and other.end > self.device):
                        break
                    task.start = self.device
                    if task.work + task.latency > 0.0:
                        break
                    task.end = self.device
                    stream.queue.popleft()
                    is_changed = True
        return [stream.queue[0] for stream in self.streams if stream.queue and stream.queue[0].start < math.inf]

    def _wind(self, moment: float, running: list[Task], rates: list[float]) -> None:
        passed, self.device = moment - self.device, moment
        for task, rate in zip(running, rates, strict=True):
            name = "latency" if task.latency > 0.0 else "work"
            left = getattr(task, name) - passed * rate
            setattr(task, name, left if left >= 1e-12 else 0.0)
            if task.latency <= 0.0 and task.work <= 0.0:
                task.end = moment
        for stream in self.streams:
            if stream.queue and stream.queue[0].end < math.inf:
                stream.queue.popleft()
