"""A step in virtual time: its figures, a trace for Perfetto or chrome://tracing, and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.api.virtual.clock import DEVICE
from fullshard.core.files import write_text
from fullshard.core.sizes import GIB, MIB
from fullshard.plan.pictures import saved_figure


@dataclass(frozen=True, slots=True)
class Slice:
    """A span of work on a stream.

    Attributes:
        stream, name: for people.
        phase: of the engine when it was launched.
        resource: that it took (`virtual.clock`).
        launched, start, end: seconds since the step began.
    """

    stream: str
    name: str
    phase: str
    resource: str
    launched: float
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step.

    Attributes:
        seconds: from the first launch to the end of the last task.
        compute: seconds in which a kernel runs.
        communication: seconds in which something is sent, beside computing or not.
        exposed: those of them in which no kernel runs.
        host: seconds until the host has launched everything, without `blocked`.
        blocked: seconds that the host waits for the device before that.
        launches, collectives: of the host.
        peak_allocated, peak_reserved: bytes on the device.
        state: bytes allocated before the step.
        capacity: bytes of the device that programs may have.
        slices: all spans of work.
        memory: (seconds, bytes allocated) by the host's clock.
    """

    seconds: float
    compute: float
    communication: float
    exposed: float
    host: float
    blocked: float
    launches: int
    collectives: int
    peak_allocated: int
    peak_reserved: int
    state: int
    capacity: int
    slices: Sequence[Slice]
    memory: Sequence[tuple[float, int]]

    @property
    def idle(self) -> float:
        """Seconds in which nothing runs: the device waits for the host."""
        return self.seconds - self.compute - self.exposed

    def figures(self) -> dict[str, float | int]:
        """Return all figures except the slices, for a record."""
        names = ("seconds", "compute", "communication", "exposed", "idle", "host", "blocked", "launches", "collectives",
                 "peak_allocated", "peak_reserved", "state")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def write_trace(self, path: Path) -> None:
        """Write it in Chrome's trace format, which Perfetto reads, too."""
        streams = list(dict.fromkeys(piece.stream for piece in self.slices))
        events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "virtual time"}}]
        for number, stream in enumerate(streams):
            events.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": stream}})
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": streams.index(piece.stream),
                "name": piece.name,
                "cat": piece.resource,
                "ts": piece.start * 1e6,
                "dur": (piece.end - piece.start) * 1e6,
                "args": {"unit": piece.phase, "launched, us": piece.launched * 1e6},
            }
            for piece in self.slices
        ]
        for moment, nbytes in self.memory:
            values = {"MiB": round(nbytes / MIB)}
            events.append({"ph": "C", "pid": 0, "name": "allocated", "ts": moment * 1e6, "args": values})
        write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def draw(self, path: Path) -> None:
        """Draw streams over time, and memory below, into a picture.

        Raises:
            ConfigError: a file name that does not end in `.png`, `.svg` or `.pdf`.
            MissingExtraError: matplotlib is not installed.
        """
        with saved_figure(path, (11, 4.5), purpose="drawing a timeline") as figure:
            self._draw(figure)

    def _draw(self, figure: Any) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        streams = list(dict.fromkeys(piece.stream for piece in self.slices))
        for row, stream in enumerate(streams):
            for is_sent, color in ((False, "C0"), (True, "C3")):
                spans = joined(
                    (p.start, p.end) for p in self.slices if p.stream == stream and is_sent is (p.resource != DEVICE)
                )
                above.broken_barh([(1e3 * a, 1e3 * (b - a)) for a, b in spans], (row - 0.4, 0.8), color=color)
        above.set_yticks(range(len(streams)), streams)
        above.invert_yaxis()
        above.set_title(
            f"{1e3 * self.seconds:.0f} ms: computing {1e3 * self.compute:.0f}, exposed communication "
            f"{1e3 * self.exposed:.0f}, idle {1e3 * self.idle:.0f}"
        )
        below.step([1e3 * m for m, _ in self.memory], [n / GIB for _, n in self.memory], where="post", linewidth=1)
        below.set_ylabel("GiB allocated\n(as the host launches)")
        below.set_xlabel("milliseconds")


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of spans, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds of spans that do not overlap."""
    return sum((end - start for start, end in spans), 0.0)
