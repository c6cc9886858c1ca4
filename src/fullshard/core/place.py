"""Where this process is: what it waits for from other ranks, or last did, told by who waits and read by who watches.

Telling costs well under a microsecond. Where the launcher has asked for it, it is also written to a page of a file:
what a process did last can be read there when it is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_NBYTES = 512
_ENCODING = "utf-8"


@dataclass(slots=True)
class Whereabouts:
    """Of this process.

    Attributes:
        moves: how often a wait has begun or ended.
        what: what this process waits in, or did last; empty: it has done nothing yet.
        step: of this process, counted from 1.
        is_waiting: whether it waits.
        is_patient: the wait is one that may take long: comparing notes, a save.
        slowest: seconds that the slowest step has taken, the first left out.
        waited: seconds for which this process has waited so far.
        given_up: why waiting is over although nobody came; empty: it is not.
    """

    moves: int = 0
    what: str = ""
    step: int = 0
    is_waiting: bool = False
    is_patient: bool = False
    slowest: float = 0.0
    waited: float = 0.0
    given_up: str = ""
    _since: float | None = None
    _entered: float = 0.0
    _page: mmap.mmap | None = field(default=None, repr=False)

    def enter(self, what: str, step: int | None = None) -> None:
        """A wait for other ranks begins, in this step; None: it is part of none, and may take long."""
        if not self.is_waiting:
            self._entered = time.monotonic()
        self.what, self.is_waiting, self.is_patient = what, True, step is None
        self.given_up = ""  # was of the last one
        if step is not None:
            self.step = step
        self.moves += 1
        if self._page is not None:
            self._write("waiting in")

    def leave(self) -> None:
        """It is over."""
        if self.is_waiting:
            self.waited += time.monotonic() - self._entered
        self.is_waiting = False
        self.moves += 1
        if self._page is not None:
            self._write("after")

    def begin_step(self, now: float) -> None:
        """A step begins after another; what the one before took is known then."""
        if self._since is not None:
            self.slowest = max(self.slowest, now - self._since)
        self._since = now

    @contextlib.contextmanager
    def waiting(self, what: str, *, in_step: bool = False) -> Iterator[None]:
        """Within it this process waits for others. Of another thread than the main one nobody is told.

        Args:
            what: see `enter`.
            in_step: it is a part of the step that is under way; otherwise of none, and may take long.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.enter(what, self.step if in_step and self.step else None)
        try:
            yield
        finally:
            self.leave()

    def keep_in(self, path: Path) -> None:
        """From here on write it to a file, which outlasts this process however it ends."""
        with path.open("w+b") as file:
            file.truncate(_NBYTES)
            self._page = mmap.mmap(file.fileno(), _NBYTES)

    def _write(self, how: str) -> None:
        assert self._page is not None  # noqa: S101 -- who calls has looked
        step = f"step {self.step} of this process, " if self.step else ""
        line = f"{step}{how} {self.what}\n".encode(_ENCODING, "replace")[:_NBYTES]
        self._page[: len(line)] = line


PLACE = Whereabouts()
"""That of this process."""


def this_process() -> str:
    """Its number and its host, for others to read."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def this_machine() -> str:
    """What two processes have in common that see each other's numbers: a boot, and the names of processes in it.

    Raises:
        OSError: the system does not say.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def read_place(path: Path) -> str:
    """What a process has written there last, on one line; empty if it has come to nothing."""
    try:
        return path.read_bytes().split(b"\n")[0].strip(b"\0").decode(_ENCODING, "replace")
    except OSError:
        return ""
