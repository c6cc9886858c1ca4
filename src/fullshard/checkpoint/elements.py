"""Elements of tensors as bytes in data files."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fullshard.checkpoint.format import DTYPES, NAMES, FileRecord, TensorRecord
from fullshard.checkpoint.objects import Location
from fullshard.checkpoint.tensor_file import Bytes, TensorEntry, TensorFileWriter, storage_order
from fullshard.core.errors import CheckpointError


def wraps_others(tensor: torch.Tensor) -> bool:
    """Return whether the class of `tensor` computes in its own way, so its elements may be in tensors that it holds."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def stored_dtype(tensor: torch.Tensor, *, where: str) -> str:
    """Return the name of the dtype without `torch.`. Raises `CheckpointError` if safetensors has none for it."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout is not torch.strided:
        raise CheckpointError(f"{where} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors cannot store")
    return name


def dtype_called(code: str) -> torch.dtype:
    """Return the dtype that safetensors calls `code`. Raises `CheckpointError` for one it does not know."""
    if code not in NAMES:
        raise CheckpointError(f"unknown dtype {code!r} in a data file")
    dtype: torch.dtype = getattr(torch, NAMES[code])
    return dtype


def dtype_of(record: TensorRecord) -> torch.dtype:
    """Return torch's dtype of a record."""
    return dtype_called(DTYPES[record.dtype])


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the elements as bytes in host memory: a view where possible, a copy of this one tensor else."""
    if wraps_others(tensor):
        raise CheckpointError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} wraps other tensors and has no bytes of its own",
            hint="convert it to a plain tensor first, or use torch.distributed.checkpoint",
        )
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    return flat.view(torch.uint8).numpy()


def write_tensors(path: Location, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write a data file of tensors in memory; see `TensorFileWriter`."""
    entries = [
        TensorEntry(name, stored_dtype(tensor, where=name), tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    with TensorFileWriter(path, entries, metadata) as writer:
        for entry in storage_order(entries):
            writer.write(entry.name, tensor_bytes(tensors[entry.name]))
        return writer.finish()
