"""Write files of tensors, and read them with verification. This module does not import torch.

The files follow the safetensors layout (8 bytes of header length, a JSON header, the tensors). The safetensors package
lacks two features: writing with only one tensor in memory at a time, and a checksum for each chunk.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from fullshard.checkpoint.format import CHUNK_NBYTES, DTYPES, NAMES, FileRecord
from fullshard.checkpoint.objects import Location, ObjectPath, asked
from fullshard.core.dtypes import itemsize
from fullshard.core.errors import CheckpointError
from fullshard.core.files import parse_object
from fullshard.core.progress import advance

Bytes = NDArray[np.uint8]
"""A 1-D array of bytes. Callers of this module convert tensors to it."""

_HEADER_ALIGNMENT = 8
MAX_HEADER_NBYTES = 100 * 2**20
"""The largest header of a data file. A header has some hundred bytes per tensor."""
_BLOCK_NBYTES = 256 * 2**10
"""Bytes written or read at a time: few enough to stay in a core's cache until the checksum is computed."""
_SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Python does not expose it
_SYNC_FILE_RANGE_WRITE = 2
_PART_NBYTES = 16 * 2**20
"""Size of the parts that are sent. One part is held in memory."""
_MAX_PARTS = 9_000
"""The largest number of parts per object. S3 accepts 10,000."""
_REQUEST_NBYTES, _REQUESTS = 4 * 2**20, 4
"""Size of a read request, and the number of requests held in memory."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The description of a tensor in a file: its name, its dtype (torch's name), and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor's elements in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


def storage_order(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return `entries` in a file's order: widest dtypes first, for alignment; within a dtype, single elements first."""
    return sorted(entries, key=lambda entry: order_key(entry.dtype, entry.shape))


def order_key(dtype: str, shape: tuple[int, ...]) -> tuple[int, bool]:
    """Return the sort key that determines the position of a tensor in a file."""
    return -itemsize(dtype), math.prod(shape) > 1


def open_to_write(path: Location, nbytes: int) -> FileSink | ObjectSink:
    """Create a file that will have `nbytes` bytes. In a file system, the file must not exist yet."""
    return ObjectSink(path, nbytes) if isinstance(path, ObjectPath) else FileSink(path, "xb")


class FileSink(io.FileIO):
    """A new file in a file system. Its contents are valid only after `finish`."""

    def start_writeback(self, start: int, nbytes: int) -> None:
        """Start writing a part of the file to disk, so that `fsync` takes less time. On Linux only."""
        if _SYNC_FILE_RANGE is not None:
            descriptor = self.fileno()
            _SYNC_FILE_RANGE(descriptor, ctypes.c_int64(start), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)

    def finish(self) -> None:
        """Flush the file to disk so that it survives a power loss, and close it."""
        os.fsync(self.fileno())
        self.close()


