"""Read and write torch's distributed checkpoints (DCP), as used by torch FSDP2, torchtitan, Accelerate and Trainer.

torch's own writer writes the files, in one process and one tensor at a time. It gets a state dict of tensors without
elements, and a planner reads each tensor when the writer needs it. There are three layouts:

    accelerate    pytorch_model_fsdp_0/ and optimizer_0/, as Accelerate and Trainer save and load them
    torch         one directory, `model` and `optimizer` nested
    torchtitan    one directory, parameters at the top level, `optimizer` flattened
"""

import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from fullshard.checkpoint.elements import dtype_of
from fullshard.checkpoint.format import OptimizerRecord, StateTensorRecord, TensorRecord
from fullshard.checkpoint.offline.dcp_metadata import Box, StoredObject, read_metadata
from fullshard.checkpoint.offline.optimizers import optimizer_record, unflatten
from fullshard.checkpoint.offline.source import (
    Contents,
    Kind,
    Source,
    cast_record,
    chunks,
    plain_name,
    plain_names,
    refuse_around,
    require_values,
    tensor_record,
)
from fullshard.checkpoint.store import committed_directory
from fullshard.checkpoint.torch_files import check_tensor, load_torch_bytes
from fullshard.checkpoint.values import decode_value
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval
from fullshard.core.paths import local_path
from fullshard.core.progress import advance, progress

Layout = Literal["accelerate", "torch", "torchtitan"]

_MODEL_PREFIXES: tuple[tuple[str, ...], ...] = (("model",), ("app", "model"), ("state_dict",), ("module",), ())
_OPTIMIZER_PREFIXES: tuple[tuple[str, ...], ...] = (
    ("optimizer",), ("optim",), ("app", "optimizer"), ("app", "optim"), ("optimizers",), ("optimizer_state_dict",)
)  # fmt: skip
_MAX_VALUE_NBYTES = 2**26
"""Python values in a checkpoint are options and counters. Larger values are rejected."""

_Path = tuple[str | int, ...]


