"""Read intervals of tensors from directories of weights in Hugging Face's format.

These files come from other people, so they are not trusted: an index may refer only to files in its own directory, and
a header may describe only tensors that are inside the file and do not overlap.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.format import NAMES
from fullshard.checkpoint.tensor_file import MAX_HEADER_NBYTES, file_beside, parse_header
from fullshard.checkpoint.torch_files import check_tensor, load_torch_file
from fullshard.core.errors import CheckpointError
from fullshard.core.files import open_regular, read_object
from fullshard.core.forms import StoredForm
from fullshard.core.imports import import_extra
from fullshard.core.layout import Interval
from fullshard.core.paths import local_path, looks_like_path
from fullshard.core.sizes import MIB
from fullshard.engine.precision import torch_dtype
from fullshard.features.quantized_weights.marks import Mark

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLED_INDEX_NAME = "pytorch_model.bin.index.json"
PICKLED_NAME = "pytorch_model.bin"
_OTHER_WEIGHTS = re.compile(
    r"(?!training_args|optimizer|scheduler|scaler|rng_state).*\.(safetensors|bin|pth?|h5|gguf|ckpt.*|distcp)"
    r"|flax_model.*|.*\.index(\..+)?\.json|adapter_config\.json|manifest\.json|\.metadata"
)
"""Files that hold or describe weights in formats that cannot be read here."""
_STAGING_NBYTES = 16 * MIB


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource:
    """A tensor that is read one interval at a time from `where`. `coded` holds codes and scales."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    where: str
    read: Callable[[Interval, torch.Tensor], None]
    coded: CodedSource | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class CodedSource:
    """The parts (codes and scales) of a quantized weight in files, keyed by name. Each is flattened in block order.

    `mark` is the mark with which a weight keeps its codes at rest. It is None if no stored form has such blocks. If
    bitsandbytes wrote the files, `tensors` contains the tensors in them, keyed by bitsandbytes' names.
    """

    form: StoredForm
    mark: Mark | None
    parts: Mapping[str, TensorSource]
    tensors: Mapping[str, TensorSource] = field(default_factory=dict)

    def fill(self, interval: Interval, out: Mapping[str, torch.Tensor]) -> None:
        """Read the codes and scales of the elements in `interval`. It must start at a multiple of the form's atom."""
        for part in self.form.parts:
            items = Interval(part.numel(interval.start), part.numel(interval.stop))
            self.parts[part.name].read(items, out[part.name])


@torch.no_grad()
def _read_file(path: Path, dtype: torch.dtype, first: int, interval: Interval, out: torch.Tensor) -> None:
    """Fill `out` with elements of a tensor that starts at byte `first` of a file, through a small buffer."""
    per_round = _STAGING_NBYTES // dtype.itemsize
    with path.open("rb") as file:
        file.seek(first + interval.start * dtype.itemsize)
        for start in range(0, interval.numel, per_round):
            buffer = bytearray(min(per_round, interval.numel - start) * dtype.itemsize)
            if file.readinto(buffer) < len(buffer):
                raise CheckpointError(f"{path} ended unexpectedly at byte {file.tell()}")
            values = torch.frombuffer(buffer, dtype=dtype)
            out[start : start + len(values)].copy_(values)


def model_directory(name_or_path: str | Path, hub: Mapping[str, Any] | None = None) -> Path:
    """Return the path of a local directory, or of a hub model in the cache, downloaded if necessary."""
    path = local_path(name_or_path)
    if path.is_dir():
        return path
    if path.exists() or looks_like_path(str(name_or_path)):
        raise CheckpointError(
            f"the directory {name_or_path} does not exist",
            hint="use an existing directory, or the name of a model on the hub",
        )
    module = import_extra("huggingface_hub", extra="hf", purpose=f"downloading {name_or_path}")
    # Weights, configuration, tokenizer.
    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
    try:
        path = Path(module.snapshot_download(str(name_or_path), allow_patterns=patterns, **(hub or {})))
        if not any(path.glob("*.safetensors")):
            module.snapshot_download(str(name_or_path), allow_patterns=["pytorch_model*.bin"], **(hub or {}))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name_or_path} is not a directory, and it cannot be downloaded from the hub: {error}",
            hint="use a directory, or download it first",
        ) from error
    return path


