"""Read native checkpoints as a source, which returns only bytes that match their checksums."""

from __future__ import annotations

import torch

from fullshard.checkpoint.elements import dtype_of
from fullshard.checkpoint.format import MANIFEST_NAME, is_for_others, read_manifest
from fullshard.checkpoint.objects import Location
from fullshard.checkpoint.offline.source import Contents, Kind, Source
from fullshard.checkpoint.readers import Readers
from fullshard.checkpoint.verify import quick_problems
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval


def open_native(path: Location) -> Source:
    """Open a directory that `save_checkpoint` wrote, or raise an error that lists what is missing or damaged."""
    manifest = read_manifest(path)
    if problems := quick_problems(path, manifest):
        raise CheckpointError(f"{path} is damaged:\n" + "\n".join(problems))
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in {MANIFEST_NAME, *manifest.files})
    notes = [f"{name}: {'for other programs' if is_for_others(name) else 'not part of it'}" for name in others]
    held = manifest.parameters, manifest.buffers, manifest.optimizer, manifest.states
    contents = Contents(*held, manifest=manifest, notes=notes)
    readers = Readers(path, manifest)
    records = {(kind, name): record for kind, name, record in contents.tensors()}

    def read(kind: Kind, name: str, interval: Interval) -> torch.Tensor:
        record = records[kind, name]
        out = torch.empty(interval.numel, dtype=dtype_of(record))
        readers.fill(out, kind, name, record, interval)
        return out

    return Source("fullshard checkpoint", path, contents, read, rank_state=readers.rank_state, close=readers.close)
