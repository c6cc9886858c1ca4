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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fullshard.checkpoint.format import (
    LATEST_NAME,
    MANIFEST_NAME,
    is_data_file,
    is_part,
    rank_file_name,
    read_manifest,
)
from fullshard.checkpoint.lease import hold_name, holds, let_go_of
from fullshard.checkpoint.objects import Location, ObjectPath
from fullshard.checkpoint.stamps import note_stamps_in
from fullshard.checkpoint.storage import (
    commit_directory,
    discard_directory,
    make_temp_directory,
    refuse_current,
    remove_directory,
    replaced_directories,
    require_room,
    temp_directory,
    write_file,
)
from fullshard.core.errors import CheckpointError, StoreError

logger = logging.getLogger(__name__)


def store_of(path: Location) -> Store:
    """Return the store that keeps the checkpoints there."""
    return OBJECTS if isinstance(path, ObjectPath) else FILES


class Store:
    """Makes checkpoints count, and removes them: in a file system, by `storage`.

    `final` is the name of a checkpoint, `save_id` tells saves to it apart.
    """

    def directory(self, final: Any, save_id: str) -> Location:
        """Return the directory in which all ranks write the files of a save."""
        return temp_directory(final, save_id)

    def prepare(self, final: Any, save_id: str, *, overwrite: bool, several: bool = False) -> bool:
        """Make ready for a save, of several models or of one; whether its files must have names of their own.

        Raises:
            CheckpointError: `final` exists and may not, or cannot, be replaced, or nothing can be written there.
            ConfigError: another job has it to itself.
            StoreError: the store does not answer.
        """
        refuse_current(final)
        make_temp_directory(final, save_id, overwrite=overwrite)
        return False

    def require_room(self, final: Any, save_id: str, nbytes: int) -> None:
        """Raise `CheckpointError` if it is known that so much does not fit."""
        require_room(temp_directory(final, save_id), nbytes)

    def commit(self, final: Any, save_id: str, manifest: bytes | None, *, overwrite: bool) -> None:
        """Make a complete save count; without a manifest, one of several models, which have theirs.

        What has appeared at `final` since `prepare` is replaced only with `overwrite`.

        Raises:
            CheckpointError, OSError, StoreError: it does not count, and what was there before does.
        """
        temp = temp_directory(final, save_id)
        if manifest is not None:
            write_file(temp / MANIFEST_NAME, manifest)
        commit_directory(temp, final, save_id, overwrite=overwrite)

    def discard(self, final: Any, save_id: str) -> None:
        """Remove the files of a save that failed. A later save removes any remains."""
        discard_directory(temp_directory(final, save_id))

    def remove(self, path: Any) -> None:
        """Remove a checkpoint so that a crash on the way leaves nothing that looks like one."""
        remove_directory(path)

    def replaced(self, final: Any) -> list[Path]:
        """Return the directories that bore the name `final` until a commit that never ended."""
        return replaced_directories(final)

    def write(self, path: Any, data: bytes) -> None:
        """Create or replace a small file so that a crash leaves the old or the new contents."""
        write_file(path, data)


