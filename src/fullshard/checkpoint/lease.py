"""Let only one job use a folder at a time, because a second job could remove or replace the first one's checkpoints.

    OUT/.lease.json           one job uses all of OUT: it removes old checkpoints there, or numbers new ones
    OUT/.NAME.lease.json      one job uses OUT/NAME, which it replaces

In a file system, a lease is valid while its process holds a lock on the file, so it ends with the process. In an object
store, each job writes its own lease (`.lease.json.ID`), renews it, and looks for leases of other jobs. A lease that is
no longer renewed has expired. If two jobs start at the same time, at least the later one sees the lease of the other.
"""

import atexit
import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fullshard.checkpoint.objects import Location, ObjectPath, at_exit, read_small
from fullshard.checkpoint.storage import unheld
from fullshard.core.errors import ConfigError, StoreError, printable, shortened
from fullshard.core.files import parse_object
from fullshard.core.process import stat_of, this_machine

LEASE_NAME = ".lease.json"
_LONGEST_NBYTES = 1 << 16
"""A longer file is not a lease."""
RENEWED_EVERY_SECONDS = 10.0
LASTS_SECONDS = 60.0
"""How long a lease in an object store is watched. This allows several renewals, because stores can be slow."""
_TRIES, _TRY_AGAIN_SECONDS = 5, 0.05
"""Retries are needed because a process that only checks whether a file is locked locks it briefly."""

_HELD: dict[Location, int | ObjectPath] = {}
"""Leases of this process, each with the descriptor that holds the lock, or with its object."""


@contextlib.contextmanager
def lease(directory: Location) -> Iterator[None]:
    """Reserve `directory` and everything in it while the context is active. Only one rank should enter it.

    Raise `ConfigError` if another job has reserved it, or if no lease can be created. Leases inside it end with it.
    """
    with contextlib.ExitStack() as after:
        if hold_folder(directory):
            after.callback(let_go, directory)
        yield


def hold_folder(directory: Location) -> bool:
    """Reserve a folder until `let_go` or the end of this process. Return False if this process already holds it."""
    directory = directory.absolute()
    return _hold(directory / LEASE_NAME, lambda: directory.glob(".*" + LEASE_NAME + "*"))


def hold_name(path: Location) -> bool:
    """Reserve `path`, but not its folder, until `let_go`. Return False if this process already holds one of them."""
    path = path.absolute()
    if any(holds(parent) or (parent.name and _of_name(parent) in _HELD) for parent in path.parents):
        return False
    return _hold(_of_name(path), lambda: [path.with_name(LEASE_NAME)])


def holds(directory: Location) -> bool:
    """Return whether this process has reserved a folder."""
    return directory / LEASE_NAME in _HELD


def require_free(path: Location) -> None:
    """Raise `ConfigError` if another job has reserved `path` or the folder that contains it."""
    path = path.absolute()
    _refuse_another(_of_name(path))
    _refuse_another(path.with_name(LEASE_NAME))


def let_go(directory: Location | None = None) -> None:
    """Release all folders and paths in `directory` that this process has reserved, or all of them if it is None."""
    inside = None if directory is None else directory.absolute()
    for path in list(_HELD):
        if inside is None or path.is_relative_to(inside):
            _let_go(path)


def let_go_of(path: Location) -> None:
    """Release `path`, which `hold_name` has reserved."""
    _let_go(_of_name(path))


def _of_name(path: Location) -> Location:
    return path.with_name(f".{path.name}{LEASE_NAME}")


