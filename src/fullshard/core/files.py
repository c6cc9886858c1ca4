"""Reads small files with limits on their size, and writes files atomically.

Other users may be able to write to the folders of these files. All code therefore reads them through this module, which
never blocks on a pipe or device and never reads more, or more deeply nested data, than expected. Reading raises
`OSError` if there is no regular file, and `ValueError` if the text is not UTF-8 or not the expected JSON.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from fullshard.core.sizes import GIB, MIB

SMALL_NBYTES = 16 * MIB
"""The maximum size of a small file, unless its reader sets another limit."""

MAX_DEPTH = 200
"""The maximum nesting depth of JSON lists and objects, which is also pydantic's limit."""

_NOT_REPLACED = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)
"""Errors for a writable file that cannot be replaced: its folder is another user's, or its name is a mount point."""


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and move the file to `path` if the block ends without an error.

    Until then, and after an error, `path` is unchanged. But if `path` is a device, a pipe, or a file that a process has
    open, or if it cannot be replaced, the block writes to it directly. An `OSError` always names `path`, even for a
    full disk.
    """
    if path.is_dir():  # otherwise, the writer would raise a less clear error
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
            raise  # the error is about another file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _is_no_file_of_a_folder(path: Path) -> bool:
    if not path.exists():
        return False
    while path.is_symlink():
        folder = Path(os.path.realpath(path.parent))
        if folder.is_relative_to("/proc"):  # the target of /dev/stdout or /dev/fd, which may have no other name
            return True
        path = folder / path.readlink()
    return not path.is_file()


def _made(temporary: Path, target: Path) -> bool:
    """Create `temporary` and return True. Return False if only `target` can be written; raise if neither can be."""
    try:
        temporary.touch(0o600 if target.exists() else 0o666)
    except OSError as error:
        if error.errno not in _NOT_REPLACED or not target.is_file():
            raise
        return False
    return True


def _replace(target: Path, temporary: Path) -> None:
    """Replace `target` with the temporary file, but keep the mode of `target`."""
    if target.exists():
        shutil.copymode(target, temporary)
    try:
        temporary.replace(target)
    except OSError as error:
        if error.errno not in _NOT_REPLACED or not target.is_file():
            raise
        shutil.copyfile(temporary, target)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def open_regular(path: Path, *, limit_nbytes: int | None = None) -> BinaryIO:
    """Open a regular file of at most `limit_nbytes` for reading, without blocking."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, got a directory, a pipe or a device", str(path))
        if limit_nbytes is not None and status.st_size > limit_nbytes:
            raise _too_large(path, limit_nbytes, f"{status.st_size:,}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, *, limit_nbytes: int = SMALL_NBYTES) -> bytes:
    """Return the contents of a small regular file."""
    with open_regular(path, limit_nbytes=limit_nbytes) as file:
        asked = min(limit_nbytes, max(os.fstat(file.fileno()).st_size, MIB)) + 1  # this much memory is allocated
        data = file.read(asked)
    if len(data) == asked:  # the file has grown, or its file system does not report its size
        raise _too_large(path, limit_nbytes, "more")
    return data


def read_text(path: Path, *, limit_nbytes: int = SMALL_NBYTES) -> str:
    """Return the contents of a small text file."""
    return read_bytes(path, limit_nbytes=limit_nbytes).decode("utf-8")


def read_object(path: Path, *, limit_nbytes: int = SMALL_NBYTES) -> dict[str, Any]:
    """Return the object that a small JSON file contains."""
    return parse_object(read_text(path, limit_nbytes=limit_nbytes))


def read_lines(path: Path, *, limit_nbytes: int = GIB, longest: int = MIB) -> Iterator[str]:
    """Yield the lines of a text file with their line ends. Lines longer than `longest` bytes are split."""
    with open_regular(path, limit_nbytes=limit_nbytes) as file:
        for line in iter(lambda: file.readline(longest), b""):
            yield line.decode("utf-8", "replace")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Unpaired UTF-16 surrogates, which files cannot contain, become U+FFFD."""
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    if text.count("[") + text.count("{") > MAX_DEPTH:
        brackets = re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*"|[^][{}"]+', "", text, flags=re.DOTALL)
        if max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0) > MAX_DEPTH:
            raise ValueError(f"the JSON text is nested deeper than {MAX_DEPTH} levels")
    return json.loads(_LONE_HALF.sub(lambda match: r"\ufffd" if match["half"] else match[0], text))


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the object that the JSON text represents."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got a {type(value).__name__}")
    return value


_LONE_HALF = re.compile(r"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(?P<half>u[dD][89a-fA-F]\w\w)|.)", re.DOTALL)


def _too_large(path: Path, limit_nbytes: int, got: str) -> OSError:
    return OSError(errno.EFBIG, f"the file has {got} bytes, expected at most {limit_nbytes:,}", str(path))
