"""Sources, which present checkpoints of every format as named tensors that can be read in intervals.

A *source* is a checkpoint on disk, described by the records of the native manifest (without pieces if another program
saved it). Writing from a source needs no process group and no model, and only one chunk of one tensor is in memory at a
time. Each module opens or writes one format, and `detect` recognizes the format of a file or directory.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import JsonValue

from fullshard.checkpoint.elements import dtype_of, tensor_bytes
from fullshard.checkpoint.format import (
    DTYPES,
    MANIFEST_NAME,
    Kind,
    Manifest,
    OptimizerRecord,
    TensorRecord,
    is_for_others,
    read_manifest,
    stored_tensors,
)
from fullshard.checkpoint.objects import Location
from fullshard.checkpoint.readers import Readers
from fullshard.checkpoint.tensor_file import Bytes
from fullshard.checkpoint.verify import quick_problems
from fullshard.comm import torch_private
from fullshard.core.dtypes import itemsize
from fullshard.core.errors import CheckpointError, plural
from fullshard.core.layout import Interval
from fullshard.core.sizes import MIB
from fullshard.engine.precision import dtype_name

_HELD_NBYTES = 16 * MIB
"""Size of the part of a tensor that is read, converted and written at a time."""

T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=TensorRecord)

_WRAPPERS = torch_private.WRAPPERS | {"_fsdp_wrapped_module", "_fpw_module"}
"""Parts of names that wrappers of torch and torch_xla add."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a checkpoint, without the elements of its tensors.

    Only the native format distinguishes parameters from buffers, and only it has `states` and a `manifest`. In other
    formats, all tensors are parameters. The optimizer's `kind` is empty if the format does not store it. `notes` lists
    the contents that are not converted.
    """

    parameters: Mapping[str, TensorRecord]
    buffers: Mapping[str, TensorRecord] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    states: Mapping[str, JsonValue] = field(default_factory=dict)
    manifest: Manifest | None = None
    notes: Sequence[str] = ()

    @property
    def model(self) -> dict[str, TensorRecord]:
        """Return the records of parameters and buffers in one dict."""
        return {**self.parameters, **self.buffers}

    @property
    def nbytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(nbytes_of(record) for _, _, record in self.tensors())

    def tensors(self) -> Iterator[tuple[Kind, str, TensorRecord]]:
        """Yield (kind, name, record) for every stored tensor. Tensors of optimizer state are named `PARAMETER/KEY`."""
        return stored_tensors(self.model, self.optimizer)


@dataclass(eq=False)
class Source(AbstractContextManager["Source"]):
    """A checkpoint whose tensors can be read in intervals.

    `read` returns an interval of a flattened tensor as a read-only 1-D tensor in host memory. `places` are locations
    that are read in addition to `path`. `rank_state` returns the small tensors that a rank saved completely: its random
    number generators and the tensors in `states`.
    """

    title: str
    path: Location
    contents: Contents
    read: Callable[[Kind, str, Interval], torch.Tensor]
    places: Sequence[Location] = ()
    rank_state: Callable[[int], Mapping[str, torch.Tensor]] = lambda rank: {}
    close: Callable[[], None] = lambda: None

    def whole(self, name: str) -> torch.Tensor:
        """Return a full tensor of the model."""
        record = self.contents.model[name]
        return self.read("model", name, Interval(0, record.numel)).reshape(record.shape)

    def __exit__(self, *error: object) -> None:
        self.close()


def open_native(path: Location) -> Source:
    """Open a directory that `save_checkpoint` wrote, and check what is read. Errors list what is damaged."""
    manifest = read_manifest(path)
    if problems := quick_problems(path, manifest):
        raise CheckpointError(f"{path} is damaged:\n" + "\n".join(problems))
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in {MANIFEST_NAME, *manifest.files})
    notes = [f"{name}: {'for other programs' if is_for_others(name) else 'not part of it'}" for name in others]
    held = manifest.parameters, manifest.buffers, manifest.optimizer, manifest.states
    contents = Contents(*held, manifest=manifest, notes=notes)
    readers = Readers(path, manifest)
    records = {(kind, name): record for kind, name, record in contents.tensors()}

    def read(kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        record = records[kind, name]
        out = torch.empty(interval.numel, dtype=dtype_of(record))
        readers.fill(out, kind, name, record, interval)
        return out

    return Source("fullshard checkpoint", path, contents, read, rank_state=readers.rank_state, close=readers.close)


def refuse_around(source: Source, final: Location) -> None:
    """Raise `CheckpointError` if writing to `final` would remove the source. Replacing the source is allowed."""
    for place in (source.path, *source.places):
        if isinstance(place, Path) and isinstance(final, Path) and final.resolve() in place.resolve().parents:
            raise CheckpointError(
                f"{final} contains {place}, which is being read, so replacing that directory would delete the source",
                hint="choose a directory inside it, or somewhere else",
            )


def require_values(source: Source, hint: str | None = None) -> dict[str, TensorRecord]:
    """Return the records of the model's tensors. Raise `CheckpointError` if values of some are not in the source."""
    records = source.contents.model
    absent = [name for name, record in records.items() if not record.is_stored]
    if absent:
        raise CheckpointError(
            f"{source.path} lacks the values of {plural(len(absent), 'tensor')}; the first is {absent[0]!r}", hint=hint
        )
    return records


def nbytes_of(record: TensorRecord) -> int:
    """Return the size of all elements in bytes."""
    return record.numel * itemsize(record.dtype)


def cast_record(record: RecordT, dtype: torch.dtype | None) -> RecordT:
    """Return a copy of a tensor's record with another dtype, or the record itself if it is not floating-point."""
    if dtype is None or not dtype_of(record).is_floating_point:
        return record
    return record.model_copy(update={"dtype": dtype_name(dtype)})


def chunks(record: TensorRecord, interval: Interval | None = None) -> Iterator[Interval]:
    """Split an interval of a tensor, by default the full tensor, into parts of at most 16 MiB, and yield these."""
    whole = Interval(0, record.numel) if interval is None else interval
    step = max(1, _HELD_NBYTES // itemsize(record.dtype))
    for start in range(whole.start, whole.stop, step):
        yield Interval(start, min(start + step, whole.stop))


def stream(
    source: Source, kind: Kind, name: str, record: TensorRecord, interval: Interval | None = None
) -> Iterator[Bytes]:
    """Yield the bytes of a tensor, or of an interval of it, in chunks that are cast to the dtype of the record."""
    for part in chunks(record, interval):
        yield tensor_bytes(source.read(kind, name, part).to(dtype_of(record)))


def tensor_record(shape: Sequence[int], dtype: torch.dtype | str, *, where: str) -> TensorRecord:
    """Return a record without pieces, or raise `CheckpointError` for a shape or dtype that cannot be stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"{where} has dtype {name}, which safetensors cannot store")
    if any(not isinstance(n, int) or n < 0 for n in shape) or math.prod(shape) > 2**62:
        raise CheckpointError(f"{where} has the invalid shape {tuple(shape)}")
    return TensorRecord(shape=tuple(shape), dtype=name, pieces=())


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def plain_names(named: Mapping[str, T]) -> dict[str, T]:
    """Return the values under names without the prefixes that wrappers add, such as DDP's `module.`."""
    plain = {plain_name(name): value for name, value in named.items()}
    if plain and all(name.startswith("module.") for name in plain):
        plain = {name.removeprefix("module."): value for name, value in plain.items()}
    if len(plain) != len(named):
        raise CheckpointError(
            f"{len(named)} names map to only {len(plain)} distinct names once the prefixes of wrappers are removed, "
            "so some names collide"
        )
    return plain
