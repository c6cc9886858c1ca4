"""Clocks: one of the host, one per stream. Knows no tensors.

The host launches tasks into streams, which run them in order. What runs on a stream takes a resource: kernels share the
device, collectives share the links, copies share a way between host and device; n tasks on one resource have an n-th of
it each. The host runs ahead until it must wait for a task.

Everything launched so far is known when the host waits, and what it launches later begins no earlier: so the clocks are
exact although they are only wound then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

DEVICE = "device"
"""The resource of kernels. All others are of communication."""


class Task:
    """Something that a stream runs.

    Attributes:
        name: for people.
        resource: that it takes; "" for a task that only waits.
        latency: seconds that it takes whatever else runs.
        work: seconds of the resource that it takes after them.
        launched: when the host launched it.
        waits_for: another that must be over before.
        start, end: when it ran, once that is known.
        phase: of the script at that time.
    """

    __slots__ = ("end", "latency", "launched", "name", "phase", "resource", "start", "waits_for", "work")

    def __init__(
        self, name: str, resource: str, *, work: float, latency: float, launched: float, waits_for: Task | None
    ) -> None:
        self.name, self.resource, self.work, self.latency = name, resource, work, latency
        self.launched, self.waits_for, self.phase = launched, waits_for, ""
        self.start = self.end = float("inf")


class Stream:
    """Tasks in order.

    Attributes:
        name: for people.
        last: the task that was queued last, until which an event that is recorded now waits.
        tasks: all that were queued.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.last: Task | None = None
        self.tasks: list[Task] = []
        self._queue: deque[Task] = deque()
        self._running: list[float] | None = None

    def push(self, task: Task) -> None:
        """Queue it."""
        self._queue.append(task)
        self.tasks.append(task)
        self.last = task


@dataclass(slots=True)
class Clock:
    """The clocks of one rank.

    Args:
        contention: by how much more a kernel takes while a collective runs beside it.

    Attributes:
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
        task = Task(name, resource, work=work, latency=latency, launched=self.host, waits_for=None)
        stream.push(task)
        return task

    def have_wait(self, stream: Stream, task: Task | None) -> None:
        """Make tasks launched into `stream` from now on begin after `task`."""
        if task is not None and task is not stream.last and task.end > self.device:
            stream.push(Task("wait", "", work=0.0, latency=0.0, launched=self.host, waits_for=task))

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
        while task is not None and task.end == float("inf") and self.device < self.host:
            if not self._next(self.host):
                break
        return task is None or task.end <= self.host

    def _next(self, until: float = float("inf")) -> bool:
        """Wind the streams' clocks to the next moment at which anything changes; False if nothing will before."""
        running = self._start()
        busy: dict[str, int] = {}
        for stream in running:
            task, (latency, _) = stream._queue[0], stream._running or (0.0, 0.0)
            if latency <= 0.0:
                busy[task.resource] = busy.get(task.resource, 0) + 1
        slow = 1.0 + self.contention * any(stream._queue[0].resource.startswith("link") for stream in running)
        moment, rates = until, []
        for stream in running:
            task, (latency, left) = stream._queue[0], stream._running or (0.0, 0.0)
            rate = 1.0 if latency > 0.0 else 1.0 / busy[task.resource]
            if task.resource == DEVICE:
                rate /= slow
            rates.append(rate)
            moment = min(moment, self.device + (latency if latency > 0.0 else left) / rate)
        for stream in self.streams:
            if stream._queue and stream._running is None and stream._queue[0].launched > self.device:
                moment = min(moment, stream._queue[0].launched)
        if moment == float("inf"):
            raise RuntimeError("the streams wait for one another")
        self._wind(moment, running, rates)
        self._start()  # tasks that only waited are over now
        return bool(running) or moment < until

    def _start(self) -> list[Stream]:
        """Start the tasks that can start, and return the streams that run."""
        is_changed = True
        while is_changed:
            is_changed = False
            for stream in self.streams:
                while stream._queue and stream._running is None:
                    task = stream._queue[0]
                    other = task.waits_for
                    if task.launched > self.device or (other is not None and other.end > self.device):
                        break
                    task.start = self.device
                    if task.work + task.latency > 0.0:
                        stream._running = [task.latency, task.work]
                        break
                    task.end = self.device
                    stream._queue.popleft()
                    is_changed = True
        return [stream for stream in self.streams if stream._running is not None]

    def _wind(self, moment: float, running: list[Stream], rates: list[float]) -> None:
        passed = moment - self.device
        self.device = moment
        for stream, rate in zip(running, rates, strict=True):
            part = stream._running
            assert part is not None  # noqa: S101 -- it runs
            phase = 0 if part[0] > 0.0 else 1
            part[phase] -= passed * rate
            if part[phase] < 1e-12:
                part[phase] = 0.0
                if part[0] <= 0.0 and part[1] <= 0.0:
                    stream._queue.popleft().end = moment
                    stream._running = None