def weights_file(directory: Path) -> Path | None:
    """Return a directory's file of weights, or the index of several, or None. Raise for weights of other kinds."""
    for name in (SINGLE_NAME, INDEX_NAME, PICKLED_NAME, PICKLED_INDEX_NAME):
        if (directory / name).is_file():
            return directory / name
    found = sorted(path.name for path in directory.iterdir() if _OTHER_WEIGHTS.fullmatch(path.name))
    if found:
        raise CheckpointError(
            f"{directory} holds {', '.join(found[:3])}, but neither {SINGLE_NAME} nor {PICKLED_NAME}",
            hint=(
                "create them with `fullshard ckpt export` (from a checkpoint) or `fullshard merge` (from an adapter); "
                "if the model is in several files, their index is needed, too"
            ),
        )
    return None


def has_safetensors(directory: Path) -> bool:
    """Return whether a directory contains weights in safetensors files."""
    return (directory / SINGLE_NAME).is_file() or (directory / INDEX_NAME).is_file()


def stored_tensors(directory: Path) -> Iterator[tuple[str, TensorSource]]:
    """Yield (name, source) for every tensor in a directory of safetensors files or pickled torch files."""
    path = weights_file(directory)
    if path is None:
        raise CheckpointError(
            f"{directory} holds none of {SINGLE_NAME}, {INDEX_NAME} and {PICKLED_NAME}",
            hint="create these files with save_pretrained",
        )
    if path.suffix != ".json":
        yield from tensors_of(path)
        return
    for file, keys in sorted(indexed_files(path).items()):
        if not file.is_file():
            raise CheckpointError(
                f"{path} lists {file.name}, but this file does not exist", hint="download or copy it again"
            )
        tensors = dict(tensors_of(file))
        for key in keys:
            if key not in tensors:
                raise CheckpointError(f"{file} does not hold {key!r}, which {path.name} lists")
            yield key, tensors[key]


def indexed_files(index: Path) -> dict[Path, list[str]]:
    """Return the files that an index lists, with their tensors' names. Raise `CheckpointError` if it is malformed."""
    weight_map = json_file(index, limit_nbytes=MAX_HEADER_NBYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} does not have a weight_map")
    found: dict[Path, list[str]] = {}
    for key, name in weight_map.items():
        found.setdefault(file_beside(index.parent, name, where=str(index)), []).append(key)
    return found


def tensors_of(path: Path) -> Iterator[tuple[str, TensorSource]]:
    """Yield (name, source) for every tensor of a file. Raise `CheckpointError` if it is truncated or malformed."""
    return _safetensors_of(path) if path.suffix == ".safetensors" else _pickled_tensors(path)


def _pickled_tensors(path: Path) -> Iterator[tuple[str, TensorSource]]:
    """Yield (name, source) for every tensor of a file that `torch.save` wrote, without running code from the file."""
    tensors = load_torch_file(path)
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise CheckpointError(f"{path} holds a {type(tensors).__name__}, expected a dict of tensors")
    for name, tensor in tensors.items():
        flat = check_tensor(tensor, where=f"{path}: {name!r}").reshape(-1)
        yield name, TensorSource(tuple(tensor.shape), tensor.dtype, path.name, functools.partial(_read_mapped, flat))


@torch.no_grad()
def _read_mapped(flat: torch.Tensor, interval: Interval, out: torch.Tensor) -> None:
    out.copy_(flat[interval.start : interval.stop])


def _safetensors_of(path: Path) -> Iterator[tuple[str, TensorSource]]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            _, tensors = parse_header(lambda at, nbytes: os.pread(file.fileno(), nbytes, at), size, where=str(path))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    for name, one in tensors.items():
        dtype = torch_dtype(NAMES[one.dtype])
        read = functools.partial(_read_file, path, dtype, one.start)
        yield name, TensorSource(one.shape, dtype, path.name, read)


def json_file(path: Path, *, limit_nbytes: int) -> dict[str, Any]:
    """Return the JSON object in a file. Raise `CheckpointError` if it cannot be read or is too large."""
    try:
        return read_object(path, limit_nbytes=limit_nbytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
