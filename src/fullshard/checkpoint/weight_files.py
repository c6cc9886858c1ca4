"""Directories of safetensors files as Hugging Face writes them, read by intervals.

Other people write these files, so nothing in them is believed: an index names files of its own directory only, and a
header describes tensors that lie in the file, none of them twice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fullshard.checkpoint.storage import Bytes, file_beside
from fullshard.checkpoint.tensors import torch_dtype
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval
from fullshard.core.sizes import MIB

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_STAGING_NBYTES = 16 * MIB
_MAX_HEADER_NBYTES = 100 * MIB
"""A header is some hundred bytes per tensor; more than this is not one."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A tensor in a file: its dtype, shape and first byte."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@torch.no_grad()
def read_elements(stored: StoredWeights, interval: Interval, out: torch.Tensor) -> None:
    """Elements of a stored tensor into `out`, cast on the way, through a small buffer."""
    itemsize = stored.dtype.itemsize
    per_round = _STAGING_NBYTES // itemsize
    with stored.path.open("rb", buffering=0) as file:
        for start in range(interval.start, interval.stop, per_round):
            count = min(per_round, interval.stop - start)
            buffer = np.empty(count * itemsize, dtype=np.uint8)
            _read_exactly(file.fileno(), buffer, stored.start + start * itemsize, stored.path)
            values = torch.from_numpy(buffer).view(stored.dtype)
            out[start - interval.start : start - interval.start + count].copy_(values)


def _read_exactly(descriptor: int, buffer: Bytes, position: int, path: Path) -> None:
    view, done = memoryview(buffer.data), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], position + done)
        if count == 0:
            raise CheckpointError(f"{path} ended at byte {position + done} while it was read")
        done += count


def stored_tensors(directory: Path) -> Iterator[tuple[str, StoredWeights]]:
    """Every tensor of the directory by name.

    Raises:
        CheckpointError: no safetensors files, an index that points elsewhere, or a file that is cut or malformed.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        weight_map = _json_object(_read_index(index), index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} has no weight_map")
        for name in sorted(set(weight_map.values())):
            tensors = dict(_file_tensors(file_beside(directory, name, where=str(index))))
            for key in (key for key, file in weight_map.items() if file == name):
                if key not in tensors:
                    raise CheckpointError(f"{directory / name} does not hold {key!r}, which {index.name} promises")
                yield key, tensors[key]
        return
    if not (directory / SINGLE_NAME).is_file():
        raise CheckpointError(
            f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}",
            hint="weights are read from safetensors files only; save_pretrained writes them",
        )
    yield from _file_tensors(directory / SINGLE_NAME)


def _file_tensors(path: Path) -> Iterator[tuple[str, StoredWeights]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            nbytes = int.from_bytes(file.read(8), "little")
            if not 0 < nbytes <= min(size - 8, _MAX_HEADER_NBYTES):
                raise CheckpointError(f"{path} claims a header of {nbytes} bytes in a file of {size}")
            header = _json_object(file.read(nbytes), path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    claimed = 0
    for name, record in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = torch_dtype(record["dtype"]), tuple(int(n) for n in record["shape"])
            start, stop = (8 + nbytes + int(offset) for offset in record["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: the header's record of {name!r} is malformed") from None
        if min(shape, default=0) < 0 or stop > size or start < 8 + nbytes:
            raise CheckpointError(f"{path}: {name!r} lies at bytes {start} to {stop} of {size}")
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{path}: {name!r} of shape {shape} and {dtype} in {stop - start} bytes")
        claimed += stop - start
        if claimed > size:
            raise CheckpointError(f"{path}: its tensors are larger than its {size} bytes, they overlap")
        yield name, StoredWeights(path, dtype, shape, start)


def _read_index(path: Path) -> bytes:
    if path.stat().st_size > _MAX_HEADER_NBYTES:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than any index")
    return path.read_bytes()


def _json_object(data: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not the JSON it should be")
    return value
