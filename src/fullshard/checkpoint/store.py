"""Turn a directory of files into a checkpoint, and remove one: in a file system, and in an object store.

    file system     files into `.tmp-NAME-ID`, manifest, fsync, rename to NAME              the rename makes it count
    object store    files under NAME, and last of all NAME/manifest.json, in one request     the manifest makes it count

An object store cannot rename. A checkpoint that replaces another gives its files names with its save's id, so that both
are whole until the manifest is replaced, and what that does not name is removed only then. Rank 0 alone calls these.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fullshard.checkpoint import storage
from fullshard.checkpoint.format import (
    MANIFEST_NAME,
    is_data_file,
    is_part,
    rank_file_name,
    read_manifest,
)
from fullshard.checkpoint.lease import hold_name, holds, let_go_of
from fullshard.checkpoint.objects import Location, ObjectPath
from fullshard.checkpoint.stamps import note_stamps_in
from fullshard.core.errors import CheckpointError, StoreError

logger = logging.getLogger(__name__)


class Store:
    """The place of one save in a file system, which makes it count; `save_id` tells saves to the name `final` apart.

    Whether the names of the files carry `save_id` (`own_names`) is known after `prepare`.
    """

    def __init__(self, final: Any, save_id: str, *, overwrite: bool = False) -> None:
        self.final, self.save_id, self.overwrite = final, save_id, overwrite
        self.own_names = False
        self.manifest: bytes | None = None

    @property
    def directory(self) -> Location:
        """Return the directory in which all ranks write the files of the save."""
        return storage.temp_directory(self.final, self.save_id)

    def file_of(self, kind: str, rank: int) -> Location:
        """Return the data file of one rank."""
        return self.directory / rank_file_name(kind, rank, self.save_id if self.own_names else "")

    def prepare(self, *, several: bool = False) -> None:
        """Make ready for a save, of several models or of one."""
        storage.refuse_current(self.final)
        storage.make_temp_directory(self.final, self.save_id, overwrite=self.overwrite)

    def require_room(self, nbytes: int) -> None:
        """Raise `CheckpointError` if it is known that so much does not fit."""
        storage.require_room(storage.temp_directory(self.final, self.save_id), nbytes)

    def commit(self) -> None:
        """Make a complete save count, with `manifest`; without one, of several models, which have theirs.

        What has appeared at `final` since `prepare` is replaced only with `overwrite`.
        """
        temp = storage.temp_directory(self.final, self.save_id)
        if self.manifest is not None:
            storage.write_file(temp / MANIFEST_NAME, self.manifest)
        storage.commit_directory(temp, self.final, self.save_id, overwrite=self.overwrite)

    def discard(self) -> None:
        """Remove the files of a save that failed. A later save removes any remains."""
        storage.discard_directory(storage.temp_directory(self.final, self.save_id))


class ObjectStore(Store):
    """The place of one save in an object store. Holds the name: two writers would spoil each other's files."""

    final: ObjectPath
    _is_claimed = _is_prepared = _is_unsure = False

    @property
    def directory(self) -> Location:
        """See `Store`."""
        return self.final

    def prepare(self, *, several: bool = False) -> None:
        """See `Store`."""
        final = self.final
        if len(final.parts) < 3:
            raise CheckpointError(f"{final} is a bucket", hint=f"name a directory in it: {final}/NAME")
        self._is_claimed = hold_name(final)
        try:
            there = final.beneath()
            manifests = [name for name in there if _is_manifest(name)]
            if manifests and not _is_whole(final, manifests):
                manifests = []
            is_something_else = not manifests and not all(map(is_of_a_save, there))
            if final.is_file() or ((manifests or is_something_else) and not self.overwrite):
                raise CheckpointError(f"{final} exists already", hint="choose another name, or pass overwrite=True")
            if manifests and (several or manifests != [MANIFEST_NAME]):
                raise CheckpointError(
                    f"{final} exists already, and an object store cannot replace several models at once",
                    hint="choose another name for each checkpoint, or remove that one",
                )
            _remove_leftovers(final, there, manifests)
            if holds(final.parent):
                self._remove_unfinished_beside()
        except BaseException:
            self._leave()
            raise
        self.own_names, self._is_prepared = bool(manifests), True

    def require_room(self, nbytes: int) -> None:
        """Do nothing: an object store does not tell its free space."""

    def commit(self) -> None:
        """See `Store`."""
        if self.manifest is not None:
            self._write_manifest(self.manifest)
            with _tolerated(f"what {self.final} held before is not removed"):
                _remove_leftovers(self.final, self.final.beneath(), [MANIFEST_NAME])
        self._leave()

    def discard(self) -> None:
        """See `Store`."""
        with _tolerated(f"{self.final} holds files of a save that failed; the next save there removes them"):
            if self._is_prepared and not self._is_unsure and _saved_there(self.final) != self.save_id:
                there = self.final.beneath()
                _remove_leftovers(self.final, there, [MANIFEST_NAME] if MANIFEST_NAME in there else [])
        self._leave()

    def _write_manifest(self, manifest: bytes) -> None:
        path = self.final / MANIFEST_NAME
        try:
            if self.overwrite and _saved_there(self.final) is not None:
                path.write_bytes(manifest)
            elif not path.create(manifest):
                raise CheckpointError(
                    f"{self.final} was saved by another job in the meantime",
                    hint="give each job its own name",
                )
        except StoreError:
            self._is_unsure = True  # its answer may be all that was lost: then files that are removed are missed
            if not path.is_file() or path.read_bytes() != manifest:
                raise

    def _leave(self) -> None:
        if self._is_claimed:
            self._is_claimed = False
            let_go_of(self.final)

    def _remove_unfinished_beside(self) -> None:
        """Remove what killed saves have left in a folder that is this job's alone."""
        folder, found = self.final.parent, dict[str, list[str]]()
        for name in folder.beneath():
            directory, _, rest = name.partition("/")
            found.setdefault(directory, []).append(rest)
        for directory, names in found.items():
            is_unfinished = not any(map(_is_manifest, names))
            if directory != self.final.name and is_unfinished and all(map(is_of_a_save, names)):
                (folder / directory).remove_beneath(names)


