"""A checkpoint that holds torch's distributed format too, for programs that read nothing else.

step-1000/
  manifest.json, ...          the checkpoint; what is loaded, whatever becomes of the rest
  pytorch_model_fsdp_0/       weights, as Accelerate and the Trainer save and load them
  optimizer_0/                optimizer state
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

from fullshard.checkpoint.format import part_paths
from fullshard.checkpoint.objects import Location, on_this_host
from fullshard.checkpoint.offline.dcp import write_dcp
from fullshard.checkpoint.offline.native import open_native
from fullshard.checkpoint.offline.source import nbytes_of
from fullshard.checkpoint.save import Pending
from fullshard.checkpoint.storage import (
    discard_directory,
    make_temp_directory,
    refuse_file,
    remove_directory,
    require_room,
    sync_directory,
)


def with_torch_format(pending: Pending) -> Pending:
    """Return a save that writes torch's format into the checkpoint, too, once that is complete.

    Rank 0 makes it from the files, one tensor at a time: no rank gathers anything, so it may go on in the background.
    The disk needs room for it twice.
    """

    def write(path: Location) -> None:
        write_torch_format(on_this_host(path), on_this_host(path))

    return replace(pending, then=("writing torch's format into it", write))


def write_torch_format(checkpoint: Path, directory: Path, *, first: int = 0) -> None:
    """Write one or several checkpoints in torch's format, as `pytorch_model_fsdp_0`, `optimizer_0`, and so on.

    What bears one of these names in `directory` is replaced. All of them appear, or none.
    """
    save_id = uuid.uuid4().hex[:16]
    # Beside the checkpoint, under the name of a save under way, which the next save removes if this one dies.
    temp = make_temp_directory(checkpoint, save_id, overwrite=True)
    try:
        for index, part in enumerate(part_paths(checkpoint) or [checkpoint], first):
            with open_native(part) as source:
                require_room(temp, sum(nbytes_of(record) for _, _, record in source.contents.tensors()))
                write_dcp(source, temp / f"{index}", index=index)
        # Weights last: a program that finds them may rely on the optimizer's state.
        for written in temp.glob("*/*"):
            refuse_file(directory / written.name)  # before anything is replaced
        for written in sorted(temp.glob("*/*"), key=lambda path: path.name):
            if (directory / written.name).exists():
                remove_directory(directory / written.name)
            written.rename(directory / written.name)
        sync_directory(directory)
    finally:
        discard_directory(temp)
