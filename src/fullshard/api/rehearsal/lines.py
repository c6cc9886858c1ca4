"""Lines on which messages take as long as on real links, although nothing is sent.

A line uses the host's time or a GPU's. A communicator runs its messages one after the other, latency included. Messages
of different communicators share the links: one sends its data after the other, while their latencies overlap.
"""
# ruff: noqa: D102 - the methods of a work are those of `torch.distributed`

from __future__ import annotations

import ctypes
import functools
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from fullshard.api import torch_private
from fullshard.api.rehearsal.group import Collective, CommunicatorLine, RehearsedGroup, Tensors
from fullshard.comm.waiting import PROGRESS
from fullshard.plan.hardware import Cluster

_WORK: Any = dist.Work

_HERE, _THERE = ((ctypes.c_char * 2**22).from_buffer(bytearray(b"1") * 2**22) for _ in range(2))


def processor_seconds() -> float:
    """Return the processor's seconds for each byte that a rank sends and receives over TCP, in pieces in no cache."""
    spent, server = 0.0, socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
        for start in range(0, len(_HERE), 2**16):  # the most that TCP passes on at once
            ctypes.memmove(_THERE, _HERE, len(_HERE))
            time.sleep(5e-4)
            begin = time.thread_time()
            sender.sendall(memoryview(_HERE)[start : start + 2**16])
            receiver.recv_into(memoryview(_THERE)[start:], 2**16, socket.MSG_WAITALL)
            spent += time.thread_time() - begin
    return spent / len(_HERE)


def _arrive(fill: Callable[[], object], is_inference: bool, begin: float, end: float, seconds: float) -> None:
    """Copy memory for so many seconds of the processor, in parts of 1 ms between two times, then write the results."""
    parts = math.ceil(seconds / 1e-3)
    for part in range(parts):
        time.sleep(max(0.0, begin + (end - begin) * part / parts - time.perf_counter()))
        until = time.thread_time() + seconds / parts
        while time.thread_time() < until:
            ctypes.memmove(_THERE, _HERE, 2**18)
    with torch.inference_mode(is_inference):
        fill()  # not before, because what has not arrived takes no memory


class Links:
    """The links of a cluster, and the lines on them. A byte takes `processor` seconds. If `is_free`, none do."""

    def __init__(self, cluster: Cluster, *, is_free: bool = False, processor: float = 0.0) -> None:
        self._cluster, self.is_free, self.processor = cluster, is_free, processor
        self._sent_at = [0.0, 0.0]  # when the links inside hosts and between hosts are free, on the host's clock
        self._sent: Any = None  # and on the GPU's, in its memory

    def line(self, group: RehearsedGroup, kind: str) -> CommunicatorLine:
        """Return the line of a group for tensors of one kind of device."""
        if kind == "cpu":
            return HostLine(self)
        make = functools.partial(torch.Stream, torch.accelerator.current_accelerator())
        return StreamLine(torch.accelerator.current_stream, make, self._occupy)

    def _occupy(self, message: Collective, fill: Callable[[], object]) -> None:
        """Keep the current stream of the GPU busy for the time of a message, or of `fill` if that is longer."""
        sending, latency = self.seconds(message)
        if not sum(sending) + latency:
            fill()
            return
        if self._sent is None:
            self._sent = torch.zeros(2, dtype=torch.int64, device="cuda")
            torch.accelerator.synchronize()  # before other streams use it
        begun, slower = torch.empty(1, dtype=torch.int64, device="cuda"), max(sending)
        torch_private.take_links(begun, self._sent[sending.index(slower) :], slower)
        fill()
        torch_private.wait_on_device(begun, slower + latency)

    def reserve(self, message: Collective, earliest: float) -> tuple[float, float, float]:
        """Queue a message after the earlier ones. Return when it begins and ends, and its CPU time in seconds."""
        sending, latency = self.seconds(message)
        link = sending.index(max(sending))
        begin = max(earliest, self._sent_at[link])
        self._sent_at[link] = begin + sending[link]
        spent = 0.0 if self.is_free else self.processor * sum(message.sent(self._cluster))
        return begin, self._sent_at[link] + latency, spent

    def seconds(self, message: Collective) -> tuple[tuple[float, float], float]:
        """Return how long a message occupies the links inside hosts and between hosts, and its latency."""
        if self.is_free or message.ranks == 1:
            return (0.0, 0.0), 0.0
        inside, across, latency = message.seconds(self._cluster)
        return (inside, across), latency