class ObjectStore(Store):
    """A store in an object store."""

    def __init__(self) -> None:
        self._claimed: set[ObjectPath] = set()
        self._unsure: set[ObjectPath] = set()

    def directory(self, final: Any, save_id: str) -> Location:
        """See `Store`."""
        return cast("ObjectPath", final)

    def prepare(self, final: Any, save_id: str, *, overwrite: bool, several: bool = False) -> bool:
        """See `Store`."""
        if len(final.parts) < 2:
            raise CheckpointError(f"{final} is a bucket", hint=f"name a directory in it: {final}/NAME")
        self._claim(final)
        try:
            there = final.beneath()
            manifests = [name for name in there if _is_manifest(name)]
            if manifests and not _is_whole(final, manifests):
                manifests = []
            is_something_else = not manifests and not all(map(is_of_a_save, there))
            if final.is_file() or ((manifests or is_something_else) and not overwrite):
                raise CheckpointError(f"{final} exists already", hint="choose another name, or pass overwrite=True")
            if manifests and (several or manifests != [MANIFEST_NAME]):
                raise CheckpointError(
                    f"{final} exists already, and an object store cannot replace several models at once",
                    hint="choose another name for each checkpoint, or remove that one",
                )
            _remove_leftovers(final, there, manifests)
            if holds(final.parent):
                self._remove_unfinished_beside(final)
        except BaseException:
            self._leave(final)
            raise
        return bool(manifests)

    def require_room(self, final: Any, save_id: str, nbytes: int) -> None:
        """Do nothing: an object store does not tell its free space."""

    def commit(self, final: Any, save_id: str, manifest: bytes | None, *, overwrite: bool) -> None:
        """See `Store`."""
        if manifest is not None:
            self._write_manifest(final, manifest, replaces=overwrite and _saved_there(final) is not None)
            with _tolerated(f"what {final} held before is not removed"):
                _remove_leftovers(final, final.beneath(), [MANIFEST_NAME])
        self._leave(final)

    def discard(self, final: Any, save_id: str) -> None:
        """See `Store`."""
        with _tolerated(f"{final} holds files of a save that failed; the next save there removes them"):
            if final not in self._unsure and _saved_there(final) != save_id:
                there = final.beneath()
                manifests = [MANIFEST_NAME] if MANIFEST_NAME in there else []
                _remove_leftovers(final, there, manifests)
        self._unsure.discard(final)
        self._leave(final)

    def remove(self, path: Any) -> None:
        """See `Store`."""
        there = path.beneath()
        manifests = [name for name in there if _is_manifest(name)]
        path.remove_beneath(manifests)
        path.remove_beneath([name for name in there if name not in manifests])

    def replaced(self, final: Any) -> list[Path]:
        """Return an empty list: nothing steps aside."""
        return []

    def write(self, path: Any, data: bytes) -> None:
        """See `Store`."""
        path.write_bytes(data)

    def _write_manifest(self, final: ObjectPath, manifest: bytes, *, replaces: bool) -> None:
        path = final / MANIFEST_NAME
        try:
            if replaces:
                path.write_bytes(manifest)
            elif not path.create(manifest):
                raise CheckpointError(f"{final} was saved by another job meanwhile", hint="give each job its own name")
        except StoreError:
            self._unsure.add(final)  # its answer may be all that was lost: then files that are removed are missed
            if not path.is_file() or path.read_bytes() != manifest:
                raise
            self._unsure.discard(final)

    def _claim(self, final: ObjectPath) -> None:
        """Hold the name for as long as the save lasts: two writers there would spoil each other's files."""
        if not any(final.is_relative_to(other) for other in self._claimed) and hold_name(final):
            self._claimed.add(final)

    def _leave(self, final: ObjectPath) -> None:
        if final in self._claimed:
            self._claimed.discard(final)
            let_go_of(final)

    def _remove_unfinished_beside(self, final: ObjectPath) -> None:
        """Remove what killed saves have left in a folder that is this job's alone."""
        found: dict[str, list[str]] = {}
        for name in final.parent.beneath():
            directory, _, rest = name.partition("/")
            found.setdefault(directory, []).append(rest)
        for directory, names in found.items():
            is_unfinished = not any(map(_is_manifest, names))
            if directory != final.name and is_unfinished and all(map(is_of_a_save, names)):
                (final.parent / directory).remove_beneath(names)


@dataclass(slots=True)
class NewCheckpoint:
    """A checkpoint that one process writes.

    Attributes:
        directory: where its files go.
        save_id: of this save.
        own_names: whether their names must carry it.
        manifest: to be set; what makes it count.
    """

    directory: Location
    save_id: str
    own_names: bool
    manifest: bytes = b""

    def file_of(self, kind: str, rank: int) -> Location:
        """Return the data file of one rank."""
        return self.directory / rank_file_name(kind, rank, self.save_id if self.own_names else "")


@contextlib.contextmanager
def new_checkpoint(final: Location, save_id: str, *, overwrite: bool) -> Iterator[NewCheckpoint]:
    """Give a checkpoint to write that counts if the block ends well, and is removed if it does not.

    Raises:
        CheckpointError, ConfigError, StoreError: see `Store`, or the disk refused something.
    """
    note_stamps_in(final.parent)
    store = store_of(final)
    own_names = store.prepare(final, save_id, overwrite=overwrite)
    new = NewCheckpoint(store.directory(final, save_id), save_id, own_names)
    try:
        yield new
        store.commit(final, save_id, new.manifest, overwrite=overwrite)
    except BaseException as error:
        store.discard(final, save_id)
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {final}: {error.strerror or error}") from error
        raise


FILES, OBJECTS = Store(), ObjectStore()


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
        return is_data_file(file) or file == LATEST_NAME
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
