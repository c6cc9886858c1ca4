"""The bytes of one data file on their way: to and from a disk, or an object store. No torch here."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

from fullshard.checkpoint.objects import Location, ObjectPath, asked

_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Python has no name for it
_SYNC_FILE_RANGE_WRITE = 2
_PART_NBYTES = 16 * 2**20
"""Sent at a time, and held meanwhile."""
_MAX_PARTS = 9_000
"""S3 takes 10,000 of an object."""
_BLOCK_NBYTES, _BLOCKS = 4 * 2**20, 4
"""Read in one request, and held at once."""


def open_to_write(path: Location, nbytes: int) -> FileSink:
    """Create a file, which must not be there in a file system, of `nbytes` bytes in the end."""
    return ObjectSink(path, nbytes) if isinstance(path, ObjectPath) else FileSink(path.open("xb", buffering=0))


class FileSink:
    """A new file that is being written, in a file system."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: memoryview) -> int:
        """Append bytes; return how many were taken: fewer than given, for example, when the disk is full."""
        return self._file.write(data) or 0

    def start_writeback(self, start: int, nbytes: int) -> None:
        """Say that this part will not change any more, so that the `fsync` finds little left to do. On Linux."""
        if _SYNC_FILE_RANGE is not None:
            descriptor = self._file.fileno()
            _SYNC_FILE_RANGE(descriptor, ctypes.c_int64(start), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)

    def finish(self) -> None:
        """Make it survive a power loss. Only then it is there."""
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Let go of it; unless it is finished, its written part does not count."""
        self._file.close()


class ObjectSink(FileSink):
    """See `FileSink`; in an object store, which is sent one part at a time."""

    def __init__(self, path: ObjectPath, nbytes: int) -> None:
        self._path = path
        part = max(_PART_NBYTES, -(-nbytes // _MAX_PARTS))
        super().__init__(path.open("wb", block_size=-(-part // 2**20) * 2**20, autocommit=False))

    def write(self, data: memoryview) -> int:
        """See `FileSink`."""
        with self._asked():
            self._file.write(data)
        return data.nbytes

    def start_writeback(self, start: int, nbytes: int) -> None:
        """Do nothing: parts are sent as they are full."""

    def finish(self) -> None:
        """See `FileSink`."""
        with self._asked():
            self._file.close()
            self._file.commit()
        self._file = None

    def close(self) -> None:
        """See `FileSink`."""
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


class FileSource:
    """A file that is being read; in an object store the next block is read in the background."""

    def __init__(self, path: Location) -> None:
        self._path = path
        if isinstance(path, ObjectPath):
            options = {"cache_type": "background", "cache_options": {"maxblocks": _BLOCKS}}
            self._file = path.open("rb", block_size=_BLOCK_NBYTES, **options)
        else:
            self._file = path.open("rb", buffering=0)
        self.close = self._file.close

    def read_into(self, out: memoryview, at: int) -> int:
        """Fill the beginning of `out` with bytes from `at` on; how many there were."""
        with asked(self._path, "read") if isinstance(self._path, ObjectPath) else contextlib.nullcontext():
            self._file.seek(at)
            return int(self._file.readinto(out))
