"""One job at a time in a folder: a second one would remove the checkpoints of the first.

A job that uses a folder leaves a file there that names it, and renews it as long as it runs. A job that finds the file
of another is refused, unless that has ended: its process is gone, or, on another host, it has not renewed the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigError

LEASE_NAME = ".lease.json"
RENEWED_EVERY_SECONDS = 10.0
LASTS_SECONDS = 60.0
"""Without being renewed; several times as long as between two renewals, for file systems are slow at times."""


@contextlib.contextmanager
def lease(directory: Path) -> Iterator[None]:
    """Have `directory` to oneself inside. Called on one rank.

    Args:
        directory: is made if it is not there.

    Raises:
        ConfigError: another job has it; host, process and age are named.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LEASE_NAME
    mine = {"host": socket.gethostname(), **_process(os.getpid()), "since": time.time()}
    is_own = _take(path, mine)
    is_over = threading.Event()
    if is_own:
        threading.Thread(target=_renew, args=(path, is_over), name="lease", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        if is_own:
            path.unlink(missing_ok=True)


def _take(path: Path, mine: dict[str, Any]) -> bool:
    """Put one's own lease there; whether this process had none there yet."""
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.write_text(json.dumps(mine), encoding="utf-8")
    try:
        for _ in range(2):
            try:
                os.link(own, path)  # unlike a rename it never replaces
                return True
            except FileExistsError:
                pass
            except OSError as error:
                warnings.warn(f"{path.parent}: nothing keeps a second job out of it: {error}", stacklevel=4)
                return False
            try:
                theirs, age = json.loads(path.read_text(encoding="utf-8")), time.time() - path.stat().st_mtime
            except (OSError, ValueError):  # it has just gone, or nobody can tell whose it is
                path.unlink(missing_ok=True)
                continue
            if _same(theirs, mine):
                return False
            if not _has_ended(theirs, mine, age):
                raise _in_use(path, theirs, age)
            path.unlink(missing_ok=True)
    finally:
        own.unlink(missing_ok=True)
    raise ConfigError(f"{path.parent}: another job has just begun in it", hint="use another folder")


def _renew(path: Path, is_over: threading.Event) -> None:
    while not is_over.wait(RENEWED_EVERY_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def _process(pid: int) -> dict[str, Any]:
    """What tells a process from all others, also from those that have its number later, or in another container."""
    try:
        begun = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"pid": pid, "begun": begun, "machine": f"{boot} {Path('/proc/self/ns/pid').readlink()}"}
    except (OSError, ValueError, IndexError):
        return {"pid": pid, "begun": 0, "machine": ""}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(key) == other[key] for key in ("host", "pid", "begun", "machine"))


def _has_ended(theirs: dict[str, Any], mine: dict[str, Any], age: float) -> bool:
    if mine["machine"] and theirs.get("machine") == mine["machine"]:
        return _process(int(theirs["pid"])).get("begun") != theirs.get("begun")
    return age > LASTS_SECONDS


def _in_use(path: Path, theirs: dict[str, Any], age: float) -> ConfigError:
    since = time.time() - float(theirs.get("since", time.time()))
    return ConfigError(
        f"{path.parent} is in use: process {theirs.get('pid')} on {theirs.get('host')} has it since {since:.0f} s, and "
        f"renewed its lease {max(0.0, age):.0f} s ago",
        hint="use another folder, or end that job; one that was killed on another host is in the way for "
        f"{LASTS_SECONDS:.0f} s",
    )
