"""Write any source in the format of torch's distributed checkpoint (DCP), for programs that read nothing else.

torch's own writer makes the files, on one process and tensor by tensor: the state dict it is given holds tensors
without elements, and the planner below reads each when its turn comes.

    accelerate    pytorch_model_fsdp_0/ and optimizer_0/, as Accelerate and Trainer save and load them
    torch         one directory, `model` and `optimizer` nested
    torchtitan    one directory, parameters at the top level, `optimizer` flattened
"""

from __future__ import annotations

import uuid
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from fullshard.checkpoint.decoding import decode_value
from fullshard.checkpoint.elements import dtype_of
from fullshard.checkpoint.format import StateTensorRecord, TensorRecord
from fullshard.checkpoint.offline.source import (
    Kind,
    Progress,
    Source,
    cast_record,
    chunks,
    refuse_around,
    require_values,
    silent,
)
from fullshard.checkpoint.storage import committed_directory
from fullshard.core.errors import CheckpointError
from fullshard.core.paths import local_path

Layout = Literal["accelerate", "torch", "torchtitan"]


class _Reference(torch.Tensor):
    """A tensor without elements that knows where they are."""

    place: tuple[Kind, str, TensorRecord]


def write_dcp(
    source: Source,
    path: str | Path,
    *,
    layout: Layout = "accelerate",
    index: int = 0,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> None:
    """Write model and optimizer state. One whole tensor is held at a time.

    Tied tensors are written under each of their names, as torch does. `index` says which of several models it is, a
    number in the names of Accelerate's layout; `dtype` casts floating-point tensors of the model.
    """
    records = require_values(source)
    model: dict[str, Any] = {}
    for name, record in records.items():
        reference = _reference("model", name, cast_record(record, dtype))
        model |= dict.fromkeys((name, *record.aliases), reference)
    optimizer = _optimizer(source, is_flat=layout == "torchtitan")
    directories = {".": {"model": model, **optimizer}}
    if layout == "accelerate":
        directories = {f"pytorch_model_fsdp_{index}": {"model": model}}
        if optimizer:
            directories[f"optimizer_{index}"] = optimizer
    elif layout == "torchtitan":
        directories = {".": {**model, **optimizer}}
    final = local_path(path).absolute()
    refuse_around(source, final)
    with committed_directory(final, uuid.uuid4().hex[:16], overwrite=overwrite) as temp:
        for name, state in directories.items():
            _save(state, temp / name, _ReadingPlanner(source, progress))


def _save(state: dict[str, Any], directory: Path, planner: DefaultSavePlanner) -> None:
    # No copies ahead: one tensor is resolved, written, and only then the next.
    writer = dcp.FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # no Exception, so no caller would catch it
            reasons = "; ".join(str(reason) for reason, _ in error.failures.values())
            raise CheckpointError(
                f"cannot write {directory.name}: {reasons}", hint="is the disk full? torch does not always say it"
            ) from error


def _optimizer(source: Source, *, is_flat: bool) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state dict under its name, with names for parameters; empty if there is none."""
    record = source.contents.optimizer
    if record is None:
        return {}
    stored = source.rank_state(0)
    state = {
        name: {
            key: _reference("optimizer", f"{name}/{key}", value)
            if isinstance(value, StateTensorRecord)
            else decode_value(value.value, {})
            for key, value in values.items()
        }
        for name, values in record.state.items()
    }
    options = [{key: decode_value(value, stored) for key, value in g.options.items()} for g in record.groups]
    groups = list(zip((list(group.parameters) for group in record.groups), options, strict=True))
    if not is_flat:
        return {"optimizer": {"state": state, "param_groups": [{**each, "params": names} for names, each in groups]}}
    flat = {f"state.{name}.{key}": value for name, values in state.items() for key, value in values.items()}
    for names, each in groups:
        flat |= {f"param_groups.{name}.{key}": value for name in names for key, value in each.items()}
    return {"optimizer": flat}


def _reference(kind: Kind, name: str, record: TensorRecord) -> _Reference:
    empty = torch.empty(record.shape, dtype=dtype_of(record), device="meta").as_subclass(_Reference)
    empty.place = kind, name, record
    return empty


class _ReadingPlanner(DefaultSavePlanner):
    """Reads a tensor when the writer asks for it."""

    def __init__(self, source: Source, progress: Progress) -> None:
        super().__init__()
        self._source, self._progress = source, progress
        self._buffers: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object of an entry, with its elements."""
        found = super().lookup_object(index)
        if not isinstance(found, _Reference):
            return found
        whole = self._buffer(found)
        flat = whole.view(-1)
        kind, name, record = found.place
        for part in chunks(record):
            flat[part.start : part.stop].copy_(self._source.read(kind, name, part))
            self._progress(part.numel * whole.itemsize)
        return whole

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor to fill. The writer keeps its tensors until its file ends, so it gets the same ones again."""
        if (like.shape, like.dtype) not in self._buffers:
            self._buffers[like.shape, like.dtype] = torch.empty(like.shape, dtype=like.dtype)
        whole = self._buffers[like.shape, like.dtype]
        for buffer in self._buffers.values():
            buffer.untyped_storage().resize_(whole.nbytes if buffer is whole else 0)
        return whole