def _hold(path: Location, others: Callable[[], Iterable[Location]]) -> bool:
    """Take the lease `path`. Raise `ConfigError` if another job holds this lease or one of `others`."""
    # False means that this process already held the lease, or that the file system does not support locks.
    if path in _HELD:
        return False
    if isinstance(path, ObjectPath):
        own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            own.write_bytes(_new())
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path.parent} cannot be written to: {error}", hint="check that the bucket exists"
            ) from None
        _HELD[path] = own
        at_exit(let_go)
        threading.Thread(target=_renew, args=(path, own), daemon=True).start()
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create a directory at {shortened(str(path.parent), 300)}: {error.strerror}"
            ) from None
        try:
            _HELD[path] = _take_file(path)
        except OSError as error:  # the file system does not support locks
            warnings.warn(f"{path.parent} cannot be locked, so a second job could use it: {error}", stacklevel=5)
            return False
    try:
        for other in (path, *others()):
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
    """Raise `ConfigError` if another job that is still running holds this lease."""
    if isinstance(path, ObjectPath):
        for found in path.parent.iterdir():
            if found.name.startswith(path.name) and found not in _HELD.values():
                _refuse_living(found)
    elif path not in _HELD:
        with unheld(path, fcntl.LOCK_SH) as is_unheld:
            if is_unheld is False:
                raise _in_use(path)


def _in_use(path: Location) -> ConfigError:
    theirs = _read(path)
    who = f"process {theirs.get('pid')} on {printable(str(theirs.get('host')), 100)}" if theirs else "another job"
    since = theirs.get("since")
    seconds = f" {max(0.0, time.time() - since):.0f} s ago" if isinstance(since, int | float) else ""
    name = path.name.partition(LEASE_NAME)[0].removeprefix(".")
    return ConfigError(
        f"{path.parent / name} is in use: {who} reserved it{seconds}", hint="use another folder, or end that job"
    )


def _read(path: Location) -> dict[str, Any]:
    """Return the contents of a lease. Return an empty dict if the file no longer exists or is not a lease."""
    with contextlib.suppress(OSError, ValueError):
        return parse_object(read_small(path, limit_nbytes=_LONGEST_NBYTES))
    return {}


def _new() -> bytes:
    """Return the contents of a new lease for this process."""
    process = {"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid())}
    return json.dumps(process | {"since": time.time()}).encode()


def _born(pid: Any) -> str:
    """Return an id that no other process with this pid has, on any host, or an empty string if it is unknown."""
    with contextlib.suppress(OSError, IndexError):
        return f"{this_machine()} {stat_of(pid)[19]}"
    return ""


def _take_file(path: Path) -> int:
    """Lock a lease file and return its descriptor. Raise `ConfigError` if another process has locked the file."""
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                is_there = os.path.samestat(os.fstat(descriptor), path.stat())
            except FileNotFoundError:
                is_there = False  # it was released in the meantime
            if is_there:
                os.ftruncate(descriptor, 0)
                os.write(descriptor, _new())
                return descriptor
        except BlockingIOError:
            time.sleep(_TRY_AGAIN_SECONDS)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise _in_use(path)


def _refuse_living(path: ObjectPath) -> None:
    """Raise `ConfigError` if the process that wrote this lease is alive; otherwise remove the lease."""
    # A process on this host is identified by its pid. A process on another host is alive if it renews the lease.
    begin, own = time.monotonic(), _born(os.getpid())
    first = found = _read(path)
    pid, born = first.get("pid"), str(first.get("born"))
    if own and born.rpartition(" ")[0] == own.rpartition(" ")[0]:
        # A lease of this process itself is one that the store failed to remove.
        if (pid, born) != (os.getpid(), own) and _born(pid) == born:
            raise _in_use(path)
        found = {}
    while first and found == first and time.monotonic() - begin < LASTS_SECONDS:
        time.sleep(min(1.0, RENEWED_EVERY_SECONDS))
        found = _read(path)
    if found not in (first, {}):
        raise _in_use(path)
    with contextlib.suppress(StoreError):
        path.unlink(missing_ok=True)


def _renew(path: ObjectPath, own: ObjectPath) -> None:
    while _HELD.get(path) is own:
        time.sleep(RENEWED_EVERY_SECONDS)
        with contextlib.suppress(OSError, StoreError):
            if (mine := _read(own)) and _HELD.get(path) is own:  # it may have been released in the meantime
                own.write_bytes(json.dumps(mine | {"renewed": time.time()}).encode())


def _forget() -> None:
    """Discard the leases that a forked process inherited from its parent. They remain valid for the parent."""
    for held in _HELD.values():
        if isinstance(held, int):
            os.close(held)
    _HELD.clear()


atexit.register(let_go)
os.register_at_fork(after_in_child=_forget)
