"""Traces of torch's profiler with the engine's work as rows of their own, and those of all ranks in one file.

While a profile is recorded, every event of the engine is a mark in it, an empty range, so that it has the profiler's
own clock. Afterwards the marks become rows: a range per unit from the first to the last of its marks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import DataError
from fullshard.core.events import Event, EventKind
from fullshard.core.files import write_text
from fullshard.engine.lookup import units_of

_MARK = "fullshard:"
_RANGES = (
    ("units", "forward", EventKind.FORWARD_BEGIN, EventKind.FORWARD_END),
    ("units", "backward", EventKind.BACKWARD_BEGIN, EventKind.BACKWARD_END),
    ("gathers", "gather", EventKind.UNSHARD_ISSUED, EventKind.UNSHARD_READY),
    ("reductions", "reduce", EventKind.REDUCE_ISSUED, EventKind.REDUCE_DONE),
)
"""Kinds of ranges: the row, the name, the event that begins and the one that ends a range. Others are moments."""
_FIRST_ROW = 1_000_000_000
"""Rows have numbers, as threads have; these are no thread's."""

Entry = dict[str, Any]
"""An entry of a trace: a range, a moment, or the name of a row. Times are microseconds."""


@contextlib.contextmanager
def marked(models: Iterable[nn.Module]) -> Iterator[None]:
    """Mark the events of sharded models in whatever profile is recorded inside."""
    schedules = [units[-1].schedule for model in models if (units := units_of(model))]
    before = [schedule.event_sink for schedule in schedules]
    sinks = []
    for schedule, other in zip(schedules, before, strict=True):

        def mark(event: Event, other: Any = other) -> None:
            with torch.profiler.record_function(f"{_MARK}{event.kind}:{event.nbytes}:{event.unit}"):
                pass
            if other is not None:
                other(event)

        schedule.event_sink = mark
        sinks.append(mark)
    try:
        yield
    finally:
        for schedule, mark, other in zip(schedules, sinks, before, strict=True):
            if schedule.event_sink is mark:
                schedule.event_sink = other


def add_rows(path: Path) -> None:
    """Put the engine's rows into a trace file, in the place of its marks."""
    trace = _read(path)
    entries = trace["traceEvents"]
    marks = [entry for entry in entries if str(entry.get("name", "")).startswith(_MARK) and entry.get("ph") == "X"]
    if not marks:
        return
    rest = [entry for entry in entries if not str(entry.get("name", "")).startswith(_MARK)]
    trace["traceEvents"] = rest + list(_rows(sorted(marks, key=lambda mark: mark["ts"])))
    write_text(path, json.dumps(trace))


def merge_traces(paths: Iterable[Path], output: Path) -> None:
    """Put the traces of several ranks into one file, each rank a group of rows, on one clock.

    Args:
        paths: as `Accelerator.profile` leaves them, in the order of their ranks.
        output: for Perfetto or `chrome://tracing`.

    Raises:
        DataError: one of them is no whole trace. Nothing is written then.
    """
    merged: list[Entry] = []
    first_base = None
    for rank, path in enumerate(paths):
        trace = _read(path)
        base = trace.get("baseTimeNanoseconds", 0)
        first_base = base if first_base is None else first_base
        processes: dict[Any, int] = {}
        for entry in trace["traceEvents"]:
            if "pid" not in entry or entry.get("name") in ("process_name", "process_labels", "process_sort_index"):
                continue
            number = processes.setdefault(entry["pid"], 1000 * rank + len(processes))
            moved = entry | {"pid": number}
            if "ts" in entry:
                moved["ts"] = entry["ts"] + (base - first_base) / 1000
            if "id" in entry:  # of arrows, which are each rank's own
                moved["id"] = f"{rank}.{entry['id']}"
            merged.append(moved)
        for process, number in processes.items():
            name = f"rank {rank}" if number % 1000 == 0 else f"rank {rank}, {process}"
            merged.append(_named("process_name", number, 0, name=name))
            merged.append(_named("process_sort_index", number, 0, sort_index=number))
    write_text(output, json.dumps({"traceEvents": merged, "displayTimeUnit": "ms"}))


def _read(path: Path) -> dict[str, Any]:
    hint = "a kill or a full disk may have cut it off: profile again, or leave this rank out"
    try:
        trace = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a trace: {error}", hint=hint) from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise DataError(f"{path} is no trace of torch's profiler: expected a list traceEvents in it", hint=hint)
    return trace


def _rows(marks: list[Entry]) -> Iterator[Entry]:
    process = marks[0]["pid"]
    ranges: dict[str, list[Entry]] = {row: [] for row, *_ in _RANGES}
    for mark in marks:
        kind = mark["name"].split(":", 3)[1]
        if not any(kind in ends for _, _, *ends in _RANGES):
            name = f"{kind} {mark['name'].split(':', 3)[3]}".strip()
            yield {"ph": "i", "s": "p", "cat": "fullshard", "name": name, "pid": process, "tid": _FIRST_ROW,
                   "ts": mark["ts"]}  # fmt: skip
    for row, start, end, words in _ranges(marks):
        _, _, nbytes, unit = start["name"].split(":", 3)
        ranges[row].append(
            {"ph": "X", "cat": "fullshard", "name": f"{words} {unit or 'root'}", "pid": process, "ts": start["ts"],
             "dur": end["ts"] + end["dur"] - start["ts"], "args": {"bytes": int(nbytes)}}
        )  # fmt: skip
    number = _FIRST_ROW
    for row, found in ranges.items():
        for lane, entries in enumerate(_lanes(found)):
            number += 1
            yield _named("thread_name", process, number, name=row if lane == 0 else f"{row} {lane + 1}")
            yield _named("thread_sort_index", process, number, sort_index=number - 2 * _FIRST_ROW)  # above all threads
            for entry in entries:
                yield entry | {"tid": number}


def _ranges(marks: list[Entry]) -> Iterator[tuple[str, Entry, Entry, str]]:
    """Yield row, first and last mark, and name of each range.

    A unit whose inputs want no gradient does not say that its backward has ended: its last mark before the next
    unit's stands for the end.
    """
    begun: dict[tuple[str, str, str], Entry] = {}
    last: dict[str, Entry] = {}
    for mark in marks:
        _, kind, _, unit = mark["name"].split(":", 3)
        for row, words, begin, end in _RANGES:
            key = (row, words, unit)
            if kind == begin:
                if key in begun:
                    yield row, begun.pop(key), last[unit], words
                begun[key] = mark
            elif kind == end and key in begun:
                yield row, begun.pop(key), mark, words
        last[unit] = mark
    for (row, words, unit), start in begun.items():
        yield row, start, last[unit], words


def _lanes(ranges: list[Entry]) -> list[list[Entry]]:
    """Return ranges in as few rows as keep those of a row apart or one inside the other."""
    lanes: list[list[Entry]] = []
    ends: list[list[float]] = []
    for entry in sorted(ranges, key=lambda entry: (entry["ts"], -entry["dur"])):
        begin, end = entry["ts"], entry["ts"] + entry["dur"]
        for lane, still_open in zip(lanes, ends, strict=True):
            while still_open and still_open[-1] <= begin:
                still_open.pop()
            if not still_open or end <= still_open[-1]:
                lane.append(entry)
                still_open.append(end)
                break
        else:
            lanes.append([entry])
            ends.append([end])
    return lanes


def _named(kind: str, process: int, thread: int, **values: Any) -> Entry:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": values}
