"""Collect each rank's part of a checkpoint, and merge the reports of all ranks into the manifest on rank 0."""

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Required, TypedDict

import google_crc32c
import torch
from pydantic import BaseModel
from torch import nn

from fullshard.checkpoint.coded_state import CodedTensor
from fullshard.checkpoint.elements import stored_dtype, tensor_bytes, write_tensors
from fullshard.checkpoint.format import (
    CodedPieceRecord,
    CodeRecord,
    FileRecord,
    FormRecord,
    Manifest,
    MeshRecord,
    OptimizerRecord,
    PieceRecord,
    StateTensorRecord,
    StateValueRecord,
    TensorRecord,
    chunking_record,
    rank_metadata,
)
from fullshard.checkpoint.objects import sizes_in
from fullshard.checkpoint.optimizer_state import (
    AVERAGES,
    StateEntry,
    average_entries,
    averages_in,
    group_records,
    state_entries,
)
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.rng import rng_tensors
from fullshard.checkpoint.staging import HostMemory
from fullshard.checkpoint.stamps import next_stamp
from fullshard.checkpoint.store import Store
from fullshard.checkpoint.tensors import (
    LocalTensor,
    check_is_plain,
    device_of,
    local_buffers,
    local_parameters,
    modules_with_extra_state,
    rest,
)
from fullshard.checkpoint.values import encode_plain, encode_value
from fullshard.checkpoint.verify import structure_problems
from fullshard.core.errors import CheckpointError
from fullshard.core.journal import JOURNAL
from fullshard.core.layout import Interval
from fullshard.core.version import __version__
from fullshard.engine.precision import dtype_name, map_tensors
from fullshard.engine.shard_spec import CodedShard
from fullshard.features import ShardedParameter, ShardedTensor
from fullshard.features.averages import EMA

RUN_STEP = "run_step"  # in the manifest's states: the step of the run, as events count it


class LoadArguments(TypedDict, total=False):
    """The arguments of `load_checkpoint` that specify the objects to save or restore."""

    model: Required[nn.Module]
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    scaler: Any
    objects: Sequence[Any]


class SaveArguments(LoadArguments, total=False):
    """The keyword arguments of `save_checkpoint`."""

    extra: Mapping[str, Any] | None
    weights: Container[str] | None
    total_limit: int | None
    overwrite: bool


class StateReport(BaseModel):
    """One rank's report on a value of optimizer state: its record, and the digest if every rank holds all of it."""

    record: StateTensorRecord | StateValueRecord
    digest: int = 0


class RankReport(BaseModel):
    """One rank's report on the files that it wrote. `tensors` has the dtype of each tensor, and the piece written."""

    files: dict[str, FileRecord]
    tensors: dict[str, tuple[str, CodedPieceRecord | PieceRecord]]
    state: dict[str, dict[str, StateReport]]


