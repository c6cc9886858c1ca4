"""The journal of a job: a file in the run's directory with one line of JSON for each event other than a step.

    {"time": "2026-11-23T17:04:05.678Z", "kind": "save", "rank": 0, "host": "node3", "pid": 4711, "step": 1200, ...}

Every process of a job appends to the same file. So does the launcher, which learns the path from its processes. Each
line is written in a single call, so that it cannot be split by a kill or by another process.
"""

import json
import os
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from fullshard.core.files import parse_object, read_lines, read_text

JOURNAL_NAME = "events.jsonl"
HEARTBEAT_SECONDS = 5.0
"""How often a launcher sets the time of the file, while its job runs."""
_LONGEST_TEXT = 2000
"""The maximum number of characters of a message, because a write of more than one disk page could be split."""


class Happening(StrEnum):
    """The kinds of events. `docs/reliability.md` lists the fields of each kind in addition to the common ones."""

    START = "start"
    SAVE = "save"
    LOAD = "load"
    COPY = "copy"
    SKIP = "skip"
    PREEMPTION = "preemption"
    FAILURE = "failure"
    RESTART = "restart"
    SHRINK = "shrink"
    GROWTH = "growth"
    REPLICA = "replica"
    SLOW = "slow"
    WAITING = "waiting"
    END = "end"


@dataclass(slots=True)
class Journal:
    """The journal of this process."""

    path: Path | None = None  # the file, or None if no events are written
    rank: int | None = None
    step: int | None = None  # the current or last step of the run, counted from 1
    is_told: bool = False  # whether a loop that counts across restarts sets `step`; if not, optimizer steps are counted
    before: int = 0  # steps of the run before this process's first, from the checkpoint that it has loaded

    def tell(self, step: int) -> None:
        """Set the current step of the run, as counted across restarts."""
        self.step, self.is_told = step, True

    def count(self, step: int) -> None:
        """Set the current step to a step of this process, unless a loop sets it."""
        if not self.is_told:
            self.step = self.before + step

    def close(self) -> None:
        """Stop writing events, because the run has ended. The process may continue."""
        self.path, self.step, self.is_told, self.before = None, None, False, 0

    def note(self, kind: Happening, message: str = "", *, rank: int | None = None, **details: Any) -> None:
        """Append an event. If the file cannot be written, issue a single warning and do not end the run.

        `rank` is the affected rank and defaults to this one. `details` are further fields with JSON values. They may
        replace `host`, `pid`, and `step`.
        """
        if self.path is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        event: dict[str, Any] = {"time": now, "kind": str(kind), "rank": self.rank if rank is None else rank}
        event |= {"host": socket.gethostname(), "pid": os.getpid(), "step": self.step} | details
        if message:
            event["message"] = message[:_LONGEST_TEXT]
        line = json.dumps(event, default=str) + "\n"
        try:
            # Without O_NONBLOCK, opening a pipe in place of the file would block.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            file = os.open(self.path, flags, 0o644)
            try:
                os.write(file, line.encode("utf-8", "backslashreplace"))
            finally:
                os.close(file)
        except FileNotFoundError:  # the run's directory has been removed
            self.path = None
        except OSError as error:
            warnings.warn(f"fullshard: events cannot be written to {self.path}: {error}", stacklevel=2)
            self.path = None


JOURNAL = Journal()
"""The journal of this process."""


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a journal (a file or a directory) in order. Skip other lines, such as truncated ones."""
    path = path / JOURNAL_NAME if path.is_dir() else path
    for line in read_lines(path) if path.exists() else ():
        try:
            event = parse_object(line)
        except ValueError:
            continue
        if isinstance(event.get("kind"), str) and isinstance(event.get("time"), str):
            yield event


TOLD = "journal"
"""The name of the file in which a launcher's processes store the path of their journal."""


def told_by_processes(directory: Path) -> Path | None:
    """Return the path of the journal that a launcher's processes write, or None if they do not write one."""
    try:
        return Path(read_text(directory / TOLD))
    except (OSError, ValueError):
        return None