def store_at(final: Location, save_id: str, *, overwrite: bool = False) -> Store:
    """Return the place of a save."""
    return (ObjectStore if isinstance(final, ObjectPath) else Store)(final, save_id, overwrite=overwrite)


@contextlib.contextmanager
def new_checkpoint(final: Location, save_id: str, *, overwrite: bool) -> Iterator[Store]:
    """Give a place for one process to write to, and to set the manifest of.

    It counts if the block ends well, and is removed if it does not.
    """
    note_stamps_in(final.parent)
    store = store_at(final, save_id, overwrite=overwrite)
    store.prepare()
    try:
        yield store
        store.commit()
    except BaseException as error:
        store.discard()
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {final}: {error.strerror or error}") from error
        raise


@contextlib.contextmanager
def committed_directory(final: Path, save_id: str, *, overwrite: bool) -> Iterator[Path]:
    """Give a directory to fill, as `new_checkpoint` does; its files are flushed to the disk before it counts."""
    with new_checkpoint(final, save_id, overwrite=overwrite):
        temp = storage.temp_directory(final, save_id)
        yield temp
        for path in temp.rglob("*"):
            storage.sync_directory(path)


def remove_checkpoint(path: Location) -> None:
    """Remove a checkpoint so that a crash on the way leaves nothing that looks like one."""
    if not isinstance(path, ObjectPath):
        storage.remove_directory(path)
        return
    there = path.beneath()
    manifests = [name for name in there if _is_manifest(name)]
    path.remove_beneath(manifests)
    path.remove_beneath([name for name in there if name not in manifests])


def _saved_there(final: ObjectPath) -> str | None:
    """Return the id of the save that counts there; empty if its manifest is damaged; None if there is none."""
    try:
        return read_manifest(final).save_id
    except CheckpointError:
        return "" if (final / MANIFEST_NAME).is_file() else None


def is_of_a_save(name: str) -> bool:
    """Return whether an object in a checkpoint, named from there on, is one that a save makes before it counts."""
    directory, _, file = name.rpartition("/")
    if not directory:
        return is_data_file(file)
    return is_part(directory) and (is_data_file(file) or file == MANIFEST_NAME)


def _is_manifest(name: str) -> bool:
    """Return whether an object in a checkpoint is its manifest, or that of a part."""
    return name.rpartition("/")[2] == MANIFEST_NAME


def _is_whole(final: ObjectPath, manifests: list[str]) -> bool:
    """Return whether all manifests of a checkpoint of one or several models are there; so if one is damaged."""
    if MANIFEST_NAME in manifests:
        return True
    try:
        return len(manifests) >= read_manifest((final / manifests[0]).parent).parts
    except CheckpointError:
        return True


def _remove_leftovers(final: ObjectPath, there: Iterable[str], manifests: list[str]) -> None:
    """Remove the files of saves that do not count: all but those that the manifest names."""
    kept: set[str] = set()
    if manifests:
        try:
            kept = {*read_manifest(final).files}
        except CheckpointError:
            return  # the kept files are unknown
    else:
        final.remove_beneath([name for name in there if _is_manifest(name) and name != MANIFEST_NAME])
    final.remove_beneath([name for name in there if is_of_a_save(name) and name not in kept])


@contextlib.contextmanager
def _tolerated(what: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError, StoreError) as error:
        logger.warning("%s: %s", what, error)
