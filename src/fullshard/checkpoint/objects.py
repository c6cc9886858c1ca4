"""Paths in an object store (S3, GCS, Azure, the Hugging Face hub, memory).

They are pure paths with the methods of `Path` that this package uses, implemented with fsspec. If a store does not
answer or denies access, these methods raise a `StoreError`. They never treat this as a missing file, because then
existing data could be overwritten, and a run that finds no checkpoint would start from scratch.
"""

import contextlib
import errno
import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

from fullshard.core.errors import ConfigError, FullshardError, MissingExtraError, StoreError, shortened
from fullshard.core.files import SMALL_NBYTES, read_bytes
from fullshard.core.paths import local_path

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)  # pathlib collapses two slashes to one
_NO_STORES = ("file", "local", "http", "https")
_MISSING = (FileNotFoundError, NotADirectoryError)


class ObjectPath(PurePosixPath):
    """A path in an object store. It is a directory as long as an object exists whose name starts with it."""

    __slots__ = ()

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    @property
    def parent(self) -> Self:
        """Return the parent directory. The parent of a bucket is the bucket itself."""
        return super().parent if len(self.parts) > 2 else self

    def absolute(self) -> Self:
        """Return the path unchanged, because an object store has only absolute paths."""
        return self

    resolve = absolute

    def size(self) -> int:
        """Return the size of an object in bytes. Raise `FileNotFoundError` if it does not exist."""
        info = self._info()
        if info.get("type") != "file":
            raise FileNotFoundError(errno.ENOENT, "the object does not exist", str(self))
        return int(info["size"] or 0)

    def exists(self) -> bool:
        """Return whether this path is an object or a directory of objects."""
        return bool(self._info())

    def is_file(self) -> bool:
        """Return whether this path is an object."""
        return self._info().get("type") == "file"

    def is_dir(self) -> bool:
        """Return whether this path is a directory of objects."""
        return self._info().get("type") == "directory"

    def iterdir(self) -> Iterator[Self]:
        """Return the direct children, sorted by name."""
        found: Any = []
        with contextlib.suppress(*_MISSING):
            found = self._ask("listed", "ls", detail=False)
        names = {entry.rstrip("/").rpartition("/")[2] for entry in found if not self._is_it(entry)}
        return iter(sorted(self / name for name in names if name))

    def glob(self, pattern: str) -> Iterator[Self]:
        """Return the direct children that match `pattern`."""
        return (path for path in self.iterdir() if path.match(pattern))

    def beneath(self) -> dict[str, int]:
        """Return the sizes of all objects in this directory, at any depth, keyed by their relative paths."""
        found: Any = {}
        with contextlib.suppress(*_MISSING):
            found = self._ask("listed", "find", detail=True)
        depth = len(self._key().split("/"))
        entries = {key: info for key, info in found.items() if not self._is_it(key) and not key.endswith("/")}
        return {"/".join(key.strip("/").split("/")[depth:]): int(info["size"] or 0) for key, info in entries.items()}

    def read_bytes(self) -> bytes:
        """Return the contents of an object. Raise `FileNotFoundError` if it does not exist."""
        return bytes(self._ask("read", "cat_file"))

    def write_bytes(self, data: bytes) -> None:
        """Create or replace an object. A concurrent reader gets either the old or the new contents."""
        self._ask("written", "pipe_file", data)

    def create(self, data: bytes) -> bool:
        """Create an object unless it exists, and return whether it was created. If several jobs try, one succeeds."""
        with asked(self, "written"):
            try:
                self._files().pipe_file(str(self), data, mode="create")
            except FileExistsError:
                # If a lost response made the client repeat the request, the repeated one finds the object of the first.
                return self.read_bytes() == data
            except (NotImplementedError, TypeError, ValueError):
                if self.is_file():
                    return False
                self._files().pipe_file(str(self), data)
        return True

    def open(self, mode: str, **options: Any) -> Any:
        """Open an object as an fsspec file. A new object exists only after the file has been closed and committed."""
        return self._ask("written" if mode == "wb" else "read", "open", mode, **options)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove an object."""
        with contextlib.suppress(*(_MISSING if missing_ok else ())):
            self._ask("removed", "rm_file")

    def remove_beneath(self, names: Sequence[str]) -> None:
        """Remove objects in this directory. `names` are relative paths, as returned by `beneath`."""
        if names:
            with asked(self, "removed"), contextlib.suppress(*_MISSING):
                self._files().rm([str(self / name) for name in names])

    def _info(self) -> dict[str, Any]:
        """Return the store's information about this path, or an empty dict if it does not exist."""
        try:
            return dict(self._ask("looked up", "info"))
        except _MISSING:
            return {}

    def _key(self) -> str:
        return str(self._files()._strip_protocol(str(self))).strip("/")

    def _is_it(self, key: str) -> bool:
        """Return whether a listed object is the path itself, which tools may create as an empty object."""
        return key.strip("/") == self._key()

    def _ask(self, what: str, method: str, *arguments: Any, **options: Any) -> Any:
        with asked(self, what):
            return getattr(self._files(), method)(str(self), *arguments, **options)

    def _files(self) -> Any:
        return _file_system(*self.parts[:2], os.getpid())