def open_dcp(
    title: str, path: Path, directories: Sequence[Path], *, optimizer: bool = True, notes: Sequence[str] = ()
) -> Source:
    """Open the DCP directory of a model, and its optimizer's directory if there is one, as a source."""
    model, state, others = _split([stored for directory in directories for stored in read_metadata(directory)])
    tensors: dict[tuple[Kind, str], StoredObject] = {("model", n): stored for n, stored in model.items()}
    parameters = {name: tensor_record(stored.shape, str(stored.dtype), where=name) for name, stored in model.items()}
    if not parameters:
        raise CheckpointError(
            f"{path} does not hold a model; its entries are: " + (", ".join(others[:5]) or "none"),
            hint="use the directory of the model, or the one that holds both model and optimizer",
        )
    record = None
    if optimizer and state:
        record, leaves = _optimizer(state, parameters, where=str(path))
        tensors |= {("optimizer", name): leaf for name, leaf in leaves.items()}
    if others:
        notes = [*notes, f"{', '.join(sorted(others)[:20])}: not part of the model"]
    contents = Contents(parameters, optimizer=record, notes=notes)
    records = {(kind, name): record for kind, name, record in contents.tensors()}
    load = functools.lru_cache(1)(_load)  # chunks of a tensor are read one after another

    def read(kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        stored, record = tensors[kind, name], records[kind, name]
        if not record.shape:
            return load(stored, stored.boxes[0]).reshape(-1)
        # Read full rows around the interval, because boxes can be split along all dims.
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


def _split(entries: Sequence[StoredObject]) -> tuple[dict[str, StoredObject], dict[_Path, StoredObject], list[str]]:
    """Split entries into the model's by name, the optimizer's by path below the optimizer, and the names of others."""

    def below(prefix: tuple[str, ...]) -> list[StoredObject]:
        # At the top level (torchtitan) paths have one part; longer paths belong to other parts of the state.
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
            if isinstance(value, StoredObject):  # for example a learning rate
                if value.shape not in ((), (1,)):
                    raise CheckpointError(
                        f"{where}: the option {key} is a tensor of shape {value.shape}, expected a single value"
                    )
                group[key] = _load(value, value.boxes[0]).item()
    return optimizer_record(nested, parameters, where=where)


def _nest(leaves: Mapping[_Path, Any]) -> dict[str, Any]:
    """Convert a mapping from paths to values into nested dicts and lists. Numbers in paths are indices into lists."""
    root: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        place = root
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise CheckpointError(f"{'.'.join(map(str, path))} is nested in an entry that is not a container")
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
        raise CheckpointError(
            f"{stored.directory / box.file} ({stored.name}) holds a Python value of {box.nbytes} bytes, which is too "
            "large"
        )
    return _read_box(stored, box)[1]


def _read_box(stored: StoredObject, box: Box) -> tuple[str, Any]:
    """Read a box. Return its location, as text for error messages, and its contents."""
    path = stored.directory / box.file
    try:
        with path.open("rb") as file:
            file.seek(box.start)
            data = file.read(box.nbytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    if len(data) != box.nbytes:
        raise CheckpointError(f"{path} ended unexpectedly at byte {box.start + len(data)}")
    where = f"{path} ({stored.name})"
    return where, load_torch_bytes(data, where=where)


class _Reference(torch.Tensor):
    """A tensor without elements, which contains the location of its elements in a source."""

    place: tuple[Kind, str, TensorRecord]


def write_dcp(
    source: Source,
    path: str | Path,
    *,
    layout: Layout = "accelerate",
    index: int = 0,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> None:
    """Write the model and optimizer state of a source. Only one full tensor is in memory at a time.

    Tied tensors are written under each of their names, as torch does. `index` is the number of the model if there are
    several; Accelerate's layout uses it in names. Floating-point tensors of the model are cast to `dtype`.
    """
    records = require_values(source)
    model: dict[str, Any] = {}
    for name, record in records.items():
        reference = _reference("model", name, cast_record(record, dtype))
        model |= dict.fromkeys((name, *record.aliases), reference)
    optimizer = _optimizer_state(source, is_flat=layout == "torchtitan")
    directories = {".": {"model": model, **optimizer}}
    if layout == "accelerate":
        directories = {f"pytorch_model_fsdp_{index}": {"model": model}}
        if optimizer:
            directories[f"optimizer_{index}"] = optimizer
    elif layout == "torchtitan":
        directories = {".": {**model, **optimizer}}
    final = local_path(path).absolute()
    refuse_around(source, final)
    with committed_directory(final, overwrite=overwrite) as temp, progress("writing", source.contents.nbytes):
        for name, state in directories.items():
            _save(state, temp / name, _ReadingPlanner(source))


def _save(state: dict[str, Any], directory: Path, planner: DefaultSavePlanner) -> None:
    # Do not copy ahead: each tensor is resolved and written before the next one.
    writer = dcp.FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        try:
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # not a subclass of Exception, so callers would not catch it
            reasons = "; ".join(str(reason) for reason, _ in error.failures.values())
            raise CheckpointError(
                f"cannot write {directory.name}: {reasons}",
                hint="check whether the disk is full; torch does not always report it",
            ) from error


def _optimizer_state(source: Source, *, is_flat: bool) -> dict[str, dict[str, Any]]:
    """Return `{"optimizer": state dict}` with parameters identified by name, or an empty dict if there is no state."""
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
    """A planner that reads each tensor from the source only when torch's writer asks for it."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._buffers: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object of an entry. A tensor includes its elements."""
        found = super().lookup_object(index)
        if not isinstance(found, _Reference):
            return found
        whole = self._buffer(found)
        flat = whole.view(-1)
        kind, name, record = found.place
        for part in chunks(record):
            flat[part.start : part.stop].copy_(self._source.read(kind, name, part))
            advance(part.numel * whole.itemsize)
        return whole

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer like `like`, which is reused because torch's writer keeps every tensor that it gets."""
        if (like.shape, like.dtype) not in self._buffers:
            self._buffers[like.shape, like.dtype] = torch.empty(like.shape, dtype=like.dtype)
        whole = self._buffers[like.shape, like.dtype]
        for buffer in self._buffers.values():
            buffer.untyped_storage().resize_(whole.nbytes if buffer is whole else 0)
        return whole
