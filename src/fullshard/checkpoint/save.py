"""Save a checkpoint: every rank writes what it owns, rank 0 makes it count.

    rank 0        makes `.tmp-NAME-ID`                                    [all learn the id]
    every rank    collects what it will write                             [all can, or all fail]
    --            from here on it may go on in another thread, see `background`
    every rank    writes its files there, fsyncs them, reports sizes and checksums      [rank 0 learns all, or all fail]
    rank 0        checks that every element is stored exactly once, writes the manifest, fsyncs, renames to NAME

Until the rename nothing looks like a checkpoint, and nothing old is touched before it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import google_crc32c
import torch
from pydantic import BaseModel
from torch import nn

import fullshard
from fullshard.checkpoint.catalog import LATEST_NAME, remove_oldest
from fullshard.checkpoint.format import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    MeshRecord,
    OptimizerRecord,
    PieceRecord,
    StateTensorRecord,
    StateValueRecord,
    TensorRecord,
    encode_manifest,
    rank_file_name,
)
from fullshard.checkpoint.optimizer_state import StateEntry, group_records, state_entries
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.rng import rng_tensors
from fullshard.checkpoint.staging import HostMemory
from fullshard.checkpoint.storage import (
    TensorEntry,
    TensorFileWriter,
    commit_directory,
    discard_directory,
    make_temp_directory,
    storage_order,
    temp_directory,
    write_file,
)
from fullshard.checkpoint.tensors import (
    LocalTensor,
    device_of,
    dtype_name,
    local_buffers,
    local_parameters,
    modules_with_extra_state,
    rest,
    tensor_bytes,
)
from fullshard.checkpoint.values import encode_value
from fullshard.checkpoint.verify import structure_problems
from fullshard.core.errors import CheckpointError, ConfigError
from fullshard.engine import ShardedParameter

logger = logging.getLogger(__name__)


class PieceReport(BaseModel):
    """A piece of a parameter or buffer that a rank wrote."""

    dtype: str
    start: int
    stop: int


class StateReport(BaseModel):
    """What a rank holds of one value of optimizer state; compared over ranks where it must be the same.

    Attributes:
        record: the record as this rank would write it, its own piece included.
        digest: checksum of a replicated tensor; 0 for others.
    """

    record: StateTensorRecord | StateValueRecord
    digest: int = 0


class RankReport(BaseModel):
    """What one rank wrote."""

    files: dict[str, FileRecord]
    tensors: dict[str, PieceReport]
    state: dict[str, dict[str, StateReport]]


def save_checkpoint(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    objects: Sequence[Any] = (),
    weights: Container[str] | None = None,
    total_limit: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Save a training state that any number of ranks can load. A collective: every rank calls it.

    Parameters, optimizer state and persistent buffers are stored once, by the ranks that own them; random number
    generators by every rank; all else as rank 0 has it. The directory must lie where every rank can write to.

    Args:
        path: directory to create, for example `out/step-1000`.
        model: sharded or not.
        optimizer: its state must be one value per element of a parameter, or the same on all ranks (`step`).
        scheduler: an object with `state_dict()` and `load_state_dict()`.
        scaler: likewise.
        extra: what `load_checkpoint` is to return: numbers, text, tensors, and lists, tuples, dicts of them.
        objects: further objects with `state_dict()` and `load_state_dict()`, loaded again in the same order.
        weights: names of the parameters and buffers to store; None: all. Of the others (a frozen base that lies
            elsewhere) only shapes and dtypes are noted.
        total_limit: remove the oldest checkpoints beside `path` once the new one is complete, to keep this many.
        overwrite: replace `path` if it exists; the old one stays whole until the new one is.

    Returns:
        `path`.

    Raises:
        CheckpointError: on every rank, if any rank failed. Nothing is left at `path` but what was there before.
        ConfigError: `total_limit` below 1.
    """
    pending = prepare_save(
        path, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=extra, objects=objects,
        weights=weights, total_limit=total_limit, overwrite=overwrite,
    )  # fmt: skip
    return pending.complete(pending.ranks)


