"""The place of this process: the wait it is in, or was in last. The waiting code writes it; watchdogs read it.

A note costs well under a microsecond. If the launcher asks for it, the note also goes to a page of a file, which still
tells what a process did last when it is gone.
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
    """The whereabouts of this process.

    Attributes:
        moves: how often a wait has begun or ended.
        what: the wait that this process is in, or was in last; empty: there was none yet.
        step: of this process, counted from 1.
        is_waiting: whether it waits.
        is_patient: whether the wait may take long, such as a consistency check or a save.
        slowest: seconds of the slowest step, without the first.
        waited: seconds for which this process has waited so far.
        given_up: the reason why the wait ended without the others; empty: it did not.
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
        """Begin a wait for other ranks, in this step; None: it belongs to no step, and may take long."""
        if not self.is_waiting:
            self._entered = time.monotonic()
        self.what, self.is_waiting, self.is_patient = what, True, step is None
        self.given_up = ""  # the last wait's
        if step is not None:
            self.step = step
        self.moves += 1
        if self._page is not None:
            self._write("waiting in")

    def leave(self) -> None:
        """End the wait."""
        if self.is_waiting:
            self.waited += time.monotonic() - self._entered
        self.is_waiting = False
        self.moves += 1
        if self._page is not None:
            self._write("after")

    def begin_step(self, now: float) -> None:
        """Begin a step after another, and note how long the one before took."""
        if self._since is not None:
            self.slowest = max(self.slowest, now - self._since)
        self._since = now

    @contextlib.contextmanager
    def waiting(self, what: str, *, in_step: bool = False) -> Iterator[None]:
        """Wait for other ranks inside this context. Threads other than the main one leave no note.

        Args:
            what: see `enter`.
            in_step: whether the wait is a part of the current step; otherwise it belongs to no step, and may take long.
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
        """Write the place to a file from now on; it outlasts this process however that ends."""
        with path.open("w+b") as file:
            file.truncate(_NBYTES)
            self._page = mmap.mmap(file.fileno(), _NBYTES)

    def _write(self, how: str) -> None:
        assert self._page is not None  # noqa: S101 -- who calls has looked
        step = f"step {self.step} of this process, " if self.step else ""
        line = f"{step}{how} {self.what}\n".encode(_ENCODING, "replace")[:_NBYTES]
        self._page[: len(line)] = line


PLACE = Whereabouts()
"""The whereabouts of this process."""


def this_process() -> str:
    """Return this process's number and host, for others to read."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def this_machine() -> str:
    """Return what processes that see each other's numbers share: a boot, and a namespace of processes.

    Raises:
        OSError: the system does not say.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def read_place(path: Path) -> str:
    """Return the last line that a process wrote there; empty if it never wrote one."""
    try:
        return path.read_bytes().split(b"\n")[0].strip(b"\0").decode(_ENCODING, "replace")
    except OSError:
        return ""
