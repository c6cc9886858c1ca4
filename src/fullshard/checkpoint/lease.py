"""One job at a time in a folder: a second one would remove or replace the checkpoints of the first.

A job that uses a folder leaves a file there that names it, and refuses to begin where another job's is in force.

    OUT/.lease.json           all of OUT is one job's: it removes old checkpoints there, or numbers new ones
    OUT/.NAME.lease.json      OUT/NAME is one job's: it replaces that

In a file system a lease is in force while its process holds a lock on the file, so it ends with the process. In an
object store it is an object that is created only if it is not there, and renewed: one that is old has ended, and the
next job creates `.lease.json.1` beside it, of which again only one can be made.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
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
"""The life of a lease in an object store without renewal: several renewals, for stores are slow at times."""
_TRIES, _TRY_AGAIN_SECONDS = 5, 0.05
"""Somebody who only looks whether a file is locked locks it for a moment."""

_HELD: dict[Location, int | ObjectPath] = {}
"""Leases of this process: the descriptor that holds the lock, or the object."""
_IDENTITY = [secrets.token_hex(8)]
_THREAD = "fullshard-lease"


@contextlib.contextmanager
def lease(directory: Location) -> Iterator[None]:
    """Hold `directory`, and what is held in it meanwhile, for this process alone. Called on one rank.

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

    Another job must not have anything in the folder to itself.
    """
    directory = directory.absolute()
    return _hold(directory / LEASE_NAME, lambda: directory.glob(".*" + LEASE_NAME + "*"))


def hold_name(path: Location) -> bool:
    """Hold the name `path` alone, as `hold_folder` does; return whether this process held neither it nor its folder."""
    path = path.absolute()
    if any(map(holds, path.parents)):
        return False
    return _hold(_of_name(path), lambda: [path.with_name(LEASE_NAME)])


def holds(directory: Location) -> bool:
    """Return whether this process has a folder to itself."""
    return directory / LEASE_NAME in _HELD


def require_free(path: Location) -> None:
    """Raise `ConfigError` if another job holds the name `path`, or the folder that it is in."""
    path = path.absolute()
    _refuse_another(_of_name(path))
    _refuse_another(path.with_name(LEASE_NAME))


def let_go(directory: Location | None = None) -> None:
    """Leave all folders and names, or those in `directory`, to others."""
    inside = None if directory is None else directory.absolute()
    for path in list(_HELD):
        if inside is None or (type(path) is type(inside) and path.is_relative_to(inside)):  # type: ignore[arg-type]
            _let_go(path)


def let_go_of(path: Location) -> None:
    """Release the name `path`, which `hold_name` gave, to other jobs."""
    _let_go(_of_name(path))


def _of_name(path: Location) -> Location:
    return path.with_name(f".{path.name}{LEASE_NAME}")


def _hold(path: Location, others: Any) -> bool:
    """Hold a lease, unless another job has that or one of the `others`; whether this process did not hold it yet."""
    if path in _HELD:
        return False
    if isinstance(path, ObjectPath):
        _HELD[path] = _take_object(path)
        at_exit(let_go)
        if not any(thread.name == _THREAD for thread in threading.enumerate()):
            threading.Thread(target=_renew, name=_THREAD, daemon=True).start()
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot prepare a directory at {cut(str(path.parent), 300)}: {error.strerror}") from None
        try:
            _HELD[path] = _take_file(path)
        except OSError as error:  # a file system without locks
            warnings.warn(f"{path.parent}: nothing keeps a second job out of it: {error}", stacklevel=5)
            return False
    try:
        for other in others():
            _refuse_another(other)
    except ConfigError:
        _let_go(path)
        raise
    return True


def _let_go(path: Location) -> None:
    held = _HELD.pop(path, None)
    if held is not None:
        with contextlib.suppress(OSError, StoreError):
            (held if isinstance(held, ObjectPath) else path).unlink()
    if isinstance(held, int):
        os.close(held)


def _refuse_another(path: Location) -> None:
    """Raise `ConfigError` if a job that still runs, and is not this one, has this lease."""
    if path in _HELD or path in _HELD.values():
        return
    if isinstance(path, ObjectPath):
        for found in _objects(path):
            if found not in _HELD.values() and _is_in_force(found):
                raise _in_use(found)
    else:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(path) from None
            except OSError:  # a file system without locks
                pass
            finally:
                os.close(descriptor)


def _in_use(path: Location) -> ConfigError:
    theirs = _read(path)
    who = f"process {theirs.get('pid')} on {printable(str(theirs.get('host')), 100)}" if theirs else "another job"
    since = theirs.get("since")
    seconds = f" since {max(0.0, time.time() - since):.0f} s" if isinstance(since, int | float) else ""
    wait = f"; one that was killed is in the way for {LASTS_SECONDS:.0f} s" if isinstance(path, ObjectPath) else ""
    name = path.name.partition(LEASE_NAME)[0].removeprefix(".")
    return ConfigError(
        f"{path.parent / name} is in use: {who} has it{seconds}", hint=f"use another folder, or end that job{wait}"
    )


def _read(path: Location) -> dict[str, Any]:
    """Return what a lease says; nothing if it is gone, or no lease."""
    with contextlib.suppress(OSError, ValueError):
        return parse_object(read_small(path, limit_nbytes=_LONGEST_NBYTES))
    return {}


def _this_job() -> dict[str, Any]:
    process = {"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid())}
    return process | {"since": time.time(), "id": _IDENTITY[0]}


def _born(pid: int) -> str:
    """Return what tells a process from others of its number, here and elsewhere; empty if the system does not say."""
    with contextlib.suppress(OSError, IndexError):
        return f"{this_machine()} {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    return ""


# -- files --------------------------------------------------------------------------------------------------------


def _take_file(path: Path) -> int:
    """Return the descriptor that holds the lock on a lease. Raises `OSError` if files cannot be locked there."""
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):  # no job has made that
                path.unlink()
            elif path.exists() and os.path.samestat(status, path.stat()):  # else it was let go meanwhile
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps(_this_job()).encode())
                return descriptor
        except BlockingIOError:
            time.sleep(_TRY_AGAIN_SECONDS)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise _in_use(path)


def _forget() -> None:
    """Leave the leases of the parent to it, in a process that it has forked."""
    for held in _HELD.values():
        if isinstance(held, int):
            os.close(held)
    _HELD.clear()
    _IDENTITY[0] = secrets.token_hex(8)


# -- objects ------------------------------------------------------------------------------------------------------


def _take_object(path: ObjectPath) -> ObjectPath:
    """Return the object that is this process's lease."""
    for _ in range(_TRIES):
        there = _objects(path)
        for found in there:
            if _is_in_force(found):
                raise _in_use(found)
        own = path.with_name(f"{path.name}.{_number(there[-1]) + 1}") if there else path
        try:
            is_made = own.create(json.dumps(_this_job() | {"renewed": time.time()}).encode())
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path.parent} cannot be written to: {error}", hint="see that the bucket is there"
            ) from None
        if is_made:
            for found in _objects(path):
                if found in there:
                    found.unlink(missing_ok=True)
                elif found != own and _is_in_force(found):  # made by a job that had seen another state
                    own.unlink(missing_ok=True)
                    raise _in_use(found)
            return own
    raise ConfigError(f"{path.parent}: another job has just begun in it", hint="use another folder")


