"""Save a checkpoint: every rank writes the elements that it owns, and rank 0 commits the result.

    rank 0        creates `.tmp-NAME-ID`                                  [all learn the id]
    every rank    collects what it will write                             [all can, or all fail]
    --            the rest can run in another thread, see `background`
    every rank    writes its files there, fsyncs them, reports sizes and checksums      [rank 0 learns all, or all fail]
    rank 0        checks that every element is stored exactly once, writes the manifest, fsyncs, renames to NAME

Before the directory is renamed, nothing looks like a checkpoint, and no old checkpoint is changed. An object store
cannot rename, so the manifest commits the checkpoint there; see `store`.
"""

import contextlib
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, Unpack

import torch
from torch import nn

from fullshard.checkpoint.catalog import remove_oldest
from fullshard.checkpoint.collect import RankWriter, SaveArguments
from fullshard.checkpoint.format import encode_manifest
from fullshard.checkpoint.lease import hold_folder, hold_name, require_free
from fullshard.checkpoint.objects import Location, ObjectPath, location
from fullshard.checkpoint.optimizer_state import unwrapped
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.staging import HostMemory
from fullshard.checkpoint.stamps import note_stamps_in
from fullshard.checkpoint.store import Store, new_save_id, store_at
from fullshard.core.errors import ConfigError
from fullshard.core.journal import JOURNAL, Happening
from fullshard.core.progress import progress
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
    """Save a training state that can be loaded at any world size. All ranks must call this.

    Parameters, optimizer state and persistent buffers are stored once, by the ranks that own them. Random number
    generators are stored by every rank, and everything else by rank 0. Every rank must be able to write to the
    directory.

    Args:
        path: directory to create, for example `out/step-1000` or `s3://bucket/run/step-1000`.
        model: sharded or not.
        optimizer: its state must have one value per element of a parameter, or be the same on all ranks (`step`).
        scheduler: an object with `state_dict()` and `load_state_dict()`.
        scaler: an object with `state_dict()` and `load_state_dict()`.
        extra: values for `load_checkpoint` to return: numbers, text, tensors, and lists, tuples and dicts of them.
        objects: further objects with `state_dict()` and `load_state_dict()`, to be loaded in the same order.
        weights: names of the parameters and buffers to store; None means all. For the others (for example a frozen base
            model that is stored elsewhere), only shapes and dtypes are recorded.
        total_limit: the number of checkpoints to keep in the directory of `path`. The oldest ones are removed after the
            new one is complete.
        overwrite: replace `path` if it exists. The old checkpoint is kept until the new one is complete.

    Returns:
        `path`.

    Raises:
        CheckpointError: a rank failed, or another job has reserved the folder (with `total_limit`) or the name (with
            `overwrite`). Every rank raises it, and `path` is as it was before.
        ConfigError: `total_limit` is below 1.
    """
    pending = prepare_save(
        path, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=extra, objects=objects,
        weights=weights, total_limit=total_limit, overwrite=overwrite,
    )  # fmt: skip
    return pending.complete(pending.destination.ranks)


@dataclass(frozen=True, slots=True)
class Destination:
    """A checkpoint directory that all ranks fill before it gets its final name."""

    ranks: Ranks
    store: Store

    @classmethod
    def of(cls, model: nn.Module, path: str | Location, *, overwrite: bool = False) -> Self:
        """Return the destination of a save, with an id that all ranks of `model` agree on. All ranks must call this."""
        for schedule in dict.fromkeys(unit.schedule for unit in units_of(model)):
            schedule.before_save()  # before anything can wait for a rank that continues to train
        ranks = Ranks.of(model)
        save_id = ranks.broadcast(new_save_id())
        return cls(ranks, store_at(location(path).absolute(), save_id, overwrite=overwrite))

    @property
    def final(self) -> Location:
        """Return the final path of the directory."""
        final: Location = self.store.final
        return final

    def make(
        self, doing: str = "saving", *, several: bool = False, reserve: Callable[[Location], object] | None = None
    ) -> None:
        """Prepare the destination (`Store.prepare`) on all ranks. Rank 0 first calls `reserve` with the final path."""

        def prepare() -> None:
            if reserve is not None:
                reserve(self.final)
            note_stamps_in(self.final.parent)
            self.store.prepare(several=several)

        self.ranks.on_rank_0(f"{doing} {self.final}", prepare)
        if isinstance(self.final, ObjectPath):
            self.store.own_names = self.ranks.broadcast(self.store.own_names)

    @contextlib.contextmanager
    def discarded_on_failure(self) -> Iterator[None]:
        """Remove all files of the save if the block raises an error."""
        try:
            yield
        except BaseException:
            if self.ranks.rank == 0:
                self.store.discard()
            raise


