"""Write any source as a native checkpoint, without a process group or a model, with one chunk in memory at a time.

The checkpoint is sharded as in a run of the given world size with one bucket per dtype, so that a rank of such a run
reads little more than its own file. Any other run can load it too.
"""

import hashlib
from dataclasses import replace

import torch

from fullshard.checkpoint.elements import tensor_bytes, write_tensors
from fullshard.checkpoint.format import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    MeshRecord,
    PieceRecord,
    StateTensorRecord,
    TensorRecord,
    encode_manifest,
    rank_metadata,
)
from fullshard.checkpoint.objects import Location, location
from fullshard.checkpoint.offline.source import (
    Contents,
    Kind,
    RecordT,
    Source,
    cast_record,
    refuse_around,
    require_values,
    stream,
)
from fullshard.checkpoint.rng import RNG_PREFIX
from fullshard.checkpoint.stamps import next_stamp
from fullshard.checkpoint.store import Store, new_checkpoint
from fullshard.checkpoint.tensor_file import TensorEntry, write_tensor_file
from fullshard.checkpoint.verify import structure_problems
from fullshard.core.dtypes import itemsize
from fullshard.core.errors import CheckpointError, ConfigError, plural
from fullshard.core.layout import BucketLayout, Interval, ParameterSpec
from fullshard.core.progress import progress
from fullshard.core.version import __version__

_PROBE_NUMEL = 4096

_Parts = dict[str, tuple[TensorRecord, Interval]]
_Cut = dict[tuple[Kind, str], tuple[TensorRecord, list[Interval]]]
"""Every stored tensor with the interval that each rank holds."""


