"""Temporary directories that last as long as the process that created them.

A lock marks a directory as in use. Killed processes leave their directories behind without a lock. The next process
that creates a directory removes these, even if they were created in another container.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not available here, so directories of killed processes stay
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"
_UNFINISHED = ".unfinished-"


@contextlib.contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a directory that only this user can read, and remove it on exit.

    Directories that killed processes have left are removed first.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_stale(parent, prefix)
    # Rename it after locking, because another process could otherwise treat it as stale.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{prefix}", dir=parent))
    descriptor = os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # child processes do not inherit it
    try:
        with contextlib.suppress(OSError):  # if the file system has no locks, nobody can get one
            _lock(descriptor)
        directory = unfinished.rename(parent / unfinished.name.removeprefix(_UNFINISHED))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock the file until it is closed. Raise `OSError` if another process holds the lock."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_stale(parent: Path, prefix: str) -> None:
    if fcntl is None:
        return
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # in use, or removed in the meantime
            if path.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                _lock(descriptor)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
