"""Copies of the ranks' state in this host's memory, in a directory that survives a restart of the ranks."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fullshard.config.switches import COPIES_DIR
from fullshard.core.errors import ConfigError
from fullshard.launch.scratch import scratch_directory

MEMORY = Path("/dev/shm")
_PREFIX = "fullshard-copies-"


@contextlib.contextmanager
def copies_directory() -> Iterator[dict[str, str]]:
    """Create an in-memory directory for copies. Yield the ranks' variables for it, or none if that is impossible."""
    if not os.access(MEMORY, os.W_OK):
        yield {}
        return
    with scratch_directory(_PREFIX, MEMORY) as path:
        yield {COPIES_DIR.name: str(path)}


def find_copies_directory() -> Path:
    """Return the copies directory of this rank's launcher. Raise `ConfigError` if it is missing or another user's."""
    name = COPIES_DIR.read()
    if not name:
        raise ConfigError(
            "max_lost_steps needs fullshard's launcher, which holds the copies in host memory, but this process was "
            "not started by it",
            hint=(
                f"use `fullshard launch` (or `fullshard train` or `sft` with --nproc) on a system with {MEMORY}, or "
                "remove max_lost_steps"
            ),
        )
    path = Path(name)
    if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
        raise ConfigError(f"{path} is not a directory that belongs to this user", hint="restart the launcher")
    return path
