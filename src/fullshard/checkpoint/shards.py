"""Distribute tensors over the files of a Hugging Face directory. Exports of live models and of checkpoints use this."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from fullshard.checkpoint.format import DTYPES
from fullshard.checkpoint.storage import write_file
from fullshard.checkpoint.tensor_file import TensorEntry, storage_order
from fullshard.checkpoint.weight_files import INDEX_NAME, SINGLE_NAME
from fullshard.core.errors import ConfigError
from fullshard.engine.precision import dtype_name


def divided(entries: Iterable[TensorEntry], limit: int) -> dict[str, list[TensorEntry]]:
    """Return the tensors of each file by its name, so that no file with several tensors exceeds `limit` bytes."""
    files: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in entries:
        if filled and filled + entry.nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += entry.nbytes
    count = len(files)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [SINGLE_NAME]
    return {name: storage_order(members) for name, members in zip(names, files, strict=True)}


def write_index(directory: Path, files: Mapping[str, Sequence[TensorEntry]]) -> None:
    """Write the index that tells which file contains each tensor. A single file does not need an index."""
    if len(files) == 1:
        return
    places = {entry.name: (name, entry.nbytes) for name, entries in files.items() for entry in entries}
    index = {
        "metadata": {"total_size": sum(nbytes for _, nbytes in places.values())},
        "weight_map": {tensor: name for tensor, (name, _) in sorted(places.items())},
    }
    write_file(directory / INDEX_NAME, json.dumps(index, indent=2).encode())


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Convert a name to a floating-point dtype. Raise `ConfigError` if exports do not support this dtype."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    is_usable = isinstance(found, torch.dtype) and found.is_floating_point and dtype_name(found) in DTYPES
    if dtype is not None and not is_usable:
        raise ConfigError(f"the dtype {dtype!r} is not supported for exports", hint="use float32, bfloat16 or float16")
    return found
