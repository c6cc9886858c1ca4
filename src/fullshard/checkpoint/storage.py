"""Create directories and small files atomically: either they are complete, or they do not exist."""

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from fullshard.core.errors import CheckpointError
from fullshard.core.sizes import format_nbytes

logger = logging.getLogger(__name__)

TEMP_PREFIX, OLD_PREFIX = ".tmp-", ".old-"
_TEMPORARY = re.compile(re.escape(TEMP_PREFIX) + r"(.+)-([0-9a-f]{16}|removed)")


def write_file(path: Path, data: bytes) -> None:
    """Create or replace a small file atomically, even if there is a crash or another process writes it, too."""
    temporary = _own_name(path)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def _own_name(path: Path) -> Path:
    """Return a temporary name next to `path` that no other thread or process uses. It may be temporary itself."""
    temporary = _TEMPORARY.fullmatch(path.name)
    return path.with_name(f"{TEMP_PREFIX}{temporary[1] if temporary else path.name}-{secrets.token_hex(8)}")


def sync_directory(path: Path) -> None:
    """Flush the entries of a directory, or the contents of a file, to disk, so that they survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temp_directory(final: Path, save_id: str) -> Path:
    """Return the directory in which a save writes its files before it is renamed to `final`."""
    return final.with_name(f"{TEMP_PREFIX}{final.name}-{save_id}")


def make_temp_directory(final: Path, save_id: str, *, overwrite: bool) -> Path:
    """Create the directory of a save, and lock it until it is renamed to `final`. Remove those of killed saves."""
    try:
        if final.parent.is_dir():
            restore_replaced(final)
        _refuse_what_is_there(final, overwrite=overwrite)
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final)
        temp = temp_directory(final, save_id)
        _make_held(temp)
    except OSError as error:
        raise CheckpointError(f"cannot create a directory in the parent of {final}: {error}") from error
    return temp


def _refuse_what_is_there(final: Path, *, overwrite: bool) -> None:
    """Raise `CheckpointError` if something exists at `final` that this save may not replace."""
    if os.path.lexists(final) and not overwrite:
        raise CheckpointError(
            f"{final} already exists", hint="choose another name, or pass overwrite=True (--overwrite)"
        )
    refuse_file(final)


def refuse_file(path: Path) -> None:
    """Raise `CheckpointError` if `path` is a file. A checkpoint is a directory, so this is a file of the user's."""
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, but a checkpoint is a directory", hint="choose another name, or remove the file"
        )


def refuse_current(path: Path) -> None:
    """Raise `CheckpointError` if `path` is or contains the current directory, which would be removed."""
    try:
        current = Path.cwd()
    except FileNotFoundError:  # it no longer exists
        return
    if path.exists() and current.is_relative_to(path.resolve()):
        raise CheckpointError(
            f"{path} is the current directory or contains it, and replacing it would remove its contents",
            hint="use a directory inside it",
        )


def require_room(directory: Path, nbytes: int) -> None:
    """Raise `CheckpointError` if the file system of `directory` has less than `nbytes` bytes of free space."""
    usage = shutil.disk_usage(directory)
    if usage.total and usage.free < nbytes:
        raise CheckpointError(
            f"{directory.parent} does not have enough space: the checkpoint needs {format_nbytes(nbytes)}, but "
            f"only {format_nbytes(usage.free)} is free",
            hint="remove old checkpoints (total_limit does this after each save), or save elsewhere",
        )


def discard_directory(temp: Path) -> None:
    """Remove the directory of a failed save. If files remain, the next save in the same place removes them."""
    shutil.rmtree(temp, ignore_errors=True)
    if temp.exists():
        logger.warning("%s remains from a failed save; the next save in the same directory removes it", temp)
    for held in [path for path in _HELD if path.is_relative_to(temp)]:
        _let_go(held)