class SaveArguments(TypedDict, total=False):
    """The keyword arguments of `save_checkpoint`."""

    model: Required[nn.Module]
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    scaler: Any
    extra: Mapping[str, Any] | None
    objects: Sequence[Any]
    weights: Container[str] | None
    total_limit: int | None
    overwrite: bool


def prepare_save(path: str | Path, memory: HostMemory | None = None, **arguments: Unpack[SaveArguments]) -> PendingSave:
    """The part of a save that needs the training to stand still. A collective.

    Args:
        path: see `save_checkpoint`.
        memory: copy what is to be written into it, so that training may go on before it is written.
        arguments: those of `save_checkpoint`.

    Raises:
        CheckpointError: on every rank, if any rank failed; nothing is left of it.
        ConfigError: `total_limit` below 1.
    """
    total_limit, model = arguments.get("total_limit"), arguments["model"]
    if total_limit is not None and total_limit < 1:
        raise ConfigError(
            f"total_limit = {total_limit} would keep no checkpoint", hint="use 1 or more, or None for all"
        )
    final = Path(path).absolute()
    ranks = Ranks.of(model)
    save_id: str = ranks.broadcast(uuid.uuid4().hex[:16])
    temp = temp_directory(final, save_id)
    try:
        ranks.on_rank_0(
            f"saving {final}", lambda: make_temp_directory(final, save_id, overwrite=arguments.get("overwrite", False))
        )
        writer = ranks.together("collecting the state", lambda: _RankWriter(temp, save_id, ranks.rank, arguments))
        if memory is not None:
            ranks.together("copying the state to host memory", lambda: writer.stage(memory))
    except BaseException:
        if ranks.rank == 0:
            discard_directory(temp)
        raise
    return PendingSave(ranks, final, writer, total_limit)


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A save whose state is collected but not written.

    Attributes:
        ranks: those that collected it.
        final: the directory it will be.
        writer: this rank's part.
        total_limit: see `save_checkpoint`.
    """

    ranks: Ranks
    final: Path
    writer: _RankWriter
    total_limit: int | None

    def complete(self, ranks: Ranks) -> Path:
        """Write it and make it count. A collective over `ranks`, which another thread must have for itself.

        Raises:
            CheckpointError: as for `save_checkpoint`.
        """
        final, writer = self.final, self.writer
        try:
            report = ranks.together(f"writing {final}", writer.write)
            reports = ranks.gather(report.model_dump(mode="json"))

            def commit() -> None:
                manifest = writer.manifest([RankReport.model_validate(r) for r in reports])
                write_file(writer.directory / MANIFEST_NAME, encode_manifest(manifest))
                commit_directory(writer.directory, final, writer.save_id)

            ranks.on_rank_0(f"committing {final}", commit)
        except BaseException:
            if ranks.rank == 0:
                discard_directory(writer.directory)
            raise
        ranks.on_rank_0(f"{final} is saved; tidying up beside it", lambda: _tidy_up(final, self.total_limit))
        return final


class _RankWriter:
    """One rank's part of a save: everything that can be refused is refused here, before a byte is written."""

    def __init__(self, directory: Path, save_id: str, rank: int, arguments: SaveArguments) -> None:
        model, optimizer = arguments["model"], arguments.get("optimizer")
        rest(model)
        self._weights = arguments.get("weights")
        self.directory, self.save_id, self.rank, self.optimizer = directory, save_id, rank, optimizer
        self.mesh = next((p.mesh for p in model.parameters() if isinstance(p, ShardedParameter)), None)
        self.parameters = local_parameters(model, rank=rank)
        self.buffers = local_buffers(model, rank=rank)
        state = [] if optimizer is None else list(state_entries(optimizer, self.parameters))
        stored: dict[str, torch.Tensor] = {}
        # Every rank asks for the states, because a state_dict() may be a collective; only rank 0 keeps them.
        values = _states(model, arguments)
        self.states = {name: encode_value(value, where=name, tensors=stored) for name, value in values.items()}
        self.groups = [] if optimizer is None else group_records(optimizer, self.parameters, stored)
        mine = [
            local
            for local in (*self.parameters, *self.buffers)
            if local.is_writer and local.interval.numel and self._is_stored(local)
        ]
        self._tensors = {
            local.name: PieceReport(
                dtype=dtype_name(local.tensor, where=local.name),
                start=local.interval.start,
                stop=local.interval.stop,
            )
            for local in mine
        }
        self._state: dict[str, dict[str, StateReport]] = {}
        for entry in state:
            self._state.setdefault(entry.parameter.name, {})[entry.key] = _state_report(entry, rank)
        self._contents: dict[str, dict[str, torch.Tensor]] = {
            "model": {local.name: local.tensor.detach().reshape(-1) for local in mine},
            "optimizer": {e.name: _stored(e) for e in state if e.layout is not None and e.is_stored_here},
            "state": (stored if rank == 0 else {}) | rng_tensors(device_of(model)),
        }

    def stage(self, memory: HostMemory) -> None:
        """Copy what is to be written, so that it stays what it is now."""
        self._contents = memory.copy(self._contents)

    def write(self) -> RankReport:
        """Write the rank's files and say what is in them."""
        files = {}
        for kind, named in self._contents.items():
            if named:
                name = rank_file_name(kind, self.rank)
                files[name] = self._write_file(self.directory / name, named)
        return RankReport(files=files, tensors=self._tensors, state=self._state)

    def _is_stored(self, local: LocalTensor) -> bool:
        return self._weights is None or any(name in self._weights for name in local.names)

    def _write_file(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
        entries = [TensorEntry(n, dtype_name(t, where=n), tuple(t.shape)) for n, t in tensors.items()]
        metadata = {"format": "pt", "save_id": self.save_id, "rank": str(self.rank)}
        try:
            with TensorFileWriter(path, entries, metadata) as writer:
                for entry in storage_order(entries):
                    writer.write(entry.name, tensor_bytes(tensors[entry.name]))
                return writer.finish()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path.parent}, which rank 0 made, is not there for rank {self.rank}",
                hint="save to a directory that all hosts share",
            ) from error
        except OSError as error:
            raise CheckpointError(f"cannot write {path.name}: {error.strerror or error}") from error

    def manifest(self, reports: Sequence[RankReport]) -> Manifest:
        """Put the reports of all ranks together. Rank 0 only.

        Raises:
            CheckpointError: ranks contradict each other, or an element is stored never or twice.
        """
        mesh, optimizer = self.mesh, None
        if self.optimizer is not None:
            optimizer = OptimizerRecord(
                kind=type(self.optimizer).__name__, groups=tuple(self.groups), state=_merge_state(reports)
            )
        manifest = Manifest(
            save_id=self.save_id,
            saved_at=time.time(),
            fullshard_version=fullshard.__version__,
            torch_version=str(torch.__version__),
            world_size=len(reports),
            mesh=MeshRecord(
                replicate=mesh.replicate_size if mesh else len(reports), shard=mesh.shard_size if mesh else 1
            ),
            files={name: record for report in reports for name, record in report.files.items()},
            parameters=_merge_tensors(self.parameters, reports, self._is_stored),
            buffers=_merge_tensors(self.buffers, reports, self._is_stored),
            optimizer=optimizer,
            states=self.states,
        )
        unknown = {name for r in reports for name in (*r.tensors, *r.state)} - {
            *manifest.parameters,
            *manifest.buffers,
        }
        problems = [f"rank 0 does not know {name!r}, which another rank saved" for name in sorted(unknown)]
        problems += structure_problems(manifest)
        for name, record in manifest.files.items():
            # proof that all ranks wrote into the same directory, not each into one of the same name
            if not (self.directory / name).exists() or (self.directory / name).stat().st_size != record.nbytes:
                problems.append(
                    f"rank 0 does not see {name} of {record.nbytes} bytes: do all hosts share the directory?"
                )
        if problems:
            raise CheckpointError("the ranks saved no complete state:\n" + "\n".join(problems))
        return manifest