class ObjectSink:
    """A new file in an object store, which is sent in parts. See `FileSink`."""

    def __init__(self, path: ObjectPath, nbytes: int) -> None:
        part = max(_PART_NBYTES, -(-nbytes // _MAX_PARTS))
        self._path = path
        self._file: Any = path.open("wb", block_size=-(-part // 2**20) * 2**20, autocommit=False)

    def write(self, data: memoryview) -> int:
        """Append bytes to the object."""
        with asked(self._path, "written"):
            self._file.write(data)
        return data.nbytes

    def start_writeback(self, start: int, nbytes: int) -> None:
        """Do nothing, because parts are sent as soon as they are full."""

    def finish(self) -> None:
        """Send the remaining bytes and commit the object, so that it exists."""
        with asked(self._path, "written"):
            self._file.close()
            self._file.commit()
        self._file = None

    def close(self) -> None:
        """Close the object. Discard it if `finish` was not called before."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(AttributeError):  # a file in memory, which does not send anything
                file.closed = True  # otherwise its finalizer would send the rest
            with contextlib.suppress(Exception):  # the caller is raising the error that led here
                file.discard()


def write_tensor_file(
    path: Location,
    entries: Sequence[TensorEntry],
    metadata: Mapping[str, str],
    parts: Callable[[TensorEntry], Iterable[Bytes]],
) -> FileRecord:
    """Write a data file safely from `parts` of each entry, in the order of `storage_order`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in storage_order(entries):
        place = [offset, offset := offset + entry.nbytes]
        header[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with contextlib.closing(open_to_write(path, 8 + len(text) + offset)) as file:
        writer = _ChunkWriter(file)
        writer.append(np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8))
        for entry in storage_order(entries):
            before = writer.nbytes
            for part in parts(entry):
                writer.append(part)
                advance(part.nbytes)
            if (nbytes := writer.nbytes - before) != entry.nbytes:
                raise CheckpointError(f"got tensor {entry.name!r} with {nbytes} bytes, expected {entry.nbytes}")
        file.finish()
    return FileRecord(nbytes=writer.nbytes, crc32c=tuple(writer.crc32c))


class _ChunkWriter:
    """Appends bytes to a file, and computes one checksum per chunk. Chunks are counted from the start of the file."""

    def __init__(self, file: FileSink | ObjectSink) -> None:
        self._file, self.nbytes = file, 0
        self.crc32c: list[int] = []

    def append(self, data: Bytes) -> None:
        end = self.nbytes + data.nbytes
        while self.nbytes < end:
            filled = self.nbytes % CHUNK_NBYTES
            part = data[data.nbytes - (end - self.nbytes) :][: min(_BLOCK_NBYTES, CHUNK_NBYTES - filled)]
            written = 0
            while written < part.nbytes:  # an unbuffered write may stop early, for example when the disk is full
                written += self._file.write(part[written:].data)
            # Done after the write, which loads the block into the cache; this halves the cost of the checksum.
            before = self.crc32c.pop() if filled else 0
            self.crc32c.append(google_crc32c.extend(before, part))
            self.nbytes += part.nbytes
            if self.nbytes % CHUNK_NBYTES == 0:
                self._file.start_writeback(self.nbytes - CHUNK_NBYTES, CHUNK_NBYTES)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor in a file, in bytes from its start. `dtype` is the name in safetensors."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFileReader(contextlib.AbstractContextManager["TensorFileReader"]):
    """Reads parts of one data file. Raises `CheckpointError` for bytes that do not match their checksums."""

    def __init__(self, path: Location, record: FileRecord, *, chunk_nbytes: int, save_id: str) -> None:
        self.path = path
        self._record, self._chunk_nbytes, self._save_id = record, chunk_nbytes, save_id
        self._cached = -1
        self._kept: Bytes = np.empty(0, dtype=np.uint8)
        if problem := size_problem(path, record, chunk_nbytes=chunk_nbytes):
            raise CheckpointError(problem)
        if isinstance(path, ObjectPath):  # blocks are fetched ahead in the background
            options = {"cache_type": "background", "cache_options": {"maxblocks": _REQUESTS}}
            self._file = path.open("rb", block_size=_REQUEST_NBYTES, **options)
        else:
            self._file = path.open("rb", buffering=0)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def find(self, name: str, dtype: str, numel: int) -> StoredTensor:
        """Return the location of a tensor. Raise `CheckpointError` unless it has this dtype and number of elements."""
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.path} does not hold {name!r}, which the manifest lists")
        code, nbytes = DTYPES[dtype], numel * itemsize(dtype)
        if stored.dtype != code or stored.stop - stored.start != nbytes:
            raise CheckpointError(
                f"{self.path} holds {name!r} as {stored.dtype} in {stored.stop - stored.start} bytes, expected {code} "
                f"in {nbytes}"
            )
        return stored

    def read_into(self, start: int, out: Bytes) -> None:
        """Fill `out` with bytes of the file from `start`. Raise `CheckpointError` if they are damaged."""
        if start + out.nbytes > self._record.nbytes:
            end = f"{self.path} ends at byte {self._record.nbytes}"
            raise CheckpointError(f"{end}, but {out.nbytes} bytes were requested from byte {start}")
        filled = 0
        while filled < out.nbytes:
            index, offset = divmod(start + filled, self._chunk_nbytes)
            rest = out[filled:]
            if offset == 0 and index != self._cached and self._size(index) <= rest.nbytes:
                part = rest[: self._size(index)]
                self._read_chunk(index, part)
            else:
                chunk = self._chunk(index)[offset : offset + rest.nbytes]
                part = rest[: chunk.nbytes]
                part[:] = chunk
            filled += part.nbytes

    def damaged_chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges of all chunks that do not match their checksums."""
        scratch = np.empty(min(self._chunk_nbytes, self._record.nbytes), dtype=np.uint8)
        for index, expected in enumerate(self._record.crc32c):
            if self._fill(index, scratch[: self._size(index)]) != expected:
                yield index * self._chunk_nbytes, index * self._chunk_nbytes + self._size(index)

    def _size(self, index: int) -> int:
        """Return the size of chunk `index` in bytes."""
        return min(self._chunk_nbytes, self._record.nbytes - index * self._chunk_nbytes)

    def _chunk(self, index: int) -> Bytes:
        """Return chunk `index`, verified. The last chunk is cached, because it may contain several small tensors."""
        if self._cached != index:
            if self._kept.nbytes == 0:
                self._kept = np.empty(min(self._chunk_nbytes, self._record.nbytes), dtype=np.uint8)
            self._cached = -1
            self._read_chunk(index, self._kept[: self._size(index)])
            self._cached = index
        return self._kept[: self._size(index)]

    def _read_chunk(self, index: int, out: Bytes) -> None:
        """Fill `out` with the complete chunk `index`, and raise `CheckpointError` if its checksum does not match."""
        start, got, expected = index * self._chunk_nbytes, self._fill(index, out), self._record.crc32c[index]
        if got != expected:
            raise CheckpointError(
                f"{self.path} is damaged between bytes {start} and {start + self._size(index)}: crc32c is {got:08x}, "
                f"expected {expected:08x}",
                hint="use an older checkpoint; latest_checkpoint(parent, thorough=True) finds the newest intact one",
            )

    def _fill(self, index: int, out: Bytes) -> int:
        """Fill `out` with chunk `index`, one block at a time, and return the checksum of the bytes."""
        filled = crc32c = 0
        while filled < out.nbytes:
            block = out[filled : filled + _BLOCK_NBYTES]
            nbytes = self._read_some(block.data, index * self._chunk_nbytes + filled)
            crc32c = google_crc32c.extend(crc32c, block[:nbytes])
            filled += nbytes
        return crc32c

    def _read_some(self, out: memoryview, at: int) -> int:
        """Read at least one byte into `out`, and return how many were read, or raise `CheckpointError`."""
        try:
            with asked(self.path, "read") if isinstance(self.path, ObjectPath) else contextlib.nullcontext():
                self._file.seek(at)
                nbytes = int(self._file.readinto(out))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read at byte {at}: {error.strerror}") from error
        if not nbytes:
            raise CheckpointError(f"{self.path} ended unexpectedly at byte {at}")
        return nbytes

    def _read_header(self) -> dict[str, StoredTensor]:
        """Read the header, and return the location of each tensor in the file by name."""

        def read(start: int, nbytes: int) -> bytes:
            data = np.empty(nbytes, dtype=np.uint8)
            self.read_into(start, data)
            return data.tobytes()

        metadata, tensors = parse_header(read, self._record.nbytes, where=str(self.path))
        if (save_id := metadata.get("save_id")) != self._save_id:
            raise CheckpointError(
                f"{self.path} belongs to save {save_id!r}, but the manifest belongs to save {self._save_id!r}"
            )
        return tensors


def parse_header(
    read: Callable[[int, int], bytes], size: int, *, where: str
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the metadata and tensors of a safetensors file of `size` bytes. `read(start, nbytes)` reads the file."""
    nbytes = int.from_bytes(read(0, 8), "little")
    if not 0 < nbytes <= min(size - 8, MAX_HEADER_NBYTES):
        raise CheckpointError(f"{where} has a header length of {nbytes} bytes, but the file has {size} bytes")
    try:
        header = parse_object(read(8, nbytes))
        metadata = dict(header.pop("__metadata__", {}))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from None
    found = {}
    for name, record in header.items():
        try:
            dtype, shape = str(record["dtype"]), tuple(int(n) for n in record["shape"])
            start, stop = (8 + nbytes + int(offset) for offset in record["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{where}: the header's record of {name!r} is malformed") from None
        if dtype not in NAMES:
            raise CheckpointError(f"{where}: {name!r} has the unknown dtype {dtype!r}")
        if min(shape, default=0) < 0 or stop > size or start < 8 + nbytes:
            raise CheckpointError(
                f"{where}: {name!r} is at bytes {start} to {stop}, outside the data of a file of {size} bytes"
            )
        if stop - start != math.prod(shape) * itemsize(NAMES[dtype]):
            raise CheckpointError(
                f"{where}: {name!r} has {stop - start} bytes, which does not match its shape {shape} and dtype {dtype}"
            )
        found[name] = StoredTensor(dtype, shape, start, stop)
    filled = sorted((one.start, one.stop, name) for name, one in found.items() if one.start < one.stop)
    for (_, end, first), (start, _, second) in itertools.pairwise(filled):
        if start < end:
            raise CheckpointError(f"{where}: {first!r} and {second!r} overlap at byte {start}")
    return metadata, found


def file_beside(directory: Path, name: str, *, where: str) -> Path:
    """Return the path of a file in `directory`, or raise `CheckpointError` if the untrusted `name` is not in it."""
    if name in ("", ".", "..") or any(character in name for character in "/\\\0"):
        raise CheckpointError(f"{where} points to {name!r}, which is outside its directory")
    return directory / name


def size_problem(path: Location, record: FileRecord, *, chunk_nbytes: int) -> str | None:
    """Return a problem with a data file that can be found without reading it, or None if there is none."""
    if len(record.crc32c) != -(-record.nbytes // chunk_nbytes):
        return f"the manifest holds {len(record.crc32c)} checksums for the {record.nbytes} bytes of {path.name}"
    try:
        nbytes = nbytes_inside(path)
    except OSError as error:
        return f"{path} is missing ({error.strerror})"
    except CheckpointError as error:
        return str(error)
    return None if nbytes == record.nbytes else f"{path} has {nbytes} bytes, expected {record.nbytes}"


def nbytes_inside(path: Location) -> int:
    """Return the size of a file in a checkpoint. Raise `CheckpointError` if it is a link to a file elsewhere."""
    if isinstance(path, ObjectPath):
        return path.size()
    status = path.stat()
    if path.is_symlink() and path.resolve().parent != path.parent.resolve():
        raise CheckpointError(f"{path} is a link to a file outside the checkpoint: {path.resolve()}")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status.st_size
