"""One job at a time in a folder: a second one would remove or replace the checkpoints of the first.

A job that uses a folder leaves a file there that names it, and renews it as long as it runs. A job that finds the file
of another is refused, unless that has ended: its process is gone, or, on another host, it has not renewed the file.

    OUT/.lease.json           all of OUT is one job's: it removes old checkpoints there, or numbers new ones
    OUT/.NAME.lease.json      OUT/NAME is one job's: it replaces that

In an object store these are objects, which are made only if they are not there, and written anew to be renewed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.checkpoint.objects import Location, ObjectPath, at_exit, read_small
from fullshard.core.errors import ConfigError, StoreError, cut, printable
from fullshard.core.files import parse_object
from fullshard.core.process import this_machine

LEASE_NAME = ".lease.json"
_LONGEST_NBYTES = 1 << 16
"""A longer file is no lease."""
RENEWED_EVERY_SECONDS = 10.0
LASTS_SECONDS = 60.0
"""The life of a lease without renewal: several renewal intervals, for file systems are slow at times."""

_HELD: dict[Location, int] = {}
"""Leases of this process, each with its process id: a fork does not inherit them."""
_THREAD = "fullshard-lease"


@contextlib.contextmanager
def lease(directory: Location) -> Iterator[None]:
    """Hold `directory`, and what is held in it meanwhile, for this process alone. Called on one rank.

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


def hold_folder(directory: Location) -> bool:
    """Hold `directory` for this process alone until it ends, or `let_go`; return whether it did not hold it before.

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


def hold_name(path: Location) -> bool:
    """Hold the name `path` alone, as `hold_folder` does; return whether this process held neither it nor its folder.

    Raises:
        ConfigError: another job has it, or the folder that it is in.
    """
    path = path.absolute()
    if any(map(holds, path.parents)):
        return False
    _make(path.parent)
    own = _of_name(path)
    is_own = _hold(own)
    try:
        _refuse_another(path.with_name(LEASE_NAME))
    except ConfigError:
        if is_own:
            _let_go(own)
        raise
    return is_own


def holds(directory: Location) -> bool:
    """Return whether this process has a folder to itself."""
    return _is_mine(directory / LEASE_NAME)


def require_free(path: Location) -> None:
    """Raise `ConfigError` if another job holds the name `path`, or the folder that it is in."""
    path = path.absolute()
    _refuse_another(_of_name(path))
    _refuse_another(path.with_name(LEASE_NAME))


def let_go(directory: Location | None = None) -> None:
    """Leave all folders and names, or those in `directory`, to others."""
    inside = None if directory is None else directory.absolute()
    for path in [path for path in _HELD if _is_mine(path)]:
        if inside is None or _lies_in(path, inside):
            _let_go(path)


def let_go_of(path: Location) -> None:
    """Release the name `path`, which `hold_name` gave, to other jobs."""
    _let_go(_of_name(path))


def _of_name(path: Location) -> Location:
    return path.with_name(f".{path.name}{LEASE_NAME}")


def _lies_in(path: Location, directory: Location) -> bool:
    if isinstance(path, ObjectPath) or isinstance(directory, ObjectPath):
        return isinstance(path, ObjectPath) and path.is_relative_to(directory)
    return path.is_relative_to(directory)


def _make(directory: Location) -> None:
    if isinstance(directory, ObjectPath):
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot prepare a directory at {cut(str(directory), 300)}: {error.strerror}") from None


def _hold(path: Location) -> bool:
    """Put one's own lease there; whether this process had none there yet."""
    mine = {**_this_process(), "since": time.time()}
    if _is_mine(path) or not _take(path, mine):
        return False
    _HELD[path] = os.getpid()
    if isinstance(path, ObjectPath):
        at_exit(let_go)
    if not any(thread.name == _THREAD for thread in threading.enumerate()):
        threading.Thread(target=_renew, name=_THREAD, daemon=True).start()
    return True


def _is_mine(path: Location) -> bool:
    return _HELD.get(path) == os.getpid()


def _let_go(path: Location) -> None:
    if _HELD.pop(path, None) is not None:
        with contextlib.suppress(OSError, StoreError):
            path.unlink()


def _take(path: Location, mine: dict[str, Any]) -> bool:
    return _take_object(path, mine) if isinstance(path, ObjectPath) else _take_file(path, mine)


def _take_file(path: Path, mine: dict[str, Any]) -> bool:
    own = _own_name(path)
    try:
        with own.open("x", encoding="utf-8") as file:
            json.dump(mine, file)
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