Location = Path | ObjectPath
"""The location of a checkpoint, in a file system of this host or in an object store."""


def read_small(path: Location, *, limit_nbytes: int = SMALL_NBYTES) -> bytes:
    """Return the contents of a small file or object. Raise `OSError` if it has more than `limit_nbytes` bytes."""
    if not isinstance(path, ObjectPath):
        return read_bytes(path, limit_nbytes=limit_nbytes)
    if (nbytes := path.size()) > limit_nbytes:
        raise OSError(errno.EFBIG, f"the object has {nbytes:,} bytes, expected at most {limit_nbytes:,}", str(path))
    return path.read_bytes()


@contextlib.contextmanager
def asked(path: ObjectPath, what: str) -> Iterator[None]:
    """Convert errors of the store's client to `StoreError`, except errors for missing or already existing objects."""
    try:
        yield
    except (*_MISSING, FileExistsError, FullshardError):
        raise
    except Exception as error:  # each client has its own error types
        raise StoreError(
            f"{path} cannot be {what}: {type(error).__name__}: {shortened(str(error), 500)}",
            hint=(
                "check the address, the credentials and the store; the store's client has already retried several times"
            ),
        ) from error


def location(written: str | os.PathLike[str]) -> Location:
    """Convert a string or path to the location of a checkpoint: a local path, or a URL in an object store."""
    if isinstance(written, ObjectPath):
        return written
    match = _URL.match(os.fspath(written))
    if match is None or match[1].lower() in _NO_STORES:
        return local_path(written)
    scheme, names = match[1].lower(), [name for name in match[2].split("/") if name]
    if not names or {".", ".."} & set(names):
        raise ConfigError(
            f"{os.fspath(written)!r} does not name a directory in a bucket, expected {scheme}://BUCKET/NAME"
        )
    path = ObjectPath(f"{scheme}:", *names)
    with asked(path, "opened"):
        path._files()
    return path


@functools.lru_cache(maxsize=32)
def _file_system(scheme: str, bucket: str, process: int) -> Any:  # a forked process cannot use its parent's client
    import fsspec

    url = f"{scheme}//{bucket}"
    try:
        # Without the cache, files that another host has just written are visible.
        return fsspec.core.url_to_fs(url, use_listings_cache=False)[0]
    except ImportError as error:
        if scheme in ("s3:", "s3a:"):
            raise MissingExtraError("s3fs", extra="s3", purpose=url) from None
        raise ConfigError(f"{url}: {error}", hint="install the package, or use a path") from None
    except ValueError as error:
        raise ConfigError(
            f"{url}: {error}", hint="use a scheme that fsspec supports, such as s3, gs, az, hf or memory"
        ) from None


@functools.cache
def at_exit(function: Callable[[], None]) -> None:
    """Register a function to be called once when the process ends, while stores can still be accessed.

    Several functions are called in reverse order. When Python ends, it first shuts down executors, which clients need
    to look up host names. Only then does it wait for threads and call the functions registered with `atexit`. This
    function therefore registers callbacks where executors register theirs, so that they are called before executors
    shut down.
    """
    threading._register_atexit(function)  # type: ignore[attr-defined]


def sizes_in(directory: Location, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of the named files that exist in a directory, with a single request to an object store."""
    if isinstance(directory, ObjectPath):
        there = directory.beneath()
        return {name: there[name] for name in names if name in there}
    return {name: (directory / name).stat().st_size for name in names if (directory / name).exists()}


def entries_of(directory: Location) -> list[Location]:
    """Return the direct entries of a directory, sorted by name."""
    return sorted(directory.iterdir(), key=lambda entry: entry.name)


def on_this_host(path: Location) -> Path:
    """Convert a location to a local path. Raise `ConfigError` if it is in an object store."""
    return local_path(str(path)) if isinstance(path, ObjectPath) else path
