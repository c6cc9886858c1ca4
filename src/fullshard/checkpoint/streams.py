"""The bytes of one data file on their way: to and from a disk, or an object store. No torch here."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from fullshard.checkpoint.objects import Location, ObjectPath, asked

_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Python has no name for it
_SYNC_FILE_RANGE_WRITE = 2
_PART_NBYTES = 16 * 2**20
"""Sent at a time, and held meanwhile."""
_MAX_PARTS = 9_000
"""S3 takes 10,000 of an object."""
_RANGE_NBYTES, _MAX_RANGES = 4 * 2**20, 4
"""Read in one request, and requests at once where a file is read from front to back."""


class ByteSink(Protocol):
    """A new file that is being written."""

    def write(self, data: memoryview) -> int:
        """Append bytes; return how many were taken."""
        ...

    def start_writeback(self, start: int, nbytes: int) -> None:
        """Say that this part will not change any more."""
        ...

    def finish(self) -> None:
        """Make it survive a power loss. Only then it is there."""
        ...

    def close(self) -> None:
        """Let go of it; unless it is finished, its written part does not count."""
        ...


class ByteSource(Protocol):
    """A file that is being read."""

    def read_into(self, out: memoryview, at: int) -> int:
        """Fill the beginning of `out` with bytes from `at` on; how many there were."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


def open_to_write(path: Location, nbytes: int) -> ByteSink:
    """Create a file, which must not be there in a file system, of `nbytes` bytes in the end."""
    return ObjectSink(path, nbytes) if isinstance(path, ObjectPath) else FileSink(path)


def open_to_read(path: Location, nbytes: int) -> ByteSource:
    """Open a file of `nbytes` bytes."""
    return ObjectSource(path, nbytes) if isinstance(path, ObjectPath) else FileSource(path)


class FileSink:
    """See `ByteSink`; in a file system."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def write(self, data: memoryview) -> int:
        """See `ByteSink`; fewer than given, for example when the disk is full."""
        return self._file.write(data) or 0

    def start_writeback(self, start: int, nbytes: int) -> None:
        """Make the disk begin, so that the `fsync` at the end finds little left to do. Linux only."""
        if _SYNC_FILE_RANGE is not None:
            descriptor = self._file.fileno()
            _SYNC_FILE_RANGE(descriptor, ctypes.c_int64(start), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)

    def finish(self) -> None:
        """See `ByteSink`."""
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """See `ByteSink`."""
        self._file.close()


class FileSource:
    """See `ByteSource`; in a file system."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def read_into(self, out: memoryview, at: int) -> int:
        """See `ByteSource`."""
        return os.preadv(self._file.fileno(), [out], at)

    def close(self) -> None:
        """See `ByteSource`."""
        self._file.close()


class ObjectSink:
    """See `ByteSink`; in an object store, which is sent one part at a time."""

    def __init__(self, path: ObjectPath, nbytes: int) -> None:
        self._path = path
        part = max(_PART_NBYTES, -(-nbytes // _MAX_PARTS))
        self._file: Any = path.open_for_writing(-(-part // 2**20) * 2**20)

    def write(self, data: memoryview) -> int:
        """See `ByteSink`."""
        with self._asked():
            self._file.write(data)
        return data.nbytes

    def start_writeback(self, start: int, nbytes: int) -> None:
        """Do nothing: parts are sent as they are full."""

    def finish(self) -> None:
        """See `ByteSink`."""
        with self._asked():
            self._file.close()
            self._file.commit()
        self._file = None

    def close(self) -> None:
        """See `ByteSink`."""
        if self._file is not None:
            file, self._file = self._file, None
            file.closed = True  # or its finalizer would send the rest
            with contextlib.suppress(Exception):  # the error that led here is the one to hear of
                file.discard()

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            with asked(self._path, "written"):
                yield
        except FileNotFoundError as error:
            raise OSError(error.errno, f"there is no such bucket ({error})") from error


class ObjectSource:
    """See `ByteSource`; in an object store, which is read a few ranges ahead if it is read from front to back."""

    def __init__(self, path: ObjectPath, nbytes: int) -> None:
        self._path, self._nbytes = path, nbytes
        self._held: memoryview = memoryview(b"")
        self._start = 0
        self._ranges = 1

    def read_into(self, out: memoryview, at: int) -> int:
        """See `ByteSource`."""
        end = self._start + len(self._held)
        if not self._start <= at < end:
            self._ranges = min(2 * self._ranges, _MAX_RANGES) if at == end and at else 1
            self._held = memoryview(b"")  # never both
            self._held, self._start = self._read(at), at
        part = self._held[at - self._start :][: len(out)]
        out[: len(part)] = part
        if at + len(part) == self._start + len(self._held):
            self._held, self._start = memoryview(b""), at + len(part)
        return len(part)

    def close(self) -> None:
        """See `ByteSource`."""
        self._held = memoryview(b"")

    def _read(self, at: int) -> memoryview:
        stop = min(at + self._ranges * _RANGE_NBYTES, self._nbytes)
        ranges = [(start, min(start + _RANGE_NBYTES, stop)) for start in range(at, stop, _RANGE_NBYTES)]
        parts = self._path.read_ranges(ranges) if ranges else [b""]
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
