"""Directories of torch's distributed checkpoint (DCP) as a source: torch FSDP2, torchtitan, Accelerate, Trainer."""

from __future__ import annotations

import itertools
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


class DcpSource(Source):
    """A model, and optimizer state if there is any, in one or two DCP directories, the model's first.

    Of every tensor the parts that one rank saved are read whole, one at a time.

    Raises:
        CheckpointError: see `read_metadata`; or no model in it.
    """

    def __init__(
        self,
        title: str,
        path: Path,
        directories: Sequence[Path],
        *,
        optimizer: bool = True,
        notes: Sequence[str] = (),
    ) -> None:
        self.title, self.path = title, path
        self._stored: dict[tuple[Kind, str], StoredObject] = {}
        self._loaded: tuple[Any, torch.Tensor] | None = None
        entries = [stored for directory in directories for stored in read_metadata(directory)]
        model, state, others = _split(entries)
        parameters = {}
        for name, stored in model.items():
            if stored.dtype is not None:
                parameters[name] = tensor_record(stored.shape, stored.dtype, where=name)
                self._stored["model", name] = stored
            else:
                others.append(name)
        if not parameters:
            raise CheckpointError(
                f"{path} holds no model: " + (", ".join(others[:5]) or "it is empty"),
                hint="give the directory of the model, or the one that holds both",
            )
        self.contents = Contents(
            parameters=parameters,
            optimizer=self._optimizer(state, parameters) if optimizer and state else None,
            notes=[*notes, *([f"{', '.join(sorted(others)[:20])}: not part of the model"] if others else [])],
        )
        self._records = {(kind, name): record for kind, name, record in self.contents.tensors()}

    def read(self, kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        """See `Source.read`."""
        stored = self._stored[kind, name]
        record = self._records[kind, name]
        if not record.shape:
            return self._load(stored, stored.boxes[0]).reshape(-1)
        # Whole rows around the interval; boxes are cut in all dims.
        per_row = record.numel // record.shape[0]
        first, last = interval.start // per_row, -(-interval.stop // per_row)
        rows = torch.empty((last - first, *record.shape[1:]), dtype=dtype_of(record))
        for box in stored.boxes:
            begin, end = max(first, box.offsets[0]), min(last, box.offsets[0] + box.sizes[0])
            if begin < end and box.numel:
                columns = [slice(o, o + s) for o, s in zip(box.offsets[1:], box.sizes[1:], strict=True)]
                part = self._load(stored, box)[begin - box.offsets[0] : end - box.offsets[0]]
                rows[(slice(begin - first, end - first), *columns)] = part
        return rows.reshape(-1)[interval.start - first * per_row : interval.stop - first * per_row]

    def _load(self, stored: StoredObject, box: Box) -> torch.Tensor:
        """Return a box of a tensor. Keeps the last one, because chunks of a tensor follow each other."""
        key = (stored.directory, box.file, box.start)
        if self._loaded is not None and self._loaded[0] == key:
            return self._loaded[1]
        self._loaded = None
        where, tensor = _read_box(stored, box)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{where} is a {type(tensor).__name__}, the metadata promises a tensor")
        tensor = check_tensor(tensor, where=where)
        if tuple(tensor.shape) != box.sizes or str(tensor.dtype) != f"torch.{stored.dtype}":
            raise CheckpointError(
                f"{where} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected {stored.dtype} of {box.sizes}"
            )
        self._loaded = key, tensor
        return tensor

    def _optimizer(
        self, entries: Mapping[tuple[str | int, ...], StoredObject], parameters: Mapping[str, TensorRecord]
    ) -> OptimizerRecord | None:
        leaves = {path: stored if stored.dtype else _value(stored) for path, stored in entries.items()}
        if all(len(path) == 1 and isinstance(path[0], str) and "." in path[0] for path in leaves):
            nested = unflatten({str(path[0]): leaf for path, leaf in leaves.items()}, parameters)
        else:
            nested = _nest(leaves)
        if "param_groups" not in nested and not nested.get("state"):
            return None
        nested["param_groups"] = [self._resolve(group) for group in nested.get("param_groups", [])]

        def describe(leaf: Any, where: str) -> TensorRecord | None:
            return tensor_record(leaf.shape, str(leaf.dtype), where=where) if isinstance(leaf, StoredObject) else None

        record, found = optimizer_record(nested, parameters, describe=describe, where=str(self.path))
        for name, leaf in found.items():
            self._stored["optimizer", name] = leaf
        return record

    def _resolve(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the tensors in a parameter group by the numbers that they store (a learning rate, say)."""
        resolved = {}
        for key, value in group.items():
            if isinstance(value, StoredObject):
                if value.shape not in ((), (1,)):
                    raise CheckpointError(f"{self.path}: the option {key} is a tensor of shape {value.shape}")
                value = self._load(value, value.boxes[0]).item()
            resolved[key] = value
        return resolved


def _split(
    entries: Sequence[StoredObject],
) -> tuple[dict[str, StoredObject], dict[tuple[str | int, ...], StoredObject], list[str]]:
    """Return the model's entries by name, the optimizer's by the path below it, and the names of all others."""
    by_prefix = {
        prefix: [e for e in entries if e.path[: len(prefix)] == prefix and len(e.path) > len(prefix)]
        for prefix in (*_MODEL_PREFIXES, *_OPTIMIZER_PREFIXES)
    }
    # At the top level names stand alone (torchtitan); everything longer is another part of the state.
    by_prefix[()] = [e for e in entries if len(e.path) == 1]
    optimizer_prefix = next((p for p in _OPTIMIZER_PREFIXES if by_prefix[p]), None)
    model_prefix = next((p for p in _MODEL_PREFIXES if any(stored.dtype for stored in by_prefix[p])), ())
    model = plain_names({".".join(map(str, e.path[len(model_prefix) :])): e for e in by_prefix[model_prefix]})
    optimizer = {}
    if optimizer_prefix is not None:
        for entry in by_prefix[optimizer_prefix]:
            path = entry.path[len(optimizer_prefix) :]
            optimizer[tuple(plain_name(part) if isinstance(part, str) else part for part in path)] = entry
    taken = {id(e) for e in itertools.chain(model.values(), optimizer.values())}
    others = [stored.name for stored in entries if id(stored) not in taken]
    return model, optimizer, others


def _nest(leaves: Mapping[tuple[str | int, ...], Any]) -> dict[str, Any]:
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