def _objects(path: ObjectPath) -> list[ObjectPath]:
    """Return the objects of a lease, the one that counts last."""
    beside = [each for each in path.parent.iterdir() if each.name.startswith(path.name)]
    return sorted((each for each in beside if _number(each) >= 0), key=_number)


def _number(path: ObjectPath) -> int:
    digits = path.name.rpartition(LEASE_NAME)[2].removeprefix(".") or "0"
    return int(digits) if digits.isdecimal() else -1


def _is_in_force(path: ObjectPath) -> bool:
    """Return whether the process of a lease is alive, or, of another host, has renewed it lately.

    That is told by one clock: those of two hosts may be hours apart.
    """
    theirs, probe, now = _read(path), path.with_name(f"{path.name}.probe-{secrets.token_hex(8)}"), time.time()
    if theirs.get("id") == _IDENTITY[0]:  # this process's own, which a store did not remove when it was asked
        return False
    try:
        if str(theirs.get("born")).startswith(this_machine()):
            return _born(int(theirs["pid"])) == str(theirs["born"])
        written = path.modified() or float(theirs["renewed"])
    except (OSError, ValueError, KeyError, TypeError):  # let go meanwhile, or no lease
        return False
    with contextlib.suppress(OSError, StoreError):  # where one may only read
        probe.write_bytes(b"")
        now = probe.modified() or now
        probe.unlink()
    return now - written <= LASTS_SECONDS


def _renew() -> None:
    while True:
        time.sleep(RENEWED_EVERY_SECONDS)
        for own in [held for held in list(_HELD.values()) if isinstance(held, ObjectPath)]:
            with contextlib.suppress(OSError, StoreError):
                if (mine := _read(own)) and own in _HELD.values():  # it may have been let go meanwhile
                    own.write_bytes(json.dumps(mine | {"renewed": time.time()}).encode())


atexit.register(let_go)
os.register_at_fork(after_in_child=_forget)
