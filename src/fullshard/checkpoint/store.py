"""Commit a directory of files as a checkpoint, and remove checkpoints, in a file system or an object store.

    file system     files into `.tmp-NAME-ID`, manifest, fsync, rename to NAME            the rename commits it
    object store    files under NAME, and finally NAME/manifest.json, in one request      the manifest commits it

An object store cannot rename. If a checkpoint replaces another one there, its file names contain the id of its save.
Both checkpoints are then complete until the manifest is replaced. Only after that are the files removed that the new
manifest does not list. Only rank 0 calls these functions.
"""

import contextlib
import logging
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fullshard.checkpoint import storage
from fullshard.checkpoint.format import MANIFEST_NAME, is_data_file, is_part, rank_file_name, read_manifest
from fullshard.checkpoint.lease import hold_name, holds, let_go_of
from fullshard.checkpoint.objects import Location, ObjectPath
from fullshard.checkpoint.stamps import note_stamps_in
from fullshard.core.errors import CheckpointError, StoreError

logger = logging.getLogger(__name__)


class Store:
    """The location of one save in a file system, with the operations that prepare and commit the save.

    `save_id` distinguishes this save from others with the name `final`. All ranks write their files in `directory`.
    After `prepare`, `own_names` is set if file names must contain `save_id`.
    """

    def __init__(self, final: Any, save_id: str, *, overwrite: bool = False) -> None:
        self.final, self.save_id, self.overwrite = final, save_id, overwrite
        self.directory: Location = storage.temp_directory(final, save_id)
        self.own_names = False
        self.manifest: bytes | None = None

    def file_of(self, kind: str, rank: int) -> Location:
        """Return the path of the data file of this kind that a rank writes."""
        return self.directory / rank_file_name(kind, rank, self.save_id if self.own_names else "")

    def prepare(self, *, several: bool = False) -> None:
        """Prepare the location for a save of one model or, if `several` is set, of several models."""
        storage.refuse_current(self.final)
        storage.make_temp_directory(self.final, self.save_id, overwrite=self.overwrite)

    def require_room(self, nbytes: int) -> None:
        """Raise `CheckpointError` if there is known to be less free space than `nbytes`."""
        storage.require_room(Path(self.directory), nbytes)

    def commit(self) -> None:
        """Commit a complete save, with `manifest` if it has one model. Replace `final` only if `overwrite` is set."""
        temp = Path(self.directory)
        if self.manifest is not None:
            storage.write_file(temp / MANIFEST_NAME, self.manifest)
        storage.commit_directory(temp, self.final, self.save_id, overwrite=self.overwrite)

    def discard(self) -> None:
        """Remove the files of a save that failed. If some of them remain, a later save removes them."""
        storage.discard_directory(Path(self.directory))


class ObjectStore(Store):
    """The location of one save in an object store. It reserves the name, so that no second job overwrites the files."""

    final: ObjectPath
    _is_claimed = _is_prepared = _is_unsure = False

    def prepare(self, *, several: bool = False) -> None:
        """Reserve the name, and remove files of saves that were not committed. See `Store.prepare`."""
        final = self.final
        if len(final.parts) < 3:
            raise CheckpointError(
                f"{final} is a bucket, but a checkpoint needs a directory", hint=f"use a directory in it: {final}/NAME"
            )
        self._is_claimed = hold_name(final)
        try:
            there = final.beneath()
            manifests = [name for name in there if _is_manifest(name)]
            if manifests and not _is_whole(final, manifests):
                manifests = []
            is_something_else = not manifests and not all(map(is_of_a_save, there))
            if final.is_file() or ((manifests or is_something_else) and not self.overwrite):
                raise CheckpointError(
                    f"{final} already exists", hint="choose another name, or pass overwrite=True (--overwrite)"
                )
            if manifests and (several or manifests != [MANIFEST_NAME]):
                raise CheckpointError(
                    f"{final} already exists, and an object store cannot replace several models at the same time",
                    hint="choose another name for each checkpoint, or remove the existing one",
                )
            _remove_leftovers(final, there, manifests)
            if holds(final.parent):
                self._remove_unfinished_beside()
        except BaseException:
            self._leave()
            raise
        self.own_names, self._is_prepared = bool(manifests), True

    def require_room(self, nbytes: int) -> None:
        """Do nothing, because an object store does not report its free space."""

    def commit(self) -> None:
        """Write the manifest, which commits the save, and remove files that it does not list. See `Store.commit`."""
        if self.manifest is not None:
            self._write_manifest(self.manifest)
            with _tolerated(f"what {self.final} held before is not removed"):
                _remove_leftovers(self.final, self.final.beneath(), [MANIFEST_NAME])
        self._leave()

    def discard(self) -> None:
        """Remove the files of a failed save, unless it may have been committed. See `Store.discard`."""
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
                    f"another job saved {self.final} in the meantime", hint="use a different name for each job"
                )
        except StoreError:
            self._is_unsure = True  # perhaps only the response was lost; then the files must not be removed
            if not path.is_file() or path.read_bytes() != manifest:
                raise

    def _leave(self) -> None:
        if self._is_claimed:
            self._is_claimed = False
            let_go_of(self.final)

    def _remove_unfinished_beside(self) -> None:
        """Remove the files of killed saves in the same folder, which must be reserved for this job."""
        folder, found = self.final.parent, dict[str, list[str]]()
        for name in folder.beneath():
            directory, _, rest = name.partition("/")
            found.setdefault(directory, []).append(rest)
        for directory, names in found.items():
            is_unfinished = not any(map(_is_manifest, names))
            if directory != self.final.name and is_unfinished and all(map(is_of_a_save, names)):
                (folder / directory).remove_beneath(names)


