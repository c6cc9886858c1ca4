"""State dicts in torch's own files as a source: `pytorch_model.bin`, Accelerate's FULL checkpoints, `.pt` files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.format import OptimizerRecord, TensorRecord
from fullshard.checkpoint.offline.optimizers import optimizer_record
from fullshard.checkpoint.offline.source import (
    Contents,
    Kind,
    MemorySource,
    Pieces,
    plain_names,
    tensor_record,
)
from fullshard.checkpoint.torch_files import check_tensor, load_torch_file
from fullshard.checkpoint.weight_files import PICKLED_INDEX_NAME, PICKLED_NAME, indexed_files
from fullshard.core.errors import CheckpointError

_MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")


def open_torch_state(
    title: str,
    path: Path,
    files: Sequence[Path],
    *,
    optimizer: Path | bool = True,
    notes: Sequence[str] = (),
) -> MemorySource:
    """Return a model, and optimizer state if there is any, in files of `torch.save`.

    Args:
        title: what it is, for people.
        path: for messages.
        files: each a state dict, or a dictionary that holds one as `model` and perhaps the optimizer's.
        optimizer: whether to open the optimizer's state, or the file of its own that has it.
        notes: see `Contents`.

    Raises:
        CheckpointError: a file that is not what it should be, see `load_torch_file`.
    """
    weights: dict[str, torch.Tensor] = {}
    others: list[str] = []
    nested: Any = None
    where = optimizer if isinstance(optimizer, Path) else path
    for file in files:
        loaded = load_torch_file(file)
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{file} holds a {type(loaded).__name__}, expected a state dict")
        key = next((k for k in _MODEL_KEYS if isinstance(loaded.get(k), Mapping)), None)
        if key is not None:
            inner = next((k for k in _OPTIMIZER_KEYS if isinstance(loaded.get(k), Mapping)), None)
            nested = loaded.get(inner) if inner else nested
            others += [str(k) for k in loaded if k not in (key, inner)]
            loaded = loaded[key]
        for name, value in loaded.items():
            if not isinstance(value, torch.Tensor):
                others.append(str(name))
            elif weights.setdefault(str(name), value) is not value:
                raise CheckpointError(f"{file} holds {name!r}, which another file of {path} holds too")
    if isinstance(optimizer, Path):
        nested = load_torch_file(optimizer)
    elif not optimizer:
        nested = None
    if others:
        notes = [*notes, f"{', '.join(others[:20])}: not part of the model"]
    return memory_source(title, path, weights, nested, where=str(where), notes=notes)


def memory_source(
    title: str, path: Path, weights: Mapping[str, torch.Tensor], nested: Any, *, where: str, notes: Sequence[str]
) -> MemorySource:
    """Return a source of named tensors and an optimizer's state dict (None: there is none)."""
    if not weights:
        raise CheckpointError(f"{path} holds no tensors of a model")
    checked = {name: check_tensor(tensor, where=f"{path}: {name}") for name, tensor in plain_names(weights).items()}
    aliases = _shared(checked)
    tied = {alias for names in aliases.values() for alias in names}
    parameters = {
        name: tensor_record(tensor.shape, tensor.dtype, where=name).model_copy(
            update={"aliases": tuple(aliases.get(name, ()))}
        )
        for name, tensor in checked.items()
        if name not in tied
    }
    tensors: dict[tuple[Kind, str], Pieces] = {("model", name): Pieces([checked[name]]) for name in parameters}
    record: OptimizerRecord | None = None
    if nested is not None:
        record, leaves = optimizer_record(nested, parameters, describe=_describe, where=where)
        tensors |= {("optimizer", name): Pieces([tensor]) for name, tensor in leaves.items()}
    return MemorySource(title, path, Contents(parameters=parameters, optimizer=record, notes=notes), tensors)


def bin_files(directory: Path) -> list[Path]:
    """Return the files of a `pytorch_model.bin` directory. Raises as `indexed_files` does."""
    index = directory / PICKLED_INDEX_NAME
    return sorted(indexed_files(index)) if index.is_file() else [directory / PICKLED_NAME]


def _describe(leaf: Any, where: str) -> TensorRecord | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    tensor = check_tensor(leaf, where=where)
    return tensor_record(tensor.shape, tensor.dtype, where=where)


def _shared(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return the tied names: those whose tensors are the same elements of the same memory."""
    first: dict[tuple[Any, ...], str] = {}
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
            if (other := first.setdefault(key, name)) != name:
                found.setdefault(other, []).append(name)
    return found
