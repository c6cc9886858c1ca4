"""Detect the format of a checkpoint from file names, and from file contents only if the names are not sufficient."""

import re
from dataclasses import replace
from pathlib import Path

from fullshard.checkpoint.format import MANIFEST_NAME, trainer_state
from fullshard.checkpoint.objects import Location, location
from fullshard.checkpoint.offline.dcp import open_dcp
from fullshard.checkpoint.offline.dcp_metadata import METADATA_NAME
from fullshard.checkpoint.offline.huggingface import files_beside_weights, open_weights
from fullshard.checkpoint.offline.source import Source, open_native
from fullshard.checkpoint.offline.torch_state import open_torch_state
from fullshard.checkpoint.offline.xla import is_rank_file, open_xla, rank_files
from fullshard.checkpoint.weight_files import INDEX_NAME, PICKLED_INDEX_NAME, PICKLED_NAME, SINGLE_NAME
from fullshard.core.errors import CheckpointError

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"
_TRAINING_FILES = re.compile(
    r"(optimizer|scheduler|scaler|sampler|dl_state_dict|random_states|rng_state|custom_checkpoint|trainer_state"
    r"|training_args).*|(model|pytorch_model)_\d+\..*"
)
"""What Accelerate and Trainer save beside unsharded weights."""


def open_source(path: str | Location, *, optimizer: bool = True) -> Source:
    """Open a checkpoint of any supported format. Include the optimizer's state if it exists and `optimizer` is set.

    `path` is a directory or a file that `torch.save` wrote. For an Accelerate checkpoint of several models, it is the
    directory of one of them.
    """
    path = location(path)
    source = _native(path)
    if source is not None:
        if not optimizer:
            source.contents = replace(source.contents, optimizer=None)
        return source
    if not isinstance(path, Path):
        raise CheckpointError(
            f"{path} does not hold a fullshard checkpoint, and other formats cannot be read from an object store",
            hint="copy it to a local directory first",
        )
    if not path.is_dir():
        return _file(path, optimizer)
    source = _accelerate(path, optimizer) or _directory(path, optimizer)
    if source is not None:
        return source
    entries = sorted(entry.name for entry in path.iterdir())
    inside = [name for name in entries if (path / name / MANIFEST_NAME).is_file()]
    formats = "see docs/migration.md for the formats that can be read"
    raise CheckpointError(
        f"{path} does not hold a checkpoint in a known format; it holds {', '.join(entries[:10]) or 'nothing'}",
        hint=f"did you mean {path / inside[-1]}?" if inside else formats,
    )


def _native(path: Location) -> Source | None:
    """Open a native checkpoint, or return None if there is none."""
    # A Trainer checkpoint is found under Trainer's directory, which also contains the configuration and tokenizer.
    state = trainer_state(path)
    if not (state / MANIFEST_NAME).is_file():
        return None
    source = open_native(state)
    if state != path and isinstance(path, Path):
        if not any(record.is_stored for record in source.contents.parameters.values()):
            source.close()
            return None  # its weights are in the parent directory
        source.title, source.path = "checkpoint of Trainer on fullshard", path
    return source


def _accelerate(path: Path, optimizer: bool, index: int = 0) -> Source | None:
    directories = [path / f"{name}_{index}" for name in ((_MODEL, _OPTIMIZER) if optimizer else (_MODEL,))]
    found = [directory for directory in directories if (directory / METADATA_NAME).is_file()]
    if directories[0] in found:
        return open_dcp("Accelerate / Trainer checkpoint (sharded)", path, found, notes=_left_over(path, found))
    model, state = (path / f"{name}.bin" for name in (_MODEL, _OPTIMIZER))
    if not model.is_file():
        return None
    has_state = optimizer and state.is_file()
    notes = _left_over(path, [model, state] if has_state else [model])
    title = "Accelerate / Trainer checkpoint (full)"
    return open_torch_state(title, model, optimizer=state if has_state else False, notes=notes)


def _file(path: Path, optimizer: bool) -> Source:
    if not path.is_file():
        raise CheckpointError(f"no checkpoint was found at {path}")
    if is_rank_file(path):
        return open_xla(path.parent, rank_files(path.parent), optimizer=optimizer)
    return open_torch_state(f"torch file ({path.name})", path, optimizer=optimizer)


def _directory(path: Path, optimizer: bool) -> Source | None:
    if (path / METADATA_NAME).is_file():
        name, _, number = path.name.rpartition("_")
        if name == _MODEL and number.isdigit() and optimizer:
            return _accelerate(path.parent, optimizer, int(number))
        return open_dcp("torch distributed checkpoint (DCP)", path, [path], optimizer=optimizer)
    files = rank_files(path)
    if files and is_rank_file(files[0]):
        return open_xla(path, files, optimizer=optimizer)
    if any((path / name).is_file() for name in (SINGLE_NAME, INDEX_NAME, PICKLED_NAME, PICKLED_INDEX_NAME)):
        names = sorted(entry.name for entry in path.iterdir() if _TRAINING_FILES.fullmatch(entry.name))
        notes = [f"not converted: {', '.join(names)}"] if names else []
        if any(name.startswith(_OPTIMIZER) for name in names):
            section = "see 'The optimizer of unsharded checkpoints' in docs/migration.md"
            notes.append(f"the optimizer's file does not name its parameters: {section}")
        source = open_weights(path)
        source.contents = replace(source.contents, notes=notes)
        if names:
            source.title = "unsharded checkpoint of Accelerate or Trainer"
        return source
    return None


def _left_over(path: Path, used: list[Path]) -> list[str]:
    """Return a note that lists files of another program's training state that are not converted."""
    names = sorted(entry.name for entry in {*path.iterdir()} - {*used, *files_beside_weights(path)})
    return [f"not converted: {', '.join(names)}"] if names else []
