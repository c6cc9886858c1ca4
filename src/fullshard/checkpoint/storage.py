"""Directories and small files that are either whole or not there."""

from __future__ import annotations

import contextlib
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
_TEMPORARY = re.compile(re.escape(TEMP_PREFIX) + r".+-([0-9a-f]{16}|removed)")


def write_file(path: Path, data: bytes) -> None:
    """Create or replace a small file so that a crash leaves the old or the new contents, also with several writers."""
    temporary = _own_name(path)
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def _own_name(path: Path) -> Path:
    """Return a unique name beside `path`, unique in this process too."""
    return path.with_name(f"{TEMP_PREFIX}{path.name}-{secrets.token_hex(8)}")


def sync_directory(path: Path) -> None:
    """Make the names in a directory, or the contents of a file, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temp_directory(final: Path, save_id: str) -> Path:
    """Return the directory that a save writes into before it is committed to `final`."""
    return final.with_name(f"{TEMP_PREFIX}{final.name}-{save_id}")


def make_temp_directory(final: Path, save_id: str, *, overwrite: bool) -> Path:
    """Create the directory a save fills before it is committed to `final`; this process holds it until then.

    What saves beside it left behind when they were killed is removed.
    """
    try:
        if final.parent.is_dir():
            restore_replaced(final)
        _refuse_what_is_there(final, overwrite=overwrite)
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final)
        temp = temp_directory(final, save_id)
        _make_held(temp)
    except OSError as error:
        raise CheckpointError(f"cannot prepare a directory beside {final}: {error}") from error
    return temp


def _refuse_what_is_there(final: Path, *, overwrite: bool) -> None:
    """Raise `CheckpointError` if something bears the name that may not be replaced."""
    if os.path.lexists(final) and not overwrite:
        raise CheckpointError(f"{final} exists already", hint="choose another name, or pass overwrite=True")
    refuse_file(final)


def refuse_file(path: Path) -> None:
    """Raise `CheckpointError` if there is a file where a directory is to be: its contents are unknown."""
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, and a checkpoint is a directory", hint="choose another name, or remove the file"
        )


def refuse_current(path: Path) -> None:
    """Raise `CheckpointError` if replacing a directory would take away the current one, whose content is no checkpoint.

    An `--overwrite` of `.` is a slip: all that lies there would be removed.
    """
    try:
        current = Path.cwd()
    except FileNotFoundError:  # it is gone already
        return
    if path.exists() and current.is_relative_to(path.resolve()):
        raise CheckpointError(
            f"{path} is the current directory or contains it: replacing it would remove its contents",
            hint="name a directory in it",
        )


def require_room(directory: Path, nbytes: int) -> None:
    """Raise `CheckpointError` if the file system of `directory` has less room than `nbytes`."""
    usage = shutil.disk_usage(directory)
    if usage.total and usage.free < nbytes:
        raise CheckpointError(
            f"{directory.parent} has no room: the checkpoint needs {format_nbytes(nbytes)}, "
            f"{format_nbytes(usage.free)} are free",
            hint="remove old checkpoints (total_limit does it after each save), or save elsewhere",
        )


def discard_directory(temp: Path) -> None:
    """Remove the directory of a save that failed. The next save beside it removes any remains."""
    shutil.rmtree(temp, ignore_errors=True)
    if temp.exists():
        logger.warning("%s is left of a save that failed; the next save beside it removes it", temp)
    for held in [path for path in _HELD if path.is_relative_to(temp)]:
        _let_go(held)


def commit_directory(temp: Path, final: Path, save_id: str, *, overwrite: bool) -> None:
    """Give a complete directory its final name; what bore that name is removed only after that.

    POSIX cannot replace a directory that is not empty, so the old one steps aside under a name of its own first. A
    crash between the two renames leaves it there, whole, and `restore_replaced` brings it back. Nothing else is
    replaced, also if it has appeared since the save began: a rename of a directory fails where there is a file, a link
    or a directory with anything in it.
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
    _let_go(temp)  # not before: another save would take it for a leftover
    sync_directory(final.parent)
    for stale in replaced_directories(final):
        try:
            _remove_tree(stale)
        except OSError as error:  # the save is whole all the same, and the next one tries again
            logger.warning("%s, which %s has replaced, cannot be removed: %s", stale, final, error)


def restore_replaced(final: Path) -> None:
    """Bring back the directory that was stepping aside when a commit was killed, if `final` is missing."""
    if final.exists():
        return
    for old in replaced_directories(final):
        old.rename(final)
        sync_directory(final.parent)
        return


def replaced_directories(final: Path) -> list[Path]:
    """Return the directories that bore the name `final` until a commit that never ended."""
    return _beside(final, OLD_PREFIX)


def remove_directory(path: Path) -> None:
    """Remove a checkpoint so that a crash on the way leaves nothing that looks like one.

    Two saves beside each other may both find it the oldest: if another has removed it, all is done.
    """
    aside = _own_name(path)
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    sync_directory(path.parent)
    _remove_tree(aside)


def _remove_tree(path: Path) -> None:
    """Remove a directory; of a link, with which a checkpoint was moved elsewhere, only the link."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    while path.exists():
        with contextlib.suppress(FileNotFoundError):  # another save removes it, too
            shutil.rmtree(path)


_HELD: dict[Path, int] = {}
"""Temporary directories of this process, each with the descriptor that holds a lock on it."""


def _make_held(temp: Path) -> None:
    """Create a directory, and lock it for as long as this process lives, so that others see that it is in use."""
    while temp not in _HELD:
        temp.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another save has taken it for a leftover before it was locked
            descriptor = os.open(temp, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks
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
    """Yield whether it has no living holder and none comes within; None if the file system cannot tell.

    A shared lock keeps nobody else from looking, who would take this for a holder.
    """
    descriptor, is_unheld = -1, None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
        is_unheld = True
    except BlockingIOError:
        is_unheld = False
    except OSError:  # it is gone, or may not be read; or a file system without locks
        pass
    try:
        yield is_unheld
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _remove_leftovers(final: Path) -> None:
    """Remove temporary directories beside `final` that no process holds.

    Where locks do not work, only those of saves to the same name go: no other job should be saving to it.
    """
    same_name = _beside(final, TEMP_PREFIX)
    for path in sorted(final.parent.iterdir()):
        if path not in same_name and not (_TEMPORARY.fullmatch(path.name) and path.is_dir()):
            continue
        with unheld(path) as is_unheld:
            if is_unheld is False and path in same_name:
                raise CheckpointError(
                    f"another process is saving to {final}: it holds {path.name}",
                    hint="give each job its own directory",
                )
            if is_unheld or path in same_name:
                _remove_tree(path)


def _beside(final: Path, prefix: str) -> list[Path]:
    """Return directories that saves to `final` made: its name between `prefix` and a word without a hyphen."""
    entries = final.parent.iterdir() if final.parent.is_dir() else ()
    return sorted(path for path in entries if path.name.rpartition("-")[0] == prefix + final.name and path.is_dir())
