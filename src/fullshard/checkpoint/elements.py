"""Convert between the elements of tensors and the bytes in data files."""

from collections.abc import Mapping

import torch

from fullshard.checkpoint.format import DTYPES, FileRecord, TensorRecord
from fullshard.checkpoint.objects import Location
from fullshard.checkpoint.tensor_file import Bytes, TensorEntry, write_tensor_file
from fullshard.core.errors import CheckpointError
from fullshard.engine.precision import torch_dtype


def wraps_others(tensor: torch.Tensor) -> bool:
    """Return whether the class of `tensor` overrides `__torch_dispatch__`, so that it may wrap other tensors."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def stored_dtype(tensor: torch.Tensor, *, where: str) -> str:
    """Return a tensor's dtype as the manifest names it. Raise `CheckpointError` if safetensors cannot store it."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES or tensor.layout is not torch.strided:
        raise CheckpointError(f"{where} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors cannot store")
    return name


def dtype_of(record: TensorRecord) -> torch.dtype:
    """Return a record's dtype as a torch dtype."""
    return torch_dtype(record.dtype)


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the elements of a tensor as bytes in host memory: a view if possible, otherwise a copy."""
    if wraps_others(tensor):
        raise CheckpointError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} wraps other tensors and has no bytes of its "
            "own to store",
            hint="convert it to a plain tensor first, or use torch.distributed.checkpoint",
        )
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    return flat.view(torch.uint8).numpy()


def write_tensors(path: Location, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write tensors to a new data file, and return its record. See `write_tensor_file`."""
    entries = [entry_of(name, tensor) for name, tensor in tensors.items()]
    return write_tensor_file(path, entries, metadata, lambda entry: [tensor_bytes(tensors[entry.name])])


def entry_of(name: str, tensor: torch.Tensor) -> TensorEntry:
    """Return the description of a tensor in a file."""
    return TensorEntry(name, stored_dtype(tensor, where=name), tuple(tensor.shape))