@dataclass(frozen=True, slots=True)
class Pending:
    """A save for which the state has been collected, but that has not been written yet.

    `complete` writes it, immediately or in another thread. All ranks call `write`, which writes all files and returns
    the function that commits the checkpoint, which only rank 0 calls. `then` is (description, function): rank 0 calls
    the function with the checkpoint's directory after the checkpoint is complete. The checkpoint remains even if the
    function fails.
    """

    destination: Destination
    total_limit: int | None
    write: Callable[[Ranks], Callable[[], None]]
    then: tuple[str, Callable[[Location], None]] | None = None
    step: int | None = field(default_factory=lambda: JOURNAL.step)

    def complete(self, ranks: Ranks) -> Location:
        """Write the checkpoint and commit it. All of `ranks` must call this.

        If another thread calls it, `ranks` must have a process group that only this thread uses.
        """
        begin = time.monotonic()
        final = self._complete(ranks)
        if ranks.rank == 0:
            seconds = round(time.monotonic() - begin, 3)
            JOURNAL.note(Happening.SAVE, path=str(final), step=self.step, seconds=seconds)
        return final

    def _complete(self, ranks: Ranks) -> Location:
        final = self.destination.final
        with self.destination.discarded_on_failure():
            ranks.on_rank_0(f"committing {final}", self.write(ranks))
        if (keep := self.total_limit) is not None:
            ranks.on_rank_0(f"{final} is saved; removing the oldest", lambda: remove_oldest(final, keep=keep))
        if self.then is not None:
            what, make = self.then
            ranks.on_rank_0(f"{final} is saved; {what}", lambda: make(final))
        return final


def _reservation(total_limit: int | None, *, overwrite: bool) -> Callable[[Location], object]:
    """Return the function that reserves a folder or name for a save, or raises an error if another job has it."""
    if total_limit is not None:
        return lambda final: hold_folder(final.parent)
    return hold_name if overwrite else require_free


def prepare_save(
    path: str | Location, memory: HostMemory | None = None, parts: int = 1, **arguments: Unpack[SaveArguments]
) -> Pending:
    """Do the part of a save that pauses training, and copy the state to `memory` if given. All ranks must call this."""
    total_limit, model = arguments.get("total_limit"), arguments["model"]
    arguments["optimizer"] = unwrapped(arguments.get("optimizer"))
    if total_limit is not None and total_limit < 1:
        raise ConfigError(
            f"total_limit is {total_limit}, which would keep no checkpoint", hint="use 1 or more, or None to keep all"
        )
    overwrite = arguments.get("overwrite", False)
    destination = Destination.of(model, path, overwrite=overwrite)
    ranks = destination.ranks
    with destination.discarded_on_failure():
        destination.make(reserve=_reservation(total_limit, overwrite=overwrite) if parts == 1 else None)
        writer = ranks.together("collecting the state", lambda: RankWriter(destination.store, ranks.rank, arguments))
        nbytes = sum(ranks.gather(writer.nbytes))
        ranks.on_rank_0(f"saving {destination.final}", lambda: destination.store.require_room(nbytes))
        if memory is not None:
            ranks.together("copying the state to host memory", lambda: writer.stage(memory))

    def write(ranks: Ranks) -> Callable[[], None]:
        with progress("saving", writer.nbytes):
            reports = writer.write_together(ranks, f"writing {destination.final}")

        def commit() -> None:
            destination.store.manifest = encode_manifest(writer.manifest(reports, parts=parts))
            destination.store.commit()

        return commit

    return Pending(destination, total_limit, write)


def prepare_parts(
    path: str | Location,
    parts: Mapping[str, SaveArguments],
    memory: HostMemory | None = None,
    *,
    total_limit: int | None = None,
    overwrite: bool = False,
) -> Pending:
    """Prepare to save several models, one directory each, which are committed together. All ranks must call this."""
    destination = Destination.of(next(iter(parts.values()))["model"], path, overwrite=overwrite)
    with destination.discarded_on_failure():
        destination.make(several=True, reserve=_reservation(total_limit, overwrite=overwrite))
        pending = [
            prepare_save(destination.store.directory / name, memory, len(parts), **part) for name, part in parts.items()
        ]

    def write(ranks: Ranks) -> Callable[[], None]:
        for part in pending:
            part._complete(ranks)
        return destination.store.commit

    return Pending(destination, total_limit, write)
