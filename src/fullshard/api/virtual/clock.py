"""Clocks for the host and for the streams. This module does not depend on tensors.

The host launches tasks into streams, which run them in order. A running task uses a resource: kernels share the device,
collectives share the links, and copies share a path between host and device. If n tasks use a resource, each gets 1/n
of it. The host runs ahead until it must wait for a task.

The clocks of the streams advance only when the host waits or queries a task. They are exact nevertheless, because all
earlier tasks are known by then, and later tasks cannot start earlier.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

DEVICE = "device"
"""The resource that kernels use. All other resources are for communication."""


@dataclass(slots=True, eq=False)
class Task:
    """A task that a stream runs."""

    stream: str  # a label for users, as is `name`
    name: str
    resource: str  # the resource that the task uses, or "" if it only waits for another task
    launched: float  # when the host launched the task
    work: float = 0.0  # seconds for which the task still needs its resource; they begin after `latency`
    latency: float = 0.0  # seconds that do not depend on other tasks
    waits_for: Task | None = None  # another task that must end first
    start: float = math.inf  # when the task began; infinity until that is known
    end: float = math.inf  # when the task ended; infinity until that is known
    phase: str = ""  # the phase of the script when the task was launched


@dataclass(slots=True, eq=False)
class Stream:
    """A stream: all tasks that were ever pushed, in order, and the queue of those that have not ended."""

    name: str
    tasks: list[Task] = field(default_factory=list)
    queue: deque[Task] = field(default_factory=deque)

    @property
    def last(self) -> Task | None:
        """Return the task that was pushed last. An event that is recorded now waits for this task."""
        return self.tasks[-1] if self.tasks else None

    def push(self, task: Task) -> Task:
        """Append a task to the stream."""
        self.queue.append(task)
        self.tasks.append(task)
        return task


@dataclass(slots=True)
class Clock:
    """The host's clock and the streams' clocks on one rank."""

    contention: float = 0.0  # the fraction by which a concurrent collective slows down a kernel
    host: float = 0.0  # the time on the host's clock
    device: float = 0.0  # the time up to which the clocks of the streams have advanced
    blocked: float = 0.0  # seconds that the host has waited for the device
    streams: list[Stream] = field(default_factory=list)

    def stream(self, name: str) -> Stream:
        """Create a new stream and return it."""
        self.streams.append(Stream(name))
        return self.streams[-1]

    def launch(self, stream: Stream, name: str, resource: str, work: float, latency: float = 0.0) -> Task:
        """Launch a task from the host. The task takes time in its stream, but no time on the host."""
        return stream.push(Task(stream.name, name, resource, self.host, work, latency))

    def have_wait(self, stream: Stream, task: Task | None) -> None:
        """Make all tasks that are launched into `stream` from now on wait until `task` ends."""
        if task is not None and task is not stream.last and task.end > self.device:
            stream.push(Task(stream.name, "wait", "", self.host, waits_for=task))

    def block(self, task: Task | None) -> None:
        """Block the host until `task` ends."""
        if task is not None:
            self._start()  # tasks that take no time are over then
            while task.end > self.device:
                self._next()
            self.blocked += max(0.0, task.end - self.host)
            self.host = max(self.host, task.end)

    def block_all(self) -> None:
        """Block the host until all streams are idle."""
        for stream in self.streams:
            self.block(stream.last)

    def is_over(self, task: Task | None) -> bool:
        """Return whether a task has ended at the current time of the host's clock."""
        while task is not None and task.end == math.inf and self.device < self.host and self._next(self.host):
            pass
        return task is None or task.end <= self.host

    def _next(self, until: float = math.inf) -> bool:
        """Advance the clocks of the streams to the next change. Return False if there is none before `until`."""
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
            raise RuntimeError("the streams are deadlocked: each is waiting for another")
        self._wind(moment, running, rates)
        self._start()  # tasks that only waited are over now
        return bool(running) or moment < until

    def _start(self) -> list[Task]:
        """Start the tasks that can start, and return the running tasks."""
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