def commit_directory(temp: Path, final: Path, save_id: str, *, overwrite: bool) -> None:
    """Give a complete directory its final name. If a directory already has this name, it is removed only afterwards.

    POSIX cannot replace a directory that is not empty, so the old one is renamed first. If the process crashes between
    the two renames, the old directory remains complete, and `restore_replaced` gives it its name back. Nothing else is
    replaced, even if it was created after the save began, because a directory cannot be renamed to a file, a link or a
    directory that is not empty.
    """
    sync_directory(temp)
    _refuse_what_is_there(final, overwrite=overwrite)
    old = final.with_name(f"{OLD_PREFIX}{final.name}-{save_id}")
    if final.exists():
        final.rename(old)
    try:
        temp.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    _let_go(temp)  # not earlier: another save would treat it as a leftover
    sync_directory(final.parent)
    for stale in replaced_directories(final):
        try:
            _remove_tree(stale)
        except OSError as error:  # the save is complete anyway, and the next one tries again
            logger.warning("%s, which %s has replaced, cannot be removed: %s", stale, final, error)


def restore_replaced(final: Path) -> None:
    """If a commit was killed between its two renames and `final` is missing, give the old directory its name back."""
    if final.exists():
        return
    for old in replaced_directories(final):
        old.rename(final)
        sync_directory(final.parent)
        return


def replaced_directories(final: Path) -> list[Path]:
    """Return directories that had the name `final` until a commit renamed them, and that have not been removed yet."""
    return _beside(final, OLD_PREFIX)


def remove_directory(path: Path) -> None:
    """Remove a checkpoint. A crash leaves nothing that looks like one. Another save may remove it at the same time."""
    aside = _own_name(path)
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    sync_directory(path.parent)
    _remove_tree(aside)


def _remove_tree(path: Path) -> None:
    """Remove a directory. If it is a link to a checkpoint that was moved elsewhere, remove only the link."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    while path.exists():
        try:
            shutil.rmtree(path)
        except OSError as error:  # another save is also removing it
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise


_HELD: dict[Path, int] = {}
"""Temporary directories of this process, each with the descriptor that holds a lock on it."""


def _make_held(temp: Path) -> None:
    """Create a directory and lock it, so that other processes see that it is in use until this process ends."""
    while temp not in _HELD:
        temp.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another save has removed it as a leftover before it was locked
            descriptor = os.open(temp, os.O_RDONLY)
            with contextlib.suppress(OSError):  # the file system does not support locks
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            if temp.exists():
                _HELD[temp] = descriptor
            else:
                os.close(descriptor)


def _let_go(temp: Path) -> None:
    if (descriptor := _HELD.pop(temp, None)) is not None:
        os.close(descriptor)


@contextlib.contextmanager
def unheld(path: Path, lock: int = fcntl.LOCK_EX) -> Iterator[bool | None]:
    """Yield True if `path` is unlocked, and keep it locked while the context is active.

    Yield False if another process has locked it, or None if it cannot be opened or its file system does not support
    locks. With a shared lock, several processes can check `path` at the same time, without mistaking each other for a
    process that uses it.
    """
    descriptor, is_unheld = -1, None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
        is_unheld = True
    except BlockingIOError:
        is_unheld = False
    except OSError:  # it no longer exists, cannot be read, or cannot be locked
        pass
    try:
        yield is_unheld
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _remove_leftovers(final: Path) -> None:
    """Remove temporary directories in the parent of `final` that no process has locked."""
    # Without file locks, remove only those of saves to the same name, because no other job should save to that name.
    same_name = _beside(final, TEMP_PREFIX)
    for path in sorted(final.parent.iterdir()):
        if path not in same_name and not (_TEMPORARY.fullmatch(path.name) and path.is_dir()):
            continue
        with unheld(path) as is_unheld:
            if is_unheld is False and path in same_name:
                raise CheckpointError(
                    f"another process is saving to {final}: it has locked {path.name}",
                    hint="give each job its own directory",
                )
            if is_unheld or path in same_name:
                remove_directory(path)  # not by its own name: a save that was about to lock it creates it again


def _beside(final: Path, prefix: str) -> list[Path]:
    """Return the directories with this prefix that saves to `final` have created, which end in a hyphen and an id."""
    entries = final.parent.iterdir() if final.parent.is_dir() else ()
    return sorted(path for path in entries if path.name.rpartition("-")[0] == prefix + final.name and path.is_dir())
