"""Write a checkpoint that also contains torch's distributed format, for programs that cannot read the native format.

step-1000/
  manifest.json, ...          the checkpoint, which fullshard loads regardless of the other files
  pytorch_model_fsdp_0/       weights, as Accelerate and the Trainer save and load them
  optimizer_0/                optimizer state
"""

from dataclasses import replace
from pathlib import Path

from fullshard.checkpoint.format import part_paths
from fullshard.checkpoint.objects import Location, on_this_host
from fullshard.checkpoint.offline.dcp import write_dcp
from fullshard.checkpoint.offline.source import nbytes_of, open_native
from fullshard.checkpoint.save import Pending
from fullshard.checkpoint.storage import (
    discard_directory,
    make_temp_directory,
    refuse_file,
    remove_directory,
    require_room,
    sync_directory,
)
from fullshard.checkpoint.store import new_save_id


def with_torch_format(pending: Pending) -> Pending:
    """Return a save that completes the checkpoint, and then adds torch's format on rank 0, one tensor at a time."""

    def write(path: Location) -> None:
        write_torch_format(on_this_host(path), on_this_host(path))

    return replace(pending, then=("writing torch's format into it", write))


def write_torch_format(checkpoint: Path, directory: Path) -> None:
    """Convert a checkpoint to torch's format in `directory`. Either all new directories replace old ones or none."""
    # A temporary directory next to the checkpoint, which the next save removes if this process is killed.
    temp = make_temp_directory(checkpoint, new_save_id(), overwrite=True)
    try:
        for index, part in enumerate(part_paths(checkpoint) or [checkpoint]):
            with open_native(part) as source:
                require_room(temp, sum(nbytes_of(record) for _, _, record in source.contents.tensors()))
                write_dcp(source, temp / f"{index}", index=index)
        # Weights come last, because a program that finds them may expect the optimizer's state.
        for written in temp.glob("*/*"):
            refuse_file(directory / written.name)  # before anything is replaced
        for written in sorted(temp.glob("*/*"), key=lambda path: path.name):
            if (directory / written.name).exists():
                remove_directory(directory / written.name)
            written.rename(directory / written.name)
        sync_directory(directory)
    finally:
        discard_directory(temp)