waits = Counter[tuple[str, str]]()
"""The `count` of waits for messages, and the seconds of the `host` in them or how many it began `late`, when the device
had nothing left to do, by what the engine did meanwhile."""


class _RunningWork(_WORK):  # type: ignore[misc]
    """A message under way, and what must not be freed before somebody has waited for it."""

    def __init__(self, *kept: Any) -> None:
        super().__init__()
        self._kept = kept

    def wait(self, timeout: Any = None) -> bool:
        what, (kind, value) = PROGRESS.what if PROGRESS.is_waiting else "the script", self._wait()
        waits.update({(what, "count"): 1, (what, kind): value})
        self._kept = ([],)
        return True

    synchronize = wait


class HostWork(_RunningWork):
    """A message that ends at a time of `time.perf_counter`, or with the thread `busy`. The host waits for it."""

    def __init__(self, end: float, *kept: Any, busy: Future[None] | None = None) -> None:
        super().__init__(*kept)
        self._end, self._busy = end, busy

    def _wait(self) -> tuple[str, Any]:
        begin = time.perf_counter()
        if self._busy is not None:
            self._busy.result()
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return "host", time.perf_counter() - begin

    def is_completed(self) -> bool:
        return time.perf_counter() >= self._end and (self._busy is None or self._busy.done())

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        threading.Thread(target=lambda whole: future.set_result(self._wait() and whole), args=self._kept).start()
        return future


class HostLine:
    """A line for tensors in host memory. The computation continues while a message is in flight."""

    def __init__(self, links: Links) -> None:
        self._links, self._free_at = links, 0.0
        self._thread = ThreadPoolExecutor(1)  # as Gloo has for each group

    def __call__(self, message: Collective, whole: Tensors, fill: Callable[[], object], is_async: bool) -> HostWork:
        """Start a collective."""
        if message.what == "barrier" and torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()
        begin, self._free_at, spent = self._links.reserve(message, max(time.perf_counter(), self._free_at))
        if self._links.processor * message.nbytes <= 1e-4:
            fill()
            return HostWork(self._free_at, whole)
        busy = self._thread.submit(_arrive, fill, torch.is_inference_mode_enabled(), begin, self._free_at, spent)
        return HostWork(self._free_at, whole, busy=busy)


class StreamWork(_RunningWork):
    """A message on a stream. The stream that is current later waits for it."""

    def __init__(self, line: StreamLine, event: Any, *kept: Any) -> None:
        super().__init__(*kept)
        self._line, self._event = line, event

    def _wait(self) -> tuple[str, Any]:
        is_late = self._event.query() and self._line.current().query()
        self._line.current().wait_event(self._event)
        return "late", is_late

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def get_future(self) -> torch.futures.Future[Any]:
        stream = self._line.make()
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[stream.device])
        stream.wait_event(self._event)
        with stream:
            future.set_result(self._kept[0])
        return future


class StreamLine:
    """A line for tensors of a device. As with NCCL, messages run on a separate stream unless they are awaited.

    The device itself waits until the time of a message is over, while the host continues. `current` returns the current
    stream and `make` a new one. `occupy` keeps the current stream busy for a message, and fills its results.
    """

    def __init__(
        self, current: Callable[[], Any], make: Callable[[], Any], occupy: Callable[[Collective, Any], None]
    ) -> None:
        self.current, self.make, self._occupy = current, make, occupy
        self._stream = self._last = None

    def __call__(self, message: Collective, whole: Tensors, fill: Callable[[], object], is_async: bool) -> StreamWork:
        """Start a collective."""
        stream = current = self.current()
        if is_async:
            stream = self._stream = self._stream or self.make()
            stream.wait_stream(current)
        if self._last is not None:
            stream.wait_event(self._last)
        with stream:
            self._occupy(message, fill)
        self._last = stream.record_event()
        return StreamWork(self, self._last, *([whole, fill] if is_async else [[]]))
