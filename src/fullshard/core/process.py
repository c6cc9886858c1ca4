"""Describes a process to other processes: its ID, its machine, its stack, and a file with its last activity."""

import mmap
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

_NBYTES = 512
_LIBRARIES = f"{Path(os.__file__).parent}/", f"{Path(__file__).parents[1]}/", "<frozen"


def this_process() -> str:
    """Return a description of this process that contains its ID and host."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def this_machine() -> str:
    """Return the boot ID and PID namespace. Processes that share both can see each other's process IDs."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def stat_of(pid: int) -> Sequence[str]:
    """Return what the kernel says of a process after its name, beginning with its state; "X" if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def is_of_script(file: str) -> bool:
    """Return whether a file with code belongs neither to Python, nor to fullshard, nor to an installed package."""
    return not file.startswith(_LIBRARIES) and "/site-packages/" not in file and "/dist-packages/" not in file


class StatusFile:
    """A line of text in a memory-mapped file. Other processes can read it even after this process has been killed."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(_NBYTES)
            self._page = mmap.mmap(file.fileno(), _NBYTES)

    def write(self, line: str, step: int | None = None) -> None:
        """Replace the line in the file, and the step of the run."""
        data = f"{time.monotonic():.3f} {step or 0} {line}\n".encode("utf-8", "replace")[:_NBYTES]
        self._page[: len(data)] = data


def read_status(path: Path) -> tuple[str, float, int | None]:
    """Return the last line in the status file of a process of this host, or "", its age in seconds, and the step."""
    try:
        at, step, line = path.read_bytes().split(b"\n")[0].split(b" ", 2)
        return line.decode("utf-8", "replace"), time.monotonic() - float(at), int(step) or None
    except (OSError, ValueError):  # not written yet
        return "", 0.0, None
