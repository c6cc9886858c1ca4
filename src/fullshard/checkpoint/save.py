"""Save a checkpoint: every rank writes what it owns, rank 0 makes it count.

    rank 0        makes `.tmp-NAME-ID`                                    [all learn the id]
    every rank    collects what it will write                             [all can, or all fail]
    --            from here on it may go on in another thread, see `background`
    every rank    writes its files there, fsyncs them, reports sizes and checksums      [rank 0 learns all, or all fail]
    rank 0        checks that every element is stored exactly once, writes the manifest, fsyncs, renames to NAME

Until the rename nothing looks like a checkpoint, and nothing old is touched before it. In an object store, which cannot
rename, it is the manifest that makes it count: see `store`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import nn

from fullshard.checkpoint.catalog import remove_oldest
from fullshard.checkpoint.collect import RankReport, RankWriter, SaveArguments
from fullshard.checkpoint.format import encode_manifest
from fullshard.checkpoint.lease import hold_folder, hold_name, require_free
from fullshard.checkpoint.objects import Location, ObjectPath, location
from fullshard.checkpoint.optimizer_state import unwrapped
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.staging import HostMemory
from fullshard.checkpoint.stamps import note_stamps_in
from fullshard.checkpoint.store import Store, store_at
from fullshard.core.errors import ConfigError
from fullshard.core.journal import JOURNAL, Happening
from fullshard.engine.lookup import units_of


def save_checkpoint(
    path: str | Location,
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
) -> Location:
    """Save a training state that any number of ranks can load. A collective: every rank calls it.

    Parameters, optimizer state and persistent buffers are stored once, by the ranks that own them; random number
    generators by every rank; all else as rank 0 has it. The directory must lie where every rank can write to.

    Args:
        path: directory to create, for example `out/step-1000` or `s3://bucket/run/step-1000`.
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
        CheckpointError: on every rank, if any rank failed, or another job has the folder (with `total_limit`) or the
            name (with `overwrite`) to itself. Nothing is left at `path` but what was there before.
        ConfigError: `total_limit` below 1.
    """
    pending = prepare_save(
        path, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=extra, objects=objects,
        weights=weights, total_limit=total_limit, overwrite=overwrite,
    )  # fmt: skip
    return pending.complete(pending.destination.ranks)


@dataclass(frozen=True, slots=True)
class Destination:
    """A directory to be, which all ranks fill before it counts."""

    ranks: Ranks
    store: Store

    @classmethod
    def of(cls, model: nn.Module, path: str | Location, *, overwrite: bool = False) -> Destination:
        """Agree on one destination. A collective of the ranks of `model`."""
        for schedule in dict.fromkeys(unit.schedule for unit in units_of(model)):
            schedule.note_save()  # before anything can wait for a rank that trains on
        ranks = Ranks.of(model)
        save_id = ranks.broadcast(uuid.uuid4().hex[:16])
        return cls(ranks, store_at(location(path).absolute(), save_id, overwrite=overwrite))

    @property
    def final(self) -> Location:
        """The directory."""
        final: Location = self.store.final
        return final

    @property
    def save_id(self) -> str:
        """The word that distinguishes this save from other attempts."""
        return self.store.save_id

    def make(self, doing: str, *, several: bool = False) -> None:
        """Make ready for it; see `Store.prepare`. A collective."""

        def prepare() -> None:
            note_stamps_in(self.final.parent)
            self.store.prepare(several=several)

        self.ranks.on_rank_0(f"{doing} {self.final}", prepare)
        if isinstance(self.final, ObjectPath):
            self.store.own_names = self.ranks.broadcast(self.store.own_names)

    def hold(self, *, total_limit: int | None) -> None:
        """Keep other jobs from what this one replaces and removes, and this one from what is theirs; see `lease`."""

        def hold() -> None:
            if total_limit is not None:
                hold_folder(self.final.parent)
            elif self.store.overwrite:
                hold_name(self.final)
            else:
                require_free(self.final)

        self.ranks.on_rank_0(f"saving {self.final}", hold)

    def commit(self, manifest: bytes | None = None) -> None:
        """Make it count; see `Store.commit`. Rank 0 alone."""
        self.store.manifest = manifest
        self.store.commit()

    @contextlib.contextmanager
    def discarded_on_failure(self) -> Iterator[None]:
        """Remove everything of the save if the block fails."""
        try:
            yield
        except BaseException:
            if self.ranks.rank == 0:
                self.store.discard()
            raise


@dataclass(frozen=True, slots=True)
class Pending(ABC):
    """A save whose state is collected but not written: `complete` does that, at once or in another thread.

    `then` is what rank 0 makes of the complete checkpoint, in words and as a function of its directory. The checkpoint
    is there even if that fails.
    """

    destination: Destination
    total_limit: int | None
    then: tuple[str, Callable[[Location], None]] | None = field(default=None, kw_only=True)
    step: int | None = field(default_factory=lambda: JOURNAL.step, kw_only=True)

    def complete(self, ranks: Ranks) -> Location:
        """Write it and make it count. A collective over `ranks`, which another thread must have for itself."""
        begin = time.monotonic()
        final = self._complete(ranks)
        if ranks.rank == 0:
            seconds = round(time.monotonic() - begin, 3)
            JOURNAL.note(Happening.SAVE, path=str(final), step=self.step, seconds=seconds)
        return final

    def _complete(self, ranks: Ranks) -> Location:
        final = self.destination.final
        with self.destination.discarded_on_failure():
            commit = self._write(ranks)
            ranks.on_rank_0(f"committing {final}", commit)
        if (keep := self.total_limit) is not None:
            ranks.on_rank_0(f"{final} is saved; removing the oldest", lambda: remove_oldest(final, keep=keep))
        if self.then is not None:
            what, make = self.then
            ranks.on_rank_0(f"{final} is saved; {what}", lambda: make(final))
        return final

    @abstractmethod
    def _write(self, ranks: Ranks) -> Callable[[], None]:
        """Write everything but what makes it count, which rank 0 does by calling the result."""


def prepare_save(
    path: str | Location, memory: HostMemory | None = None, parts: int = 1, **arguments: Unpack[SaveArguments]
) -> PendingSave:
    """Do the part of a save that needs the training to stand still. A collective.

    With `memory` what is to be written is copied into it, so that training may go on before it is written.
    """
    total_limit, model = arguments.get("total_limit"), arguments["model"]
    arguments["optimizer"] = unwrapped(arguments.get("optimizer"))
    if total_limit is not None and total_limit < 1:
        raise ConfigError(
            f"total_limit = {total_limit} would keep no checkpoint", hint="use 1 or more, or None for all"
        )
    destination = Destination.of(model, path, overwrite=arguments.get("overwrite", False))
    ranks = destination.ranks
    if parts == 1:
        destination.hold(total_limit=total_limit)
    with destination.discarded_on_failure():
        destination.make("saving")
        writer = ranks.together("collecting the state", lambda: RankWriter(destination.store, ranks.rank, arguments))
        nbytes = sum(ranks.gather(writer.nbytes))
        ranks.on_rank_0(f"saving {destination.final}", lambda: destination.store.require_room(nbytes))
        if memory is not None:
            ranks.together("copying the state to host memory", lambda: writer.stage(memory))
    return PendingSave(destination, total_limit, writer, parts)


@dataclass(frozen=True, slots=True)
class PendingSave(Pending):
    """A prepared save of one checkpoint."""

    writer: RankWriter
    parts: int

    def _write(self, ranks: Ranks) -> Callable[[], None]:
        writer = self.writer
        report = ranks.together(f"writing {self.destination.final}", writer.write)
        reports = ranks.gather(report.model_dump(mode="json"))

        def commit() -> None:
            manifest = writer.manifest([RankReport.model_validate(r) for r in reports], parts=self.parts)
            self.destination.commit(encode_manifest(manifest))

        return commit


def prepare_parts(
    path: str | Location,
    parts: Mapping[str, SaveArguments],
    memory: HostMemory | None = None,
    *,
    total_limit: int | None = None,
    overwrite: bool = False,
) -> PendingParts:
    """Prepare several models as `prepare_save` does: a directory of checkpoints, which is whole or absent like one."""
    destination = Destination.of(next(iter(parts.values()))["model"], path, overwrite=overwrite)
    destination.hold(total_limit=total_limit)
    with destination.discarded_on_failure():
        destination.make("saving", several=True)
        pending = [
            prepare_save(destination.store.directory / name, memory, len(parts), **part) for name, part in parts.items()
        ]
    return PendingParts(destination, total_limit, tuple(pending))


@dataclass(frozen=True, slots=True)
class PendingParts(Pending):
    """A prepared save of several checkpoints."""

    parts: tuple[PendingSave, ...]

    def _write(self, ranks: Ranks) -> Callable[[], None]:
        for part in self.parts:
            part._complete(ranks)
        return self.destination.commit