def write_native(
    source: Source,
    path: str | Location,
    *,
    world_size: int,
    dtype: torch.dtype | None = None,
    optimizer_kind: str | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Write a checkpoint that `load_checkpoint` can read. Return one line about each part that was not converted.

    The checkpoint is sharded for `world_size` ranks in one shard group. Random number generators are kept only if the
    source was saved at the same world size. Floating-point tensors of the model are cast to `dtype`. `optimizer_kind`
    is the class of the optimizer, which is needed if the source does not store it.
    """
    contents = _as_stored(source, dtype, optimizer_kind)
    cut = _cut(contents, world_size)
    notes = list(contents.notes)
    final = location(path).absolute()
    refuse_around(source, final)
    with new_checkpoint(final, overwrite=overwrite) as new, progress("writing", contents.nbytes):
        files: dict[str, FileRecord] = {}
        for rank in range(world_size):
            for kind in ("model", "optimizer"):
                parts = {
                    name: (record, intervals[rank])
                    for (k, name), (record, intervals) in cut.items()
                    if k == kind and intervals[rank].numel
                }
                if parts:
                    files[new.file_of(kind, rank).name] = _write_rank_file(new, kind, rank, parts, source)
        files |= _write_rank_states(new, source, world_size, notes)
        manifest = _manifest(new, contents, cut, files, world_size)
        if problems := structure_problems(manifest):
            raise CheckpointError(f"{source.path} is not a complete checkpoint:\n" + "\n".join(problems))
        new.manifest = encode_manifest(manifest)
    return notes


def _as_stored(source: Source, dtype: torch.dtype | None, optimizer_kind: str | None) -> Contents:
    """Return the contents as they will be stored: dtypes cast, tied tensors only once, the optimizer's class set."""
    contents = source.contents
    require_values(
        source, hint="load it in a run instead, because it was saved with an adapter and without the base model"
    )
    parameters, optimizer = dict(contents.parameters), contents.optimizer
    for name, tied in _tied(source).items() if contents.manifest is None else ():
        parameters[name] = parameters[name].model_copy(update={"aliases": (*parameters[name].aliases, *tied)})
        for alias in tied:
            del parameters[alias]
    if optimizer is not None:
        if optimizer_kind and optimizer.kind and optimizer_kind != optimizer.kind:
            raise ConfigError(f"{source.path} was saved with {optimizer.kind}, not with {optimizer_kind}")
        if not (optimizer.kind or optimizer_kind):
            raise ConfigError(
                f"{source.path} does not name the optimizer that its state belongs to",
                hint="pass its class, for example --optimizer AdamW, or omit the state with --no-optimizer",
            )
        aliases = {name for record in parameters.values() for name in record.aliases}
        groups = tuple(
            group.model_copy(update={"parameters": tuple(n for n in group.parameters if n not in aliases)})
            for group in optimizer.groups
        )
        state = {name: values for name, values in optimizer.state.items() if name not in aliases}
        update = {"kind": optimizer.kind or optimizer_kind, "groups": groups, "state": state}
        optimizer = optimizer.model_copy(update=update)
    return replace(
        contents,
        parameters={name: cast_record(record, dtype) for name, record in parameters.items()},
        buffers={name: cast_record(record, dtype) for name, record in contents.buffers.items()},
        optimizer=optimizer,
    )


def _tied(source: Source) -> dict[str, list[str]]:
    """Return the other names of each tied tensor, keyed by its first name."""
    # Other formats may not record ties. Tensors with equal bytes count as tied if their optimizer states are equal or
    # only the first has one, which loses nothing. To save time, only matrices are compared, first elements first.
    parameters, optimizer = source.contents.parameters, source.contents.optimizer
    state = optimizer.state if optimizer else {}
    alike: dict[object, list[str]] = {}
    for name, record in parameters.items():
        if len(record.shape) > 1 and record.numel:
            start = source.read("model", name, Interval(0, min(_PROBE_NUMEL, record.numel)))
            alike.setdefault((record.shape, record.dtype, tensor_bytes(start).tobytes()), []).append(name)
    tied: dict[str, list[str]] = {}
    for names in alike.values():
        first: dict[object, str] = {}
        for name in names if len(names) > 1 else ():
            values = state.get(name, {})
            weight = _digest(source, "model", name, parameters[name])
            held = tuple(
                _digest(source, "optimizer", f"{name}/{key}", v) if isinstance(v, TensorRecord) else repr(v)
                for key, v in sorted(values.items())
            )
            one = first.setdefault((weight, held), name) if values else first.get(weight, name)
            first.setdefault(weight, name)
            if one != name:
                tied.setdefault(one, []).append(name)
    return tied


def _digest(source: Source, kind: Kind, name: str, record: TensorRecord) -> bytes:
    digest = hashlib.sha256()
    for data in stream(source, kind, name, record):
        digest.update(data.tobytes())
    return digest.digest()


def _cut(contents: Contents, size: int) -> _Cut:
    """Shard the tensors as in one bucket per dtype and kind of file. The first rank stores replicated state."""
    specs: dict[tuple[Kind, str], list[ParameterSpec]] = {}
    cut: _Cut = {}
    for kind, name, record in contents.tensors():
        if _is_replicated(record):
            intervals = [Interval(0, record.numel)] + [Interval(0, 0)] * (size - 1)
            cut[kind, name] = record, intervals
        else:
            specs.setdefault((kind, record.dtype), []).append(ParameterSpec(name, record.shape))
            cut[kind, name] = record, []
    for (kind, dtype), members in specs.items():
        layout = BucketLayout.build(members, itemsize=itemsize(dtype), world_size=size)
        for index, spec in enumerate(members):
            cut[kind, spec.name][1].extend(layout.interval(index, rank) for rank in range(size))
    return cut


def _write_rank_file(new: Store, kind: Kind, rank: int, parts: _Parts, source: Source) -> FileRecord:
    entries = [
        # as in a run: replicated state keeps its shape, everything else is stored as 1-D intervals
        TensorEntry(name, record.dtype, record.shape if _is_replicated(record) else (interval.numel,))
        for name, (record, interval) in parts.items()
    ]
    return write_tensor_file(
        new.file_of(kind, rank), entries, rank_metadata(new.save_id, rank),
        lambda entry: stream(source, kind, entry.name, *parts[entry.name]),
    )  # fmt: skip


def _is_replicated(record: TensorRecord) -> bool:
    return isinstance(record, StateTensorRecord) and record.layout == "replicated"


def _write_rank_states(new: Store, source: Source, world_size: int, notes: list[str]) -> dict[str, FileRecord]:
    """Write each rank's state, or only rank 0's if the world size changes, and return the records of the files."""
    files = {}
    saved = source.contents.manifest.world_size if source.contents.manifest else 0
    if saved and saved != world_size:
        notes.append(f"random number generators: saved by {plural(saved, 'rank')}, not usable by {world_size}")
    for rank in range(saved if saved == world_size else min(saved, 1)):
        tensors = source.rank_state(rank)
        if saved != world_size:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(RNG_PREFIX)}
        if tensors:
            file = new.file_of("state", rank)
            files[file.name] = write_tensors(file, tensors, rank_metadata(new.save_id, rank))
    return files


def _manifest(new: Store, contents: Contents, cut: _Cut, files: dict[str, FileRecord], world_size: int) -> Manifest:
    def placed(kind: Kind, name: str, record: RecordT) -> RecordT:
        pieces = tuple(
            PieceRecord(rank=rank, start=i.start, stop=i.stop) for rank, i in enumerate(cut[kind, name][1]) if i.numel
        )
        return record.model_copy(update={"pieces": pieces, "tiles": None})

    optimizer = contents.optimizer
    if optimizer is not None:
        state = {
            name: {
                key: placed("optimizer", f"{name}/{key}", value) if isinstance(value, StateTensorRecord) else value
                for key, value in values.items()
            }
            for name, values in optimizer.state.items()
        }
        optimizer = optimizer.model_copy(update={"state": state})
    return Manifest(
        format_version=FORMAT_VERSION if new.own_names else 1,
        own_names=new.own_names,
        save_id=new.save_id,
        saved_at=contents.manifest.saved_at if contents.manifest else next_stamp(),
        fullshard_version=__version__,
        torch_version=str(torch.__version__),
        world_size=world_size,
        mesh=MeshRecord(replicate=1, shard=world_size),
        files=files,
        parameters={name: placed("model", name, record) for name, record in contents.parameters.items()},
        buffers={name: placed("model", name, record) for name, record in contents.buffers.items()},
        optimizer=optimizer,
        states=dict(contents.states),
    )
