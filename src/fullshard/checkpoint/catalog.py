"""Find the newest valid checkpoint in a directory, and remove old checkpoints."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from fullshard.checkpoint.format import MANIFEST_NAME, Manifest, part_paths, read_manifest, trainer_state
from fullshard.checkpoint.objects import Location, entries_of, location
from fullshard.checkpoint.storage import OLD_PREFIX, TEMP_PREFIX
from fullshard.checkpoint.store import remove_checkpoint
from fullshard.checkpoint.verify import part_problems, quick_problems, verify_checkpoint
from fullshard.core.errors import CheckpointError, ConfigError, plural, printable

logger = logging.getLogger(__name__)


def latest_checkpoint(root: str | Location, *, thorough: bool = False) -> Location | None:
    """Return the newest valid checkpoint directly inside `root`. This is not a collective.

    Log each newer checkpoint that is invalid, with the reason. By default, only the manifest and the presence and size
    of each file are checked, because loading checks every byte anyway.

    Args:
        root: directory that checkpoints are saved into.
        thorough: also read and check every byte, which takes as long as reading the checkpoint.

    Returns:
        The path of the checkpoint, or None if there is no valid one.
    """
    return next(whole_checkpoints(root, thorough=thorough), None)


def whole_checkpoints(root: str | Location, *, thorough: bool = False) -> Iterator[Location]:
    """Yield the valid checkpoint directories directly inside `root`, newest first. See `latest_checkpoint`."""
    for directory, parts in _newest_first(location(root)):
        problems = _problems(parts, thorough=thorough)
        if not problems:
            yield directory
        else:
            logger.warning(
                "skipping checkpoint %s", printable(f"{directory}: {problems[0]} ({plural(len(problems), 'problem')})")
            )


def remove_oldest(newest: Location, *, keep: int) -> list[Location]:
    """Remove the oldest checkpoints beside `newest` until `keep` are left, and return them. `newest` always stays."""
    others = [directory for directory, _ in _newest_first(newest.parent) if directory != newest]
    removed = others[keep - 1 :]
    for directory in reversed(removed):
        remove_checkpoint(directory)
    return removed


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of `prune`, newest first. `damaged` lists incomplete checkpoints, each with its first problem."""

    kept: tuple[Location, ...]
    removed: tuple[Location, ...]
    damaged: tuple[tuple[Location, str], ...]


def prune(root: Location, *, keep: int, thorough: bool = False, dry_run: bool = False) -> Pruned:
    """Remove the oldest complete checkpoints in `root` until `keep` are left. Damaged ones are never removed."""
    if keep < 1:
        raise ConfigError(f"keep is {keep}, which would leave no checkpoint", hint="use 1 or more")
    whole, damaged = [], []
    for directory in [path for path in entries_of(root) if path.is_dir()]:
        if directory.name.startswith((TEMP_PREFIX, OLD_PREFIX)):
            damaged.append((directory, "it is from a save that was killed or is still running"))
            continue
        parts, problem = _checkpoint_in(directory)
        if parts:
            problem = next(iter(_problems(parts, thorough=thorough)), "")
        elif not problem and trainer_state(directory) != directory:
            problem = "it belongs to Trainer and may be its best checkpoint; use save_total_limit to remove old ones"
        if problem:
            damaged.append((directory, problem))
        elif parts:
            whole.append((parts[0][1].saved_at, directory))
    newest_first = [directory for _, directory in sorted(whole, key=lambda item: (item[0], item[1].name), reverse=True)]
    for directory in [] if dry_run else reversed(newest_first[keep:]):
        remove_checkpoint(directory)
    return Pruned(tuple(newest_first[:keep]), tuple(newest_first[keep:]), tuple(damaged))


def _newest_first(root: Location) -> list[tuple[Location, list[tuple[Location, Manifest]]]]:
    """Return the readable checkpoints, newest first, with one manifest per part. Log those that cannot be read."""
    found = []
    for directory in entries_of(root) if root.is_dir() else []:
        if directory.name.startswith(TEMP_PREFIX) or not directory.is_dir():
            continue
        newer = directory.name.removeprefix(OLD_PREFIX).rpartition("-")[0]
        if directory.name.startswith(OLD_PREFIX) and directory.with_name(newer).exists():
            continue  # the checkpoint of this name has replaced it
        parts, problem = _checkpoint_in(directory)
        if problem:
            logger.warning("skipping checkpoint %s", printable(f"{directory}: {problem}"))
        elif parts:
            found.append((directory, parts))
    return sorted(found, key=lambda item: (item[1][0][1].saved_at, item[0].name), reverse=True)


def _checkpoint_in(directory: Location) -> tuple[list[tuple[Location, Manifest]], str]:
    """Return (directory, manifest) of each model in a checkpoint, or an empty list and the reason why it is invalid."""
    places = [directory, *part_paths(directory)]
    try:
        parts = [(place, read_manifest(place)) for place in places if (place / MANIFEST_NAME).exists()]
    except CheckpointError as error:
        return [], str(error)
    if parts or not any(directory.glob("model-rank*.safetensors")):
        return parts, ""
    return [], f"it has no {MANIFEST_NAME}"


def _problems(parts: list[tuple[Location, Manifest]], *, thorough: bool) -> list[str]:
    return part_problems(parts) + [
        problem
        for part, manifest in parts
        for problem in (verify_checkpoint(part).problems if thorough else quick_problems(part, manifest))
    ]
