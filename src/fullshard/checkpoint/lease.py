"""One job at a time in a folder: a second one would remove or replace the checkpoints of the first.

A job that uses a folder leaves a file there that names it, and renews it as long as it runs. A job that finds the file
of another is refused, unless that has ended: its process is gone, or, on another host, it has not renewed the file.

    OUT/.lease.json           all of OUT is one job's: it removes old checkpoints there, or numbers new ones
    OUT/.NAME.lease.json      OUT/NAME is one job's: it replaces that
"""

from __future__ import annotations

import atexit
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

from fullshard.core.errors import ConfigError, cut

LEASE_NAME = ".lease.json"
RENEWED_EVERY_SECONDS = 10.0
LASTS_SECONDS = 60.0
"""Without being renewed; several times as long as between two renewals, for file systems are slow at times."""

_HELD: dict[Path, int] = {}
"""Leases of this process, each with its process id: a fork does not inherit them."""
_THREAD = "fullshard-lease"


@contextlib.contextmanager
def lease(directory: Path) -> Iterator[None]:
    """Have `directory`, and what is held in it meanwhile, to oneself inside. Called on one rank.

    Args:
        directory: is made if it is not there.

    Raises:
        ConfigError: another job has it; host, process and age are named. Or it cannot be made.
    """
    is_own = hold_folder(directory)
    try:
        yield
    finally:
        if is_own:
            let_go(directory)


def hold_folder(directory: Path) -> bool:
    """Have `directory` to oneself until this process ends, or `let_go`; whether it was not one's own before.

    Raises:
        ConfigError: as for `lease`; so, too, if another job has something in the folder to itself.
    """
    directory = directory.absolute()
    _make(directory)
    path = directory / LEASE_NAME
    is_own = _hold(path)
    try:
        for other in directory.glob(".*" + LEASE_NAME):
            _refuse_another(other)
    except ConfigError:
        if is_own:
            _let_go(path)
        raise
    return is_own


def hold_name(path: Path) -> None:
    """Have what is called `path` to oneself, as `hold_folder` does.

    Raises:
        ConfigError: another job has it, or the folder that it is in.
    """
    path = path.absolute()
    if any(_is_mine(folder / LEASE_NAME) for folder in path.parents):
        return
    _make(path.parent)
    own = path.with_name(f".{path.name}{LEASE_NAME}")
    is_own = _hold(own)
    try:
        _refuse_another(path.with_name(LEASE_NAME))
    except ConfigError:
        if is_own:
            _let_go(own)
        raise


def require_free(path: Path) -> None:
    """Raise `ConfigError` if another job has what is called `path`, or the folder that it is in, to itself."""
    path = path.absolute()
    _refuse_another(path.with_name(f".{path.name}{LEASE_NAME}"))
    _refuse_another(path.with_name(LEASE_NAME))


def let_go(directory: Path = Path("/")) -> None:
    """Leave all folders and names, those in `directory`, to others."""
    for path in [path for path in _HELD if _is_mine(path) and path.is_relative_to(directory.absolute())]:
        _let_go(path)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot prepare a directory at {cut(str(directory), 300)}: {error.strerror}") from None


def _hold(path: Path) -> bool:
    """Put one's own lease there; whether this process had none there yet."""
    mine = {"host": socket.gethostname(), **_process(os.getpid()), "since": time.time()}
    if _is_mine(path) or not _take(path, mine):
        return False
    _HELD[path] = os.getpid()
    if not any(thread.name == _THREAD for thread in threading.enumerate()):
        threading.Thread(target=_renew, name=_THREAD, daemon=True).start()
    return True


def _is_mine(path: Path) -> bool:
    return _HELD.get(path) == os.getpid()


def _let_go(path: Path) -> None:
    if _HELD.pop(path, None) is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _take(path: Path, mine: dict[str, Any]) -> bool:
    own = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        own.write_text(json.dumps(mine), encoding="utf-8")
        for _ in range(2):
            try:
                os.link(own, path)  # unlike a rename it never replaces
                return True
            except FileExistsError:
                pass
            theirs = _read(path)
            if theirs is not None and _same(theirs, mine):
                return False
            _refuse_another(path)
            _remove(path, theirs)
    except OSError as error:
        warnings.warn(f"{path.parent}: nothing keeps a second job out of it: {error}", stacklevel=5)
        return False
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
    raise ConfigError(f"{path.parent}: another job has just begun in it", hint="use another folder")


def _read(path: Path) -> dict[str, Any] | None:
    """Whose lease it is, and how long ago they renewed it; None if there is none, or nobody can tell whose it is."""
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
        numbers = {"age": time.time() - path.stat().st_mtime, "since": float(theirs["since"])}
        return {key: theirs[key] for key in ("host", "pid", "begun", "machine")} | numbers
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove(path: Path, ended: dict[str, Any] | None) -> None:
    """Remove the lease of a job that has ended, and not one that somebody has put in its place meanwhile."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.ended")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        found = _read(aside)
        if found is not None and (ended is None or not _same(found, ended)):
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _renew() -> None:
    while True:
        time.sleep(RENEWED_EVERY_SECONDS)
        for path in [path for path in list(_HELD) if _is_mine(path)]:
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
    return all(one[key] == other[key] for key in ("host", "pid", "begun", "machine"))


def _refuse_another(path: Path) -> None:
    """Raise if a job that still runs, and is not this one, has this lease."""
    theirs = _read(path)
    if theirs is None or _is_mine(path):
        return
    here = {"host": socket.gethostname(), **_process(os.getpid())}
    if here["machine"] and theirs["machine"] == here["machine"]:
        has_ended = _process(theirs["pid"])["begun"] != theirs["begun"]
    else:
        has_ended = theirs["age"] > LASTS_SECONDS
    if has_ended or _same(theirs, here):
        return
    name = path.name.removesuffix(LEASE_NAME).removeprefix(".")
    raise ConfigError(
        f"{path.parent / name} is in use: process {theirs['pid']} on {theirs['host']} has it since "
        f"{time.time() - theirs['since']:.0f} s, and renewed its lease {max(0.0, theirs['age']):.0f} s ago",
        hint="use another folder, or end that job; one that was killed on another host is in the way for "
        f"{LASTS_SECONDS:.0f} s",
    )


atexit.register(let_go)