def _states(model: nn.Module, arguments: SaveArguments) -> dict[str, Any]:
    """The Python values that are saved, by the name they have in the manifest."""
    sources = {
        "scheduler": arguments.get("scheduler"),
        "scaler": arguments.get("scaler"),
        "objects": list(arguments.get("objects", ())) or None,
    }
    values = {name: _state_dict(source) for name, source in sources.items() if source is not None}
    if modules := modules_with_extra_state(model):
        values["module_extra"] = {path: module.get_extra_state() for path, module in modules.items()}
    if (extra := arguments.get("extra")) is not None:
        values["extra"] = dict(extra)
    return values


def _state_dict(source: Any) -> Any:
    return [one.state_dict() for one in source] if isinstance(source, list) else source.state_dict()


def _stored(entry: StateEntry) -> torch.Tensor:
    tensor: torch.Tensor = entry.value.detach()
    return tensor.reshape(-1) if entry.layout == "interval" else tensor


def _state_report(entry: StateEntry, rank: int) -> StateReport:
    if entry.layout is None:
        tensors: dict[str, torch.Tensor] = {}
        record = StateValueRecord(value=encode_value(entry.value, where=entry.name, tensors=tensors))
        if tensors:
            raise CheckpointError(f"optimizer state {entry.name} holds tensors inside a Python value")
        return StateReport(record=record)
    tensor: torch.Tensor = entry.value
    interval = entry.parameter.interval
    start, stop = (interval.start, interval.stop) if entry.layout == "interval" else (0, tensor.numel())
    piece = PieceRecord(rank=rank, start=start, stop=stop)
    return StateReport(
        record=StateTensorRecord(
            shape=entry.parameter.shape if entry.layout == "interval" else tuple(tensor.shape),
            dtype=dtype_name(tensor, where=entry.name),
            pieces=(piece,) if entry.is_stored_here and stop > start else (),
            layout=entry.layout,
            is_on_host=tensor.device.type == "cpu",
        ),
        digest=google_crc32c.value(tensor_bytes(tensor)) if entry.layout == "replicated" else 0,
    )


