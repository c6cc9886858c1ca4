"""Looks for memory that two streams use although nothing says which of them comes first.

Each stream has a clock: what is over before its next task. Events, collectives and the host's waits join clocks. A task
that reads what another stream has written, or writes what another has read or written, without that being over by its
clock, is a race, in whatever order the two happened to run. What is freed is written when its stream next allocates.

Not seen: what the host itself reads and writes in page-locked memory; that, orders of the streams show.

    python -m tests.simulated.races [programs]

says where the engine has races in these programs of `tests.simulated.programs`, or in all.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from fullshard.core.errors import NonFiniteError
from fullshard.core.events import EventKind
from fullshard.engine.unit_parameters import UnitParameters
from tests.simulated import device
from tests.simulated.group import run_ranks
from tests.simulated.programs import PROGRAMS
from tests.simulated.training import Case, Program, as_with_nccl, small_activations, train

FRAMES = 4
"""Of a place in the program, the innermost functions that are neither torch's nor the device's."""


@dataclass(frozen=True)
class Access:
    """What one of two tasks does.

    Attributes:
        what: the kernel, copy, collective or allocation.
        stream: its number on the device; 0 computes.
        writes: or only reads.
        where: file, line and function, the innermost first.
        after: what the engine had said last, and of which unit; empty: it has said nothing.
    """

    what: str
    stream: int
    writes: bool
    where: tuple[str, ...]
    after: str

    def __str__(self) -> str:
        does = "writes" if self.writes else "reads"
        after = f", after {self.after}" if self.after else ""
        return f"stream {self.stream} {does} in {self.what}{after}\n    " + "\n    ".join(
            self.where or ("nowhere in Python",)
        )


@dataclass(frozen=True)
class Race:
    """Two accesses without an order, at least one of which writes."""

    device: int
    nbytes: int
    first: Access
    second: Access

    def __str__(self) -> str:
        return f"device {self.device}, {self.nbytes} bytes:\n  {self.first}\n  {self.second}"


def _frames(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        name = frame.f_code.co_filename
        ours = Path(name).parent == Path(device.TESTS) or name == threading.__file__
        if "/torch/" not in name and "<" not in name and not ours:
            yield f"{'/'.join(Path(name).parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back


class _Places:
    """Numbers for places in the program, from 1, and what they stand for."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, tuple[str, ...], str], int] = {}
        self.known: list[tuple[str, tuple[str, ...], str]] = []
        self._said: dict[int, str] = {}
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(self._number)

    def _number(self, what: bytes) -> int:
        where: list[str] = []
        for line in _frames(sys._getframe().f_back):
            where.append(line)
            if len(where) == FRAMES:
                break
        place = what.decode(), tuple(where), self._said.get(torch.accelerator.current_device_index(), "")
        if place not in self._numbers:
            self.known.append(place)
            self._numbers[place] = len(self.known)
        return self._numbers[place]

    def hear(self, kind: EventKind, unit: str) -> None:
        self._said[torch.accelerator.current_device_index()] = f"{kind} of {unit or 'the root'}"

    def read(self, number: int) -> Race:
        values = (ctypes.c_int64 * 8)()
        device._C.simulated_race(ctypes.c_int64(number), values)
        accesses = []
        for at in (2, 5):
            where, stream, writes = values[at : at + 3]
            what, lines, after = self.known[where - 1]
            accesses.append(Access(what, stream, bool(writes), lines, after))
        return Race(values[0], values[1], *accesses)


@contextlib.contextmanager
def look_for_races() -> Iterator[list[Race]]:
    """Those of what is launched inside, in the list once it is left; one of each pair of places."""
    places = _Places()
    found: list[Race] = []
    emit = UnitParameters.emit

    def heard(self: UnitParameters, kind: EventKind, *arguments: Any, **more: Any) -> None:
        places.hear(kind, self.name)
        emit(self, kind, *arguments, **more)

    device._C.simulated_races.restype = ctypes.c_int64
    with pytest.MonkeyPatch.context() as within:
        within.setattr(UnitParameters, "emit", heard)
        device._C.simulated_look_for_races(places._callback)
        try:
            yield found
        finally:
            races = map(places.read, range(device._C.simulated_races()))
            found += {(race.first.where, race.second.where): race for race in races}.values()
            device._C.simulated_look_for_races(None)


def races_of(case: Case, program: Program = train) -> list[str]:
    """What a case has two streams use in no order."""
    device.begin(device.Order.LAZY)
    ended: Exception | None = None
    with small_activations(), as_with_nccl(), look_for_races() as races:
        try:
            run_ranks(program, case.ranks, case, device.NAME)
        except Exception as error:
            ended = error
    if ended is not None and not races and not isinstance(ended, NonFiniteError):
        raise ended  # where there is a race numbers may be wrong, and end the program
    return [str(race) for race in races]


if __name__ == "__main__":
    for name in sys.argv[1:] or PROGRAMS:
        for found in races_of(PROGRAMS[name][1], PROGRAMS[name][0]):
            print(f"{name}: {found}", flush=True)
