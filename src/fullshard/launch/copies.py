"""Where copies of the ranks' state lie: in this host's memory, in a directory that outlives ranks and ends with a job.

It bears the name of the launcher's process, and is made by the first rank that has something to put there. What a
launcher that was killed has left is removed by the next one on the host.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from fullshard.config.switches import COPIES_DIR
from fullshard.core.errors import ConfigError

MEMORY = Path("/dev/shm")
_PREFIX = "fullshard-copies-"
_NAME = re.compile(re.escape(_PREFIX) + r"(\d+)-(\d+)-(\d+)")


@contextlib.contextmanager
def copies_directory() -> Iterator[dict[str, str]]:
    """Inside, ranks that find these variables may keep copies; afterwards nothing is left of them.

    Without a file system in memory, or a way to tell processes apart, there are none.
    """
    if (own := _identity(os.getpid())) is None or not MEMORY.is_dir():
        yield {}
        return
    _remove_stale()
    path = MEMORY / f"{_PREFIX}{own}"
    try:
        yield {COPIES_DIR.name: str(path)}
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_copies_directory() -> Path:
    """The directory of this rank's launcher.

    Raises:
        ConfigError: there is none, or it is somebody else's.
    """
    name = COPIES_DIR.read()
    if not name:
        raise ConfigError(
            "max_lost_steps: copies in host memory lie with the launcher, and fullshard's has not started this process",
            hint=f"use `fullshard launch`, or `train` and `sft` with --nproc, on a system with {MEMORY}; else leave it "
            "out",
        )
    path = Path(name)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if path.is_symlink() or path.stat().st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to another user", hint="remove it")
    return path


def _remove_stale() -> None:
    """Remove the directories of launchers that are gone, as far as this process can tell."""
    for path in MEMORY.glob(f"{_PREFIX}*"):
        match = _NAME.fullmatch(path.name)
        if match is None or match[1] != _namespace():
            continue
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.geteuid() and _identity(int(match[2])) != match[0].removeprefix(_PREFIX):
                shutil.rmtree(path, ignore_errors=True)


def _identity(pid: int) -> str | None:
    """What no other process of this host has: its namespace, its number there and when it began; None: it is gone."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        return f"{_namespace()}-{pid}-{began}"
    except OSError:
        return None


def _namespace() -> str:
    """Of process numbers: containers may share memory, and count their processes each for itself."""
    return str(Path("/proc/self/ns/pid").stat().st_ino)
