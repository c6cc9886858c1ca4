"""Our own checkpoints as a source: every byte handed out has passed its checksum."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fullshard.checkpoint.elements import dtype_of
from fullshard.checkpoint.format import MANIFEST_NAME, is_for_others, read_manifest
from fullshard.checkpoint.objects import Location
from fullshard.checkpoint.offline.source import Contents, Kind, Source
from fullshard.checkpoint.readers import Readers
from fullshard.checkpoint.verify import quick_problems
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval


class NativeSource(Source):
    """A directory that `save_checkpoint` wrote.

    Raises:
        CheckpointError: files are missing or cut, or the manifest is damaged; all problems are listed.
    """

    title = "fullshard checkpoint"

    def __init__(self, path: Location) -> None:
        self.path = path
        manifest = read_manifest(path)
        if problems := quick_problems(path, manifest):
            raise CheckpointError(f"{path} is damaged:\n" + "\n".join(problems))
        self.contents = Contents(
            parameters=manifest.parameters,
            buffers=manifest.buffers,
            optimizer=manifest.optimizer,
            states=manifest.states,
            manifest=manifest,
            notes=_notes(path, manifest.files),
        )
        self._readers = Readers(path, manifest)
        self._records = {(kind, name): record for kind, name, record in self.contents.tensors()}

    def read(self, kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        """See `Source.read`."""
        record = self._records[kind, name]
        out = torch.empty(interval.numel, dtype=dtype_of(record))
        self._readers.fill(out, kind, name, record, interval)
        return out

    def rank_state(self, rank: int) -> Mapping[str, torch.Tensor]:
        """See `Source.rank_state`."""
        return self._readers.rank_state(rank)

    def close(self) -> None:
        """Close its files."""
        self._readers.close()


def _notes(path: Location, files: Mapping[str, object]) -> list[str]:
    others = sorted(entry.name for entry in path.iterdir() if entry.name != MANIFEST_NAME and entry.name not in files)
    return [f"{name}: {'for other programs' if is_for_others(name) else 'no part of it'}" for name in others]