def new_save_id() -> str:
    """Return a unique id for a save."""
    return secrets.token_hex(8)


def store_at(final: Location, save_id: str, *, overwrite: bool = False) -> Store:
    """Return the store for a save to `final`, in a file system or an object store."""
    if not isinstance(final, ObjectPath):
        return Store(final, save_id, overwrite=overwrite)
    store = ObjectStore(final, save_id, overwrite=overwrite)
    store.directory = final  # an object store cannot rename a temporary one
    return store


@contextlib.contextmanager
def new_checkpoint(final: Location, *, overwrite: bool) -> Iterator[Store]:
    """Yield a store for one process, which must set its manifest. Commit it at the end, or remove it on an error."""
    note_stamps_in(final.parent)
    store = store_at(final, new_save_id(), overwrite=overwrite)
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
def committed_directory(final: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a directory to fill. Flush its files to disk, and commit or remove it as `new_checkpoint` does."""
    with new_checkpoint(final, overwrite=overwrite) as store:
        temp = Path(store.directory)
        yield temp
        for path in temp.rglob("*"):
            storage.sync_directory(path)


def remove_checkpoint(path: Location) -> None:
    """Remove a checkpoint. A crash during the removal leaves nothing that looks like a checkpoint."""
    if not isinstance(path, ObjectPath):
        storage.remove_directory(path)
        return
    there = path.beneath()
    manifests = [name for name in there if _is_manifest(name)]
    path.remove_beneath(manifests)
    path.remove_beneath([name for name in there if name not in manifests])


def _saved_there(final: ObjectPath) -> str | None:
    """Return the id of the save committed at `final`, an empty string if its manifest is damaged, or None."""
    try:
        return read_manifest(final).save_id
    except CheckpointError:
        return "" if (final / MANIFEST_NAME).is_file() else None


def is_of_a_save(name: str) -> bool:
    """Return whether the object with this path in a checkpoint could be a file of an uncommitted save."""
    directory, _, file = name.rpartition("/")
    if not directory:
        return is_data_file(file)
    return is_part(directory) and (is_data_file(file) or file == MANIFEST_NAME)


def _is_manifest(name: str) -> bool:
    """Return whether an object is the manifest of a checkpoint or of one of its parts."""
    return name.rpartition("/")[2] == MANIFEST_NAME


def _is_whole(final: ObjectPath, manifests: list[str]) -> bool:
    """Return whether all manifests exist, or one is damaged, so that the required number is unknown."""
    if MANIFEST_NAME in manifests:
        return True
    try:
        return len(manifests) >= read_manifest((final / manifests[0]).parent).parts
    except CheckpointError:
        return True


def _remove_leftovers(final: ObjectPath, there: Iterable[str], manifests: list[str]) -> None:
    """Remove the files of saves that were not committed, which are all files that the manifest does not list."""
    kept: set[str] = set()
    if manifests:
        try:
            kept = {*read_manifest(final).files}
        except CheckpointError:
            return  # it is unknown which files to keep
    else:
        final.remove_beneath([name for name in there if _is_manifest(name) and name != MANIFEST_NAME])
    final.remove_beneath([name for name in there if is_of_a_save(name) and name not in kept])


@contextlib.contextmanager
def _tolerated(what: str) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError, StoreError) as error:
        logger.warning("%s: %s", what, error)
