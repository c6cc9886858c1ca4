"""Read files that `torch.save` wrote, without letting their contents run code or exhaust memory.

The files are zip archives with a pickle. `weights_only=True` only accepts tensors and plain values. Checked here first:
compressed entries, which could expand to any size, and entries that share bytes. Tensors are mapped from the file.
"""

import io
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from fullshard.core.errors import CheckpointError
from fullshard.core.files import open_regular

_MAX_ENTRIES = 1_000_000


def load_torch_file(path: Path) -> Any:
    """Return the object in a file that `torch.save` wrote. Its tensors are mapped from the file."""
    try:
        with open_regular(path) as file:
            check_archive(file, path.stat().st_size, where=str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    return _load(path, where=str(path), mmap=True)


def load_torch_bytes(data: bytes, *, where: str) -> Any:
    """Return the object in bytes that `torch.save` wrote; see `load_torch_file`."""
    check_archive(io.BytesIO(data), len(data), where=where)
    return _load(io.BytesIO(data), where=where, mmap=False)


def check_archive(file: IO[bytes], size: int, *, where: str) -> None:
    """Raise `CheckpointError` if the entries of an archive are larger than the archive itself."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, UnicodeDecodeError, OverflowError):
        raise CheckpointError(
            f"{where} was not written by torch.save, was written before torch 1.6, or is damaged",
            hint="load it and save it again with the program that wrote it",
        ) from None
    compressed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if compressed or len(entries) > _MAX_ENTRIES or sum(entry.file_size for entry in entries) > size:
        raise CheckpointError(
            f"{where} unpacks to more than its {size} bytes, which never happens with a file from torch.save"
        )


def check_tensor(tensor: object, *, where: str) -> torch.Tensor:
    """Return a plain strided tensor in host memory with all its elements. Raise `CheckpointError` for any other."""
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{where} is a {type(tensor).__name__}, not a tensor")
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.device.type != "cpu" or tensor.is_quantized:
        raise CheckpointError(f"{where} is a {type(tensor).__name__} on {tensor.device}, not a tensor with values")
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"{where} has the shape {tuple(tensor.shape)}, but too few bytes for that shape")
    return tensor.detach()


def _load(source: Path | io.BytesIO, *, where: str, mmap: bool) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), error)
        raise CheckpointError(
            f"{where} contains more than tensors and plain values, so it was not unpickled: {reason}",
            hint="save a plain state dict: tensors, numbers, text, lists and dictionaries",
        ) from None
    except Exception as error:
        raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}") from None
