"""The checkpoints in a directory: which is the newest whole one, and which are old enough to go."""

from __future__ import annotations

import logging
from pathlib import Path

from fullshard.checkpoint.format import MANIFEST_NAME, Manifest, read_manifest
from fullshard.checkpoint.storage import OLD_PREFIX, TEMP_PREFIX, remove_directory
from fullshard.checkpoint.verify import quick_problems, verify_checkpoint
from fullshard.core.errors import CheckpointError

logger = logging.getLogger(__name__)

LATEST_NAME = "LATEST"
"""A file that holds the name of the last checkpoint saved. A hint for people and scripts; nothing here reads it."""


def latest_checkpoint(root: str | Path, *, thorough: bool = False) -> Path | None:
    """The newest valid checkpoint directly inside `root`. Not a collective.

    Every newer one that is not valid is logged with the reason. Loading checks every byte anyway, so by default only
    the manifest and the presence and size of each file are looked at.

    Args:
        root: directory that checkpoints are saved into.
        thorough: read and check every byte first; takes as long as reading the checkpoint.

    Returns:
        Its path, or None if there is none.
    """
    for directory, manifest in _newest_first(Path(root)):
        problems = list(verify_checkpoint(directory).problems) if thorough else quick_problems(directory, manifest)
        if not problems:
            return directory
        logger.warning("skipping checkpoint %s: %s (%d problems)", directory, problems[0], len(problems))
    return None


def remove_oldest(newest: Path, *, keep: int) -> list[Path]:
    """Remove the oldest checkpoints beside `newest` until `keep` are left, which include it whatever its age.

    Directories that hold no manifest of ours are never touched.

    Returns:
        What was removed.
    """
    others = [directory for directory, _ in _newest_first(newest.parent) if directory != newest]
    removed = others[keep - 1 :]
    for directory in reversed(removed):
        remove_directory(directory)
    return removed


def _newest_first(root: Path) -> list[tuple[Path, Manifest]]:
    """Checkpoints with a readable manifest, newest first; the others are logged."""
    found = []
    for directory in sorted(root.iterdir()) if root.is_dir() else []:
        if directory.name.startswith(TEMP_PREFIX) or not directory.is_dir() or _is_superseded(directory):
            continue
        if not (directory / MANIFEST_NAME).exists():
            if any(directory.glob("model-rank*.safetensors")):
                logger.warning("skipping checkpoint %s: it has no %s", directory, MANIFEST_NAME)
            continue
        try:
            found.append((directory, read_manifest(directory)))
        except CheckpointError as error:
            logger.warning("skipping checkpoint %s: %s", directory, error)
    return sorted(found, key=lambda item: item[1].saved_at, reverse=True)


def _is_superseded(directory: Path) -> bool:
    """Whether this is the old version of a checkpoint whose replacement is in place."""
    if not directory.name.startswith(OLD_PREFIX):
        return False
    name = directory.name.removeprefix(OLD_PREFIX).rpartition("-")[0]
    return directory.with_name(name).exists()
