"""A process as others see it: its number, its machine, and a page that says what it did last."""

from __future__ import annotations

import mmap
import os
import socket
from pathlib import Path

_NBYTES = 512


def this_process() -> str:
    """Return this process's number and host, for others to read."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def this_machine() -> str:
    """Return what processes that see each other's numbers share: a boot, and a namespace of processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


class StatusFile:
    """A line in a page of a file, made anew, which outlasts this process however that ends."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(_NBYTES)
            self._page = mmap.mmap(file.fileno(), _NBYTES)

    def write(self, line: str) -> None:
        """Replace the line."""
        data = f"{line}\n".encode("utf-8", "replace")[:_NBYTES]
        self._page[: len(data)] = data


def read_status(path: Path) -> str:
    """Return the last line that a process wrote there; empty if it never wrote one."""
    try:
        return path.read_bytes().split(b"\n")[0].strip(b"\0").decode("utf-8", "replace")
    except OSError:
        return ""
