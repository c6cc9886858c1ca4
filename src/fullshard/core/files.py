"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_NOT_REPLACED = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)
"""What the system says where a file may be written to, but no other may take its place: its folder is not the user's,
or something is mounted over its name."""


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to in the place of `path`, which gets the content when the block ends well.

    Until then, and after an error, `path` is what it was before. What is no file of a folder is written to as it is: a
    device, a pipe, what a process has open. A file in its place would be another thing. So is a file that cannot be
    replaced.

    Args:
        path: the file in the end; its directory must exist.

    Raises:
        OSError: it cannot be written; with its name, which an error of a full disk lacks.
    """
    if path.is_dir():  # else it would be said by whoever writes, in words of its own
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if _is_no_file_of_a_folder(path) or not _made(temporary, target):
            yield path
        else:
            yield temporary
            _replace(target, temporary)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise  # of something else
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _is_no_file_of_a_folder(path: Path) -> bool:
    if not path.exists():
        return False
    while path.is_symlink():
        folder = Path(os.path.realpath(path.parent))
        if folder.is_relative_to("/proc"):  # where /dev/stdout and /dev/fd lead: a file may have no other name
            return True
        path = folder / path.readlink()
    return not path.is_file()


def _made(temporary: Path, target: Path) -> bool:
    """Whether there can be a file beside `target`; an error if that leaves nothing to write to."""
    try:
        temporary.touch(0o600 if target.exists() else 0o666)
    except OSError as error:
        if error.errno not in _NOT_REPLACED or not target.is_file():
            raise
        return False
    return True


def _replace(target: Path, temporary: Path) -> None:
    """Put what was written in the place of `target`, which keeps its mode."""
    if target.exists():
        shutil.copymode(target, temporary)
    try:
        temporary.replace(target)
    except OSError as error:
        if error.errno not in _NOT_REPLACED or not target.is_file():
            raise
        shutil.copyfile(temporary, target)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