def _take_object(path: ObjectPath, mine: dict[str, Any]) -> bool:
    data = json.dumps(mine | {"renewed": time.time()}).encode()
    for _ in range(2):
        try:
            if path.create(data):
                return True
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path.parent} cannot be written to: {error}", hint="see that the bucket is there"
            ) from None
        theirs = _read(path)
        if theirs is not None and _same(theirs, mine):
            return False
        _refuse_another(path)
        if _replace_ended(path, theirs, data):
            return True
    raise ConfigError(f"{path.parent}: another job has just begun in it", hint="use another folder")


def _replace_ended(path: ObjectPath, ended: dict[str, Any] | None, data: bytes) -> bool:
    """Put one's own lease in the place of one whose job has ended; whether no other has been faster.

    Nothing can be replaced on a condition, so of those that want to, one at a time may: who made a second object.
    """
    turn = path.with_name(f"{path.name}.turn")
    if not turn.create(data):
        theirs = _read(turn)
        if theirs is None or _age(turn, theirs) > LASTS_SECONDS:
            turn.unlink(missing_ok=True)
        return False
    try:
        found = _read(path)
        is_it = found is None or (ended is not None and _same(found, ended))
        if is_it:
            path.write_bytes(data)
        return is_it
    finally:
        turn.unlink(missing_ok=True)


def _read(path: Location) -> dict[str, Any] | None:
    """Return a lease's holder, start and end; None if there is none, or it cannot be read."""
    try:
        theirs = parse_object(read_small(path, limit_nbytes=_LONGEST_NBYTES))
        renewed, since = _modified(path) or float(theirs["renewed"]), float(theirs["since"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    kinds = {"host": str, "pid": int, "begun": int, "machine": str}
    if not all(type(theirs.get(key)) is kind for key, kind in kinds.items()):
        return None
    return {key: theirs[key] for key in kinds} | {"renewed": renewed, "since": since}


def _modified(path: Location) -> float | None:
    """Return the time a lease was written, by the clock of its file system; None if that has no clock."""
    return path.modified() if isinstance(path, ObjectPath) else path.stat().st_mtime


def _age(path: Location, theirs: dict[str, Any]) -> float:
    """Return the seconds since a lease was renewed, by one clock: those of two hosts may be hours apart."""
    probe = _own_name(path)
    now: float | None = None
    with contextlib.suppress(OSError, StoreError):  # where one may only read
        probe.write_bytes(b"")
        now = _modified(probe)
        probe.unlink()
    return max(0.0, (now or time.time()) - float(theirs["renewed"]))


def _own_name(path: Location) -> Any:
    """Return a unique name beside a lease."""
    return path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(8)}")


def _remove(path: Path, ended: dict[str, Any] | None) -> None:
    """Remove the lease of a job that has ended, but not a new one in its place."""
    aside = _own_name(path)
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
            with contextlib.suppress(OSError, StoreError):
                _renew_object(path) if isinstance(path, ObjectPath) else os.utime(path)


def _renew_object(path: ObjectPath) -> None:
    found = _read(path)
    mine = _this_process()
    if found is not None and _same(found, mine) and _is_mine(path):
        path.write_bytes(json.dumps(mine | {"since": found["since"], "renewed": time.time()}).encode())


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), **_process(os.getpid())}


def _process(pid: int) -> dict[str, Any]:
    """Return an identity of the process that differs from later ones of its number, and from other containers' ones."""
    try:
        begun = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return {"pid": pid, "begun": begun, "machine": this_machine()}
    except (OSError, ValueError, IndexError):
        return {"pid": pid, "begun": 0, "machine": ""}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("host", "pid", "begun", "machine"))


def _refuse_another(path: Location) -> None:
    """Raise if a job that still runs, and is not this one, has this lease."""
    theirs = _read(path)
    if theirs is None or _is_mine(path):
        return
    here = _this_process()
    age = _age(path, theirs)
    if here["machine"] and theirs["machine"] == here["machine"]:
        has_ended = _process(theirs["pid"])["begun"] != theirs["begun"]
    else:
        has_ended = age > LASTS_SECONDS
    if has_ended or _same(theirs, here):
        return
    name = path.name.removesuffix(LEASE_NAME).removeprefix(".")
    raise ConfigError(
        f"{path.parent / name} is in use: process {theirs['pid']} on {printable(theirs['host'], 100)} has it since "
        f"{max(age, time.time() - theirs['since']):.0f} s, and renewed its lease {age:.0f} s ago",
        hint="use another folder, or end that job; one that was killed on another host is in the way for "
        f"{LASTS_SECONDS:.0f} s",
    )


atexit.register(let_go)
