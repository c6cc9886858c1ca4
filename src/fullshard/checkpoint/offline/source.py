"""One view of every kind of checkpoint: named tensors of which any interval can be read.

A *source* is a checkpoint on disk, ours or a peer's. It says what it holds in the records of our own manifest, with
no pieces where another program saved. What is written from a source needs no process group and no model, and holds
one chunk of one tensor at a time. Each file `open`s or writes one format; `detect` tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

import torch
from pydantic import JsonValue

from fullshard.checkpoint.elements import dtype_of, tensor_bytes
from fullshard.checkpoint.format import DTYPES, Kind, Manifest, OptimizerRecord, TensorRecord, stored_tensors
from fullshard.checkpoint.objects import Location
from fullshard.checkpoint.tensor_file import Bytes
from fullshard.comm import torch_private
from fullshard.core.dtypes import itemsize
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval
from fullshard.core.sizes import MIB
from fullshard.engine.precision import dtype_name

Progress = Callable[[int], None]
"""Called with the bytes that were just written."""
_HELD_NBYTES = 16 * MIB
"""The part of a tensor that is read, converted and written at a time."""

T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=TensorRecord)

_WRAPPERS = torch_private.WRAPPERS | {"_fsdp_wrapped_module", "_fpw_module"}
"""Parts of names that wrappers of torch and torch_xla add."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a checkpoint, without the elements.

    Only our own format tells parameters from buffers, and has `states` and a `manifest`; elsewhere all tensors are
    parameters. The optimizer's `kind` is empty where the format does not store it. `notes` name what is not taken over.
    """

    parameters: Mapping[str, TensorRecord]
    buffers: Mapping[str, TensorRecord] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    states: Mapping[str, JsonValue] = field(default_factory=dict)
    manifest: Manifest | None = None
    notes: Sequence[str] = ()

    @property
    def model(self) -> dict[str, TensorRecord]:
        """Parameters and buffers."""
        return {**self.parameters, **self.buffers}

    def tensors(self) -> Iterator[tuple[Kind, str, TensorRecord]]:
        """Return every stored tensor of model and optimizer; state goes under `PARAMETER/KEY`."""
        return stored_tensors(self.model, self.optimizer)


@dataclass(eq=False)
class Source:
    """A checkpoint that can be read in parts.

    `read` returns an interval of a flattened tensor, 1-D in host memory, for reading only. `places` are read besides
    `path`. `rank_state` returns the small tensors that a rank saved whole for itself: generators, those in `states`.
    """

    title: str
    path: Location
    contents: Contents
    read: Callable[[Kind, str, Interval], torch.Tensor]
    places: Sequence[Location] = ()
    rank_state: Callable[[int], Mapping[str, torch.Tensor]] = lambda rank: {}
    close: Callable[[], None] = lambda: None

    def whole(self, name: str) -> torch.Tensor:
        """Return all of a tensor of the model, in its shape."""
        record = self.contents.model[name]
        return self.read("model", name, Interval(0, record.numel)).reshape(record.shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def refuse_around(source: Source, final: Location) -> None:
    """Raise `CheckpointError` if what is written would replace a directory that the source lies in.

    In its own place it may be written: that stays whole until the new one is.
    """
    for place in (source.path, *source.places):
        if isinstance(place, Path) and isinstance(final, Path) and final.resolve() in place.resolve().parents:
            raise CheckpointError(
                f"{final} holds {place}, which is being read: replacing it would remove its contents",
                hint="name a directory in it, or another",
            )


def require_values(source: Source, hint: str | None = None) -> dict[str, TensorRecord]:
    """Return the records of the model's tensors. Raises `CheckpointError` if the values of some are not stored here."""
    records = source.contents.model
    absent = [name for name, record in records.items() if not record.is_stored]
    if absent:
        raise CheckpointError(f"{source.path} holds no values of {len(absent)} tensors, first {absent[0]!r}", hint=hint)
    return records


def nbytes_of(record: TensorRecord) -> int:
    """Return the bytes of all elements."""
    return record.numel * itemsize(record.dtype)


def cast_record(record: RecordT, dtype: torch.dtype | None) -> RecordT:
    """Return a record to be stored as `dtype`, as floating-point tensors are; None leaves it."""
    if dtype is None or not dtype_of(record).is_floating_point:
        return record
    return record.model_copy(update={"dtype": dtype_name(dtype)})


def chunks(record: TensorRecord, interval: Interval | None = None) -> Iterator[Interval]:
    """Return the interval (default: the whole tensor) in parts of at most 16 MiB."""
    whole = Interval(0, record.numel) if interval is None else interval
    step = max(1, _HELD_NBYTES // itemsize(record.dtype))
    for start in range(whole.start, whole.stop, step):
        yield Interval(start, min(start + step, whole.stop))


def silent(nbytes: int) -> None:
    """Report no progress."""


def stream(
    source: Source,
    kind: Kind,
    name: str,
    record: TensorRecord,
    interval: Interval | None = None,
    *,
    progress: Progress = silent,
) -> Iterator[Bytes]:
    """Yield the bytes of a tensor or of an interval of it, by chunk, cast on the way to the dtype of the record.

    The size of each chunk is reported once the caller has written it.
    """
    for part in chunks(record, interval):
        data = tensor_bytes(source.read(kind, name, part).to(dtype_of(record)))
        yield data
        progress(data.nbytes)


def tensor_record(shape: Sequence[int], dtype: torch.dtype | str, *, where: str) -> TensorRecord:
    """Return a record without pieces. Raises `CheckpointError` for a shape or dtype that no file of ours can have."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"{where} has dtype {name}, which safetensors cannot store")
    if any(not isinstance(n, int) or n < 0 for n in shape) or math.prod(shape) > 2**62:
        raise CheckpointError(f"{where} claims the shape {tuple(shape)}")
    return TensorRecord(shape=tuple(shape), dtype=name, pieces=())


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def plain_names(named: Mapping[str, T]) -> dict[str, T]:
    """Return the values under their plain names; a `module.` before all of them (DDP) goes too."""
    plain = {plain_name(name): value for name, value in named.items()}
    if plain and all(name.startswith("module.") for name in plain):
        plain = {name.removeprefix("module."): value for name, value in plain.items()}
    if len(plain) != len(named):
        raise CheckpointError(f"{len(named)} names become only {len(plain)} when wrappers' prefixes are removed")
    return plain