class RankWriter:
    """Collects and writes one rank's part of a save. It raises what errors it can before it writes."""

    def __init__(self, store: Store, rank: int, arguments: SaveArguments) -> None:
        model, optimizer = arguments["model"], arguments.get("optimizer")
        rest(model)
        self._weights = arguments.get("weights")
        self.store, self.rank, self.optimizer = store, rank, optimizer
        self.device = device_of(model)
        self.mesh = next((p.mesh for p in model.parameters() if isinstance(p, ShardedParameter)), None)
        self.files: dict[str, FileRecord] = {}
        self.parameters = local_parameters(model, rank=rank)
        check_is_plain(self.parameters)
        self.buffers = local_buffers(model, rank=rank)
        state = [] if optimizer is None else list(state_entries(optimizer, self.parameters))
        averages = list(average_entries(arguments.get("objects", ()), optimizer, self.parameters))
        stored: dict[str, torch.Tensor] = {}
        # Every rank asks for the states, because a state_dict() may be a collective; only rank 0 keeps them.
        values = _states(model, arguments, is_kept=rank == 0)
        self.states = {name: encode_value(value, where=name, tensors=stored) for name, value in values.items()}
        if JOURNAL.step is not None and optimizer is not None and rank == 0:
            self.states[RUN_STEP] = JOURNAL.step
        self.groups = [] if optimizer is None else group_records(optimizer, self.parameters, stored)
        held = [*self.parameters, *self.buffers]
        mine = [local for local in held if local.is_writer and local.interval.numel and self._is_stored(local)]
        self._tensors = {
            local.name: (stored_dtype(local.tensor, where=local.name), _piece(rank, local.interval, local.form))
            for local in mine
        }
        self._state: dict[str, dict[str, StateReport]] = {}
        for entry in (*state, *averages):
            self._state.setdefault(entry.parameter.name, {})[entry.key] = _state_report(entry, rank)
        self._contents: dict[str, dict[str, torch.Tensor]] = {
            "model": {name: tensor for local in mine for name, tensor in _stored(local.name, local.held).items()},
            "optimizer": {
                name: tensor
                for entry in (*state, *averages)
                if entry.layout is not None and entry.is_stored_here
                for name, tensor in _stored(entry.name, entry.value, is_flat=entry.layout == "interval").items()
            },
            "state": (stored if rank == 0 else {}) | rng_tensors(self.device),
        }

    @property
    def nbytes(self) -> int:
        """Return the size of the tensors that this rank will write, in bytes."""
        return sum(tensor.nbytes for named in self._contents.values() for tensor in named.values())

    def stage(self, memory: HostMemory) -> None:
        """Copy the state to host memory, so that later training steps cannot change what will be written."""
        self._contents = memory.copy(self._contents)

    def write_together(self, ranks: Ranks, doing: str) -> list[RankReport]:
        """Write the files of all ranks. Return all reports on rank 0, and an empty list on the other ranks."""
        self.files = ranks.together(doing, self._write)
        report = RankReport(files=self.files, tensors=self._tensors, state=self._state)
        return [RankReport.model_validate(each) for each in ranks.gather(report.model_dump(mode="json"))]

    def _write(self) -> dict[str, FileRecord]:
        files = {}
        for kind, named in self._contents.items():
            path = self.store.file_of(kind, self.rank)
            try:
                if named:
                    files[path.name] = write_tensors(path, named, rank_metadata(self.store.save_id, self.rank))
            except FileNotFoundError as error:
                what = f"rank 0 created {path.parent}, but rank {self.rank} cannot see it"
                raise CheckpointError(what, hint="save to a directory that all hosts share") from error
            except OSError as error:
                hint = "check the disk, its quota, and the limit on the size of files (ulimit -f)"
                raise CheckpointError(f"cannot write {path.name}: {error.strerror or error}", hint=hint) from error
        return files

    def _is_stored(self, local: LocalTensor) -> bool:
        return self._weights is None or any(name in self._weights for name in local.names)

    def manifest(self, reports: Sequence[RankReport], *, parts: int = 1, is_shared: bool = True) -> Manifest:
        """Merge the reports of all ranks into the manifest, on rank 0. Check file sizes if the directory is shared."""
        mesh, optimizer = self.mesh, None
        if self.optimizer is not None:
            optimizer = OptimizerRecord(
                kind=type(self.optimizer).__name__, groups=tuple(self.groups), state=_merge_state(reports)
            )
        parameters = _merge_tensors(self.parameters, reports, self._is_stored)
        has_forms, has_tiles = (any(getattr(r, has) for r in parameters.values()) for has in ("form", "tiles"))
        manifest = Manifest(
            format_version=4 if has_forms else 3 if self.store.own_names else 2 if has_tiles else 1,
            own_names=self.store.own_names,
            save_id=self.store.save_id,
            saved_at=next_stamp(),
            fullshard_version=__version__,
            torch_version=str(torch.__version__),
            world_size=len(reports),
            mesh=MeshRecord(
                replicate=mesh.replicate_size if mesh else len(reports), shard=mesh.shard_size if mesh else 1
            ),
            parts=parts,
            files={name: record for report in reports for name, record in report.files.items()},
            parameters=parameters,
            buffers=_merge_tensors(self.buffers, reports, self._is_stored),
            optimizer=optimizer,
            states=self.states,
        )
        saved = {name for report in reports for name in (*report.tensors, *report.state)}
        unknown = saved - manifest.parameters.keys() - manifest.buffers.keys()
        problems = [f"another rank saved {name!r}, which rank 0 does not have" for name in sorted(unknown)]
        problems += structure_problems(manifest)
        if is_shared:  # hosts could also have separate directories with this path
            sizes = sizes_in(self.store.directory, manifest.files)
            absent = [
                f"{name} with {r.nbytes} bytes" for name, r in manifest.files.items() if sizes.get(name) != r.nbytes
            ]
            problems += [f"rank 0 cannot find {f}; check that all hosts share the directory" for f in absent]
        if problems:
            raise CheckpointError("the state that the ranks saved is incomplete:\n" + "\n".join(problems))
        return manifest


def objects_of(arguments: LoadArguments) -> dict[str, Any]:
    """Return the objects to save or restore, except the model and the optimizer, by their names in the manifest."""
    found = {name: arguments.get(name) for name in ("scheduler", "scaler")}
    found["objects"] = list(arguments.get("objects", ())) or None
    return {name: source for name, source in found.items() if source is not None}


def _states(model: nn.Module, arguments: SaveArguments, *, is_kept: bool) -> dict[str, Any]:
    """Return the Python values to save, by manifest name. All ranks must call this if values have sharded tensors."""
    values = {name: _state_dict(source) for name, source in objects_of(arguments).items()}
    if "objects" in values:
        values["objects"] = map_tensors(functools.partial(_whole, is_kept=is_kept), values["objects"])
    if averages := averages_in(arguments.get("objects", ())):
        values[AVERAGES] = [average.key for average in averages]
    if modules := modules_with_extra_state(model):
        values["module_extra"] = {path: module.get_extra_state() for path, module in modules.items()}
    if (extra := arguments.get("extra")) is not None:
        values["extra"] = dict(extra)
    return values