def _merge_tensors(
    known: Sequence[LocalTensor], reports: Sequence[RankReport], is_stored: Callable[[LocalTensor], bool]
) -> dict[str, TensorRecord]:
    """Records of the parameters or buffers that rank 0 knows, with the pieces that all ranks wrote."""
    records = {}
    for local in known:
        pieces = []
        dtype = dtype_name(local.tensor, where=local.name)
        for rank, report in enumerate(reports):
            if (piece := report.tensors.get(local.name)) is None:
                continue
            if piece.dtype != dtype:
                raise CheckpointError(f"{local.name!r} is {dtype} on rank 0 and {piece.dtype} on rank {rank}")
            pieces.append(PieceRecord(rank=rank, start=piece.start, stop=piece.stop))
        pieces.sort(key=lambda piece: piece.start)
        records[local.name] = TensorRecord(
            shape=local.shape,
            dtype=dtype,
            pieces=tuple(pieces),
            aliases=local.names[1:],
            is_stored=is_stored(local),
        )
    return records


def _merge_state(reports: Sequence[RankReport]) -> dict[str, dict[str, StateTensorRecord | StateValueRecord]]:
    """Optimizer state of all ranks; what must be the same on all of them is compared."""
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
    """All of a report but which piece the rank wrote."""
    return report.record.model_dump(exclude={"pieces"}), report.digest


def _tidy_up(final: Path, total_limit: int | None) -> None:
    write_file(final.with_name(LATEST_NAME), f"{final.name}\n".encode())
    if total_limit is not None:
        for removed in remove_oldest(final, keep=total_limit):
            logger.info("removed checkpoint %s: total_limit is %d", removed, total_limit)
