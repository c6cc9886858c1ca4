"""Detect the kind of a checkpoint. Looks at names first, and inside files where names do not tell."""

from __future__ import annotations

from pathlib import Path

from fullshard.checkpoint.format import MANIFEST_NAME, trainer_state
from fullshard.checkpoint.objects import Location, ObjectPath, location
from fullshard.checkpoint.offline.dcp import DcpSource
from fullshard.checkpoint.offline.dcp_metadata import METADATA_NAME
from fullshard.checkpoint.offline.huggingface import HuggingFaceSource, files_beside_weights, has_safetensors
from fullshard.checkpoint.offline.native import NativeSource
from fullshard.checkpoint.offline.source import Source
from fullshard.checkpoint.offline.torch_state import bin_files, open_torch_state
from fullshard.checkpoint.offline.xla import is_rank_file, open_xla, rank_files
from fullshard.checkpoint.weight_files import PICKLED_INDEX_NAME, PICKLED_NAME
from fullshard.core.errors import CheckpointError

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"


def open_source(path: str | Location, *, optimizer: bool = True, index: int = 0) -> Source:
    """Open any checkpoint that can be read here.

    Args:
        path: a directory, or a file of `torch.save`.
        optimizer: also open the optimizer's state, if it is there. A single DCP directory holds both.
        index: which model of a checkpoint of Accelerate with several.

    Raises:
        CheckpointError: nothing here that is known, or a checkpoint that is damaged.
    """
    path = location(path)
    if index:
        return _further(path, optimizer, index)
    if isinstance(path, ObjectPath):
        return _in_a_store(path)
    if path.is_file():
        if is_rank_file(path):
            return open_xla(path.parent, rank_files(path.parent), optimizer=optimizer)
        return open_torch_state(f"torch file ({path.name})", path, [path], optimizer=optimizer)
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}")
    for open_it in (_native, _of_trainer, _accelerate_sharded, _dcp, _accelerate_full, _xla, _hugging_face):
        source = open_it(path, optimizer, index)
        if source is not None:
            return source
    entries = sorted(entry.name for entry in path.iterdir())
    inside = [name for name in entries if (path / name / MANIFEST_NAME).is_file()]
    raise CheckpointError(
        f"{path} holds no checkpoint of a known kind; it holds {', '.join(entries[:10]) or 'nothing'}",
        hint=f"did you mean {path / inside[-1]}?" if inside else "docs/migration.md lists what can be read",
    )


def _further(path: Location, optimizer: bool, index: int) -> Source:
    """Return one of several models, which only checkpoints of Accelerate have."""
    for open_it in (_accelerate_sharded, _accelerate_full):
        source = open_it(path, optimizer, index) if isinstance(path, Path) else None
        if source is not None:
            return source
    raise CheckpointError(
        f"{path} holds no model {index} of a checkpoint of Accelerate with several", hint="leave it out"
    )


def _in_a_store(path: ObjectPath) -> Source:
    directory = trainer_state(path)
    if (directory / MANIFEST_NAME).is_file():
        return NativeSource(directory)
    raise CheckpointError(
        f"{path} holds no checkpoint of fullshard's, and those of others are not read from an object store",
        hint="copy it to a directory first",
    )


def _native(path: Path, optimizer: bool, index: int) -> Source | None:
    return NativeSource(path) if (path / MANIFEST_NAME).is_file() else None


def _of_trainer(path: Path, optimizer: bool, index: int) -> Source | None:
    """Return it under the directory's own path, for configuration and tokenizer. None if its weights lie beside it."""
    state = trainer_state(path)
    if state == path:
        return None
    source = NativeSource(state)
    if not any(record.is_stored for record in source.contents.parameters.values()):
        source.close()
        return None
    source.title, source.path = "checkpoint of Trainer on fullshard", path
    return source


def _dcp(path: Path, optimizer: bool, index: int) -> Source | None:
    if not (path / METADATA_NAME).is_file():
        return None
    sibling = path.parent / path.name.replace(_MODEL, _OPTIMIZER)
    if path.name.startswith(f"{_MODEL}_") and optimizer and (sibling / METADATA_NAME).is_file():
        return _accelerate_sharded(path.parent, optimizer, int(path.name.rpartition("_")[2]))
    return DcpSource("torch distributed checkpoint (DCP)", path, [path], optimizer=optimizer)


def _accelerate_sharded(path: Path, optimizer: bool, index: int) -> Source | None:
    model, state = path / f"{_MODEL}_{index}", path / f"{_OPTIMIZER}_{index}"
    if not (model / METADATA_NAME).is_file():
        return None
    directories = [model, state] if optimizer and (state / METADATA_NAME).is_file() else [model]
    notes = _left_over(path, {directory.name for directory in directories})
    return DcpSource("Accelerate / Trainer checkpoint (sharded)", path, directories, notes=notes)


def _accelerate_full(path: Path, optimizer: bool, index: int) -> Source | None:
    suffix = f"_{index}" if index else ""
    model, state = path / f"{_MODEL}{suffix}.bin", path / f"{_OPTIMIZER}{suffix}.bin"
    if not model.is_file():
        return None
    found: Path | bool = state if optimizer and state.is_file() else False
    notes = _left_over(path, {model.name, *([state.name] if found else [])})
    return open_torch_state("Accelerate / Trainer checkpoint (full)", path, [model], optimizer=found, notes=notes)


def _xla(path: Path, optimizer: bool, index: int) -> Source | None:
    files = rank_files(path)
    if not files or not is_rank_file(files[0]):
        return None
    return open_xla(path, files, optimizer=optimizer)


def _hugging_face(path: Path, optimizer: bool, index: int) -> Source | None:
    if has_safetensors(path):
        return HuggingFaceSource(path)
    if (path / PICKLED_INDEX_NAME).is_file() or (path / PICKLED_NAME).is_file():
        return open_torch_state("Hugging Face directory (pytorch_model.bin)", path, bin_files(path))
    return None


def _left_over(path: Path, used: set[str]) -> list[str]:
    """Return the parts of a foreign training state that are not taken over."""
    known = {*used, *(file.name for file in files_beside_weights(path))}
    names = sorted(entry.name for entry in path.iterdir() if entry.name not in known)
    return [f"not taken over: {', '.join(names)}"] if names else []