def _state_dict(source: Any) -> Any:
    if isinstance(source, EMA):
        return {"updates": source.updates}
    return list(map(_state_dict, source)) if isinstance(source, list) else source.state_dict()


def _whole(tensor: torch.Tensor, *, is_kept: bool) -> torch.Tensor:
    """Return a sharded tensor in full on the host, or an empty one unless `is_kept`. All ranks must call this."""
    if not isinstance(tensor, ShardedTensor):
        return tensor
    whole = tensor.full_tensor()
    return whole.cpu() if is_kept else torch.empty(0)


def _stored(name: str, held: Any, *, is_flat: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors that store what a rank holds of a tensor, by their names in the file."""
    if isinstance(held, CodedShard | CodedTensor):
        return {f"{name}.{part}": tensor for part, tensor in held.parts.items()}
    return {name: held.detach().reshape(-1) if is_flat else held.detach()}


def _state_report(entry: StateEntry, rank: int) -> StateReport:
    if entry.layout is None:
        plain = encode_plain(entry.value, where=f"optimizer state {entry.name}")
        return StateReport(record=StateValueRecord(value=plain))
    value, local, is_copy = entry.value, entry.parameter, entry.layout == "replicated"
    is_coded = isinstance(value, CodedTensor)
    interval = Interval(0, value.numel()) if is_copy else local.interval
    piece = _piece(rank, interval, value.record if is_coded else None)
    record = StateTensorRecord.model_construct(
        shape=tuple(value.shape) if is_copy else local.shape,
        dtype=dtype_name(value.dtype) if is_coded else stored_dtype(value, where=entry.name),
        pieces=(piece,) if entry.is_stored_here and piece.interval.numel else (),
        layout=entry.layout,
        tiles=None if is_copy else chunking_record(local.chunking),
        is_on_host=is_copy and value.device.type == "cpu",
    )
    return StateReport.model_construct(record=record, digest=google_crc32c.value(tensor_bytes(value)) if is_copy else 0)


def _piece(rank: int, interval: Interval, coding: CodeRecord | FormRecord | None) -> CodedPieceRecord | PieceRecord:
    # Skip validation, which would delay training; rank 0 validates the reports it receives.
    start, stop = interval.start, interval.stop
    if coding is None:
        return PieceRecord.model_construct(rank=rank, start=start, stop=stop)
    return CodedPieceRecord.model_construct(rank=rank, start=start, stop=stop, coding=coding)


def _merge_tensors(
    known: Sequence[LocalTensor], reports: Sequence[RankReport], is_stored: Callable[[LocalTensor], bool]
) -> dict[str, TensorRecord]:
    """Return one record per parameter or buffer, which lists the pieces that all ranks have written."""
    records = {}
    for local in known:
        pieces = []
        dtype = stored_dtype(local.tensor, where=local.name)
        for rank, report in enumerate(reports):
            if local.name not in report.tensors:
                continue
            theirs, piece = report.tensors[local.name]
            form = getattr(piece, "coding", None)
            if (theirs, form) != (dtype, local.form):
                mine, other = (kind if how is None else how.form for kind, how in ((dtype, local.form), (theirs, form)))
                raise CheckpointError(f"{local.name!r} is {mine} on rank 0 and {other} on rank {rank}")
            pieces.append(piece)
        pieces.sort(key=lambda piece: piece.start)
        records[local.name] = TensorRecord(
            shape=local.shape,
            dtype=dtype,
            pieces=tuple(pieces),
            aliases=local.names[1:],
            is_stored=is_stored(local),
            tiles=chunking_record(local.chunking),
        )
    return records


def _merge_state(reports: Sequence[RankReport]) -> dict[str, dict[str, StateTensorRecord | StateValueRecord]]:
    """Merge the records of optimizer state from all ranks, and check that they agree, including replicated values."""
    merged: dict[str, dict[str, StateTensorRecord | StateValueRecord]] = {}
    first: dict[tuple[str, str], tuple[int, StateReport]] = {}
    pieces: dict[tuple[str, str], list[PieceRecord]] = {}
    for rank, report in enumerate(reports):
        for name, state in report.state.items():
            for key, item in state.items():
                other, seen = first.setdefault((name, key), (rank, item))
                if _comparable(item) != _comparable(seen):
                    raise CheckpointError(f"optimizer state {name}/{key} differs between rank {other} and rank {rank}")
                if isinstance(item.record, StateTensorRecord):
                    pieces.setdefault((name, key), []).extend(item.record.pieces)
    for (name, key), (_, item) in first.items():
        record = item.record
        if isinstance(record, StateTensorRecord):
            ordered = sorted(pieces[name, key], key=lambda piece: piece.start)
            record = record.model_copy(update={"pieces": tuple(ordered)})
        merged.setdefault(name, {})[key] = record
    return merged


def _comparable(report: StateReport) -> tuple[Any, int]:
    """Return the contents of a report that must be equal on all ranks, which are all except the pieces."""
    return report.record.model_dump(exclude={"pieces"}), report.digest
