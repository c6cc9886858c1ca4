"""Directories of torch's distributed checkpoint (DCP) as a source: torch FSDP2, torchtitan, Accelerate, Trainer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.elements import dtype_of
from fullshard.checkpoint.format import OptimizerRecord, TensorRecord
from fullshard.checkpoint.offline.dcp_metadata import Box, StoredObject, read_metadata
from fullshard.checkpoint.offline.optimizers import optimizer_record, unflatten
from fullshard.checkpoint.offline.source import Contents, Kind, Source, plain_name, plain_names, tensor_record
from fullshard.checkpoint.torch_files import check_tensor, load_torch_bytes
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval

_MODEL_PREFIXES: tuple[tuple[str, ...], ...] = (("model",), ("app", "model"), ("state_dict",), ("module",), ())
_OPTIMIZER_PREFIXES: tuple[tuple[str, ...], ...] = (
    ("optimizer",), ("optim",), ("app", "optimizer"), ("app", "optim"), ("optimizers",), ("optimizer_state_dict",)
)  # fmt: skip
_MAX_VALUE_NBYTES = 2**26
"""A Python value in a checkpoint is an option or a counter; what is larger than this is left alone."""

_Path = tuple[str | int, ...]


def open_dcp(
    title: str, path: Path, directories: Sequence[Path], *, optimizer: bool = True, notes: Sequence[str] = ()
) -> Source:
    """Open a model, and optimizer state if there is any, in one or two DCP directories, the model's first.

    Of every tensor the parts that one rank saved are read whole, one at a time.
    """
    model, state, others = _split([stored for directory in directories for stored in read_metadata(directory)])
    tensors: dict[tuple[Kind, str], StoredObject] = {("model", n): stored for n, stored in model.items()}
    parameters = {name: tensor_record(stored.shape, str(stored.dtype), where=name) for name, stored in model.items()}
    if not parameters:
        raise CheckpointError(
            f"{path} holds no model: " + (", ".join(others[:5]) or "it is empty"),
            hint="give the directory of the model, or the one that holds both",
        )
    record = None
    if optimizer and state:
        record, leaves = _optimizer(state, parameters, where=str(path))
        tensors |= {("optimizer", name): leaf for name, leaf in leaves.items()}
    if others:
        notes = [*notes, f"{', '.join(sorted(others)[:20])}: not part of the model"]
    contents = Contents(parameters, optimizer=record, notes=notes)
    records = {(kind, name): record for kind, name, record in contents.tensors()}
    load = functools.lru_cache(1)(_load)  # chunks of a tensor follow each other

    def read(kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        stored, record = tensors[kind, name], records[kind, name]
        if not record.shape:
            return load(stored, stored.boxes[0]).reshape(-1)
        # Whole rows around the interval; boxes are cut in all dims.
        per_row = record.numel // record.shape[0]
        first, last = interval.start // per_row, -(-interval.stop // per_row)
        rows = torch.empty((last - first, *record.shape[1:]), dtype=dtype_of(record))
        for box in stored.boxes:
            begin, end = max(first, box.offsets[0]), min(last, box.offsets[0] + box.sizes[0])
            if begin < end and box.numel:
                columns = [slice(o, o + s) for o, s in zip(box.offsets[1:], box.sizes[1:], strict=True)]
                part = load(stored, box)[begin - box.offsets[0] : end - box.offsets[0]]
                rows[(slice(begin - first, end - first), *columns)] = part
        return rows.reshape(-1)[interval.start - first * per_row : interval.stop - first * per_row]

    return Source(title, path, contents, read)


def _split(
    entries: Sequence[StoredObject],
) -> tuple[dict[str, StoredObject], dict[_Path, StoredObject], list[str]]:
    """Return the model's tensors by name, the optimizer's entries by the path below it, and the names of all others."""

    def below(prefix: tuple[str, ...]) -> list[StoredObject]:
        # At the top level names stand alone (torchtitan); everything longer is another part of the state.
        found = [e for e in entries if e.path[: len(prefix)] == prefix and len(e.path) > len(prefix)]
        return found if prefix else [e for e in found if len(e.path) == 1]

    prefix = next((p for p in _MODEL_PREFIXES if any(e.dtype for e in below(p))), ())
    model = {".".join(map(str, e.path[len(prefix) :])): e for e in below(prefix) if e.dtype is not None}
    above = next((p for p in _OPTIMIZER_PREFIXES if below(p)), None)
    optimizer = {}
    for entry in below(above) if above is not None else ():
        path = entry.path[len(above or ()) :]
        optimizer[tuple(plain_name(part) if isinstance(part, str) else part for part in path)] = entry
    taken = {id(e) for e in (*model.values(), *optimizer.values())}
    return plain_names(model), optimizer, [e.name for e in entries if id(e) not in taken]


def _optimizer(
    entries: Mapping[_Path, StoredObject], parameters: Mapping[str, TensorRecord], *, where: str
) -> tuple[OptimizerRecord | None, dict[str, StoredObject]]:
    leaves = {path: stored if stored.dtype else _value(stored) for path, stored in entries.items()}
    if all(len(path) == 1 and isinstance(path[0], str) and "." in path[0] for path in leaves):
        nested = unflatten({str(path[0]): leaf for path, leaf in leaves.items()}, parameters)
    else:
        nested = _nest(leaves)
    if "param_groups" not in nested and not nested.get("state"):
        return None, {}
    groups = nested.setdefault("param_groups", [])
    for group in groups:
        for key, value in group.items():
            if isinstance(value, StoredObject):  # a learning rate, say
                if value.shape not in ((), (1,)):
                    raise CheckpointError(f"{where}: the option {key} is a tensor of shape {value.shape}")
                group[key] = _load(value, value.boxes[0]).item()
    return optimizer_record(nested, parameters, where=where)


def _nest(leaves: Mapping[_Path, Any]) -> dict[str, Any]:
    """Return dictionaries and lists from paths; numbers index lists."""
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        place = root
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise CheckpointError(f"{'.'.join(map(str, path))} lies inside another value")
        place[path[-1]] = leaf
    groups = root.get("param_groups")
    if isinstance(groups, dict):
        root["param_groups"] = [groups[number] for number in sorted(groups)]
    return root


def _load(stored: StoredObject, box: Box) -> torch.Tensor:
    where, tensor = _read_box(stored, box)
    tensor = check_tensor(tensor, where=where)
    if tuple(tensor.shape) != box.sizes or str(tensor.dtype) != f"torch.{stored.dtype}":
        raise CheckpointError(
            f"{where} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected {stored.dtype} of {box.sizes}"
        )
    return tensor


def _value(stored: StoredObject) -> Any:
    box = stored.boxes[0]
    if box.nbytes > _MAX_VALUE_NBYTES:
        raise CheckpointError(f"{stored.directory / box.file} ({stored.name}) is a Python value of {box.nbytes} bytes")
    return _read_box(stored, box)[1]


def _read_box(stored: StoredObject, box: Box) -> tuple[str, Any]:
    """Return a box's place, for messages, and its contents."""
    path = stored.directory / box.file
    try:
        with path.open("rb") as file:
            file.seek(box.start)
            data = file.read(box.nbytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if len(data) != box.nbytes:
        raise CheckpointError(f"{path} ended at byte {box.start + len(data)} while it was read")
    where = f"{path} ({stored.name})"
    return where, load_torch_bytes(data, where=where)
