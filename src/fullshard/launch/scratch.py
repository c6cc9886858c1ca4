"""Temporary directories that last as long as the process that created them.

A lock marks a directory as in use. Killed processes leave their directories behind without a lock. The next process
that creates a directory removes these, even if they were created in another container.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".lock"
_UNFINISHED = ".unfinished-"


@contextlib.contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a private directory, and remove it on exit. First remove directories left by killed processes."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _remove_stale(parent, prefix)
    # Rename it after locking, because another process could otherwise treat it as stale.
    unfinished = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{prefix}", dir=parent))
    descriptor = os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # child processes do not inherit it
    try:
        with contextlib.suppress(OSError):  # if the file system has no locks, nobody can get one
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory = unfinished.rename(parent / unfinished.name.removeprefix(_UNFINISHED))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def _remove_stale(parent: Path, prefix: str) -> None:
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # in use, or removed in the meantime
            if path.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
