"""Saving and consolidation as TorchAcc scripts write them, without losing any rank's part.

    save(model.state_dict(), path)                          whole tensors, gathered; one file
    save(optimizer.state_dict(), path)                      the same
    save({"model": ..., "shard_metadata": ...}, directory, master_only=False)
                                                            every rank's slices in a file of its own
    dist.fsdp.consolidate_sharded_model_checkpoints(directory)
                                                            those files as one, with whole tensors

Whole tensors pass through the memory of one host. `fullshard.checkpoint` saves without that, and loads at any number of
ranks; these functions are for scripts that have them.
"""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.api import torch_private
from fullshard.api.collectives import all_gather_object
from fullshard.checkpoint.ranks import Ranks
from fullshard.checkpoint.torch_files import load_torch_file
from fullshard.core.errors import CheckpointError
from fullshard.core.files import whole_file
from fullshard.core.paths import local_path
from fullshard.features import ShardedTensor
from fullshard.integrations.torchacc.process import joined
from fullshard.launch.environment import run_on_main

METADATA_FORMAT = "fullshard.torchacc/1"
CONSOLIDATED = "consolidated.pth"
"""Name of the consolidated file if none is given, in the working directory."""

_OWN_NAME = re.compile(r"rank-?(\d+)-of-(\d+)")


def save(obj: Any, path: str | os.PathLike[str], master_only: bool = True) -> None:
    """Write `obj` with `torch.save`, tensors moved to the host. A collective: every rank calls it.

    Args:
        obj: anything `torch.save` takes.
        path: the file. With `master_only=False` and the same path on all ranks, every rank writes a file of its own:
            `DIRECTORY/rank-R-of-W.pth` if the path is a directory or has no suffix, else `NAME_rank-R-of-W.SUFFIX`.
        master_only: rank 0 writes for all; sharded parameters and optimizer state are gathered whole first. False:
            every rank writes its slices.

    Raises:
        CheckpointError: on every rank: the file cannot be written, or `obj` holds sharded optimizer state that cannot
            be told from a copy.
    """
    environment = joined().environment
    target = local_path(path)
    if master_only:
        whole = _Converter(gathers=True, keep=environment.is_main).convert(obj)
        run_on_main(environment, lambda: _write(whole, target))
        return
    paths = all_gather_object(os.fspath(path))
    if len(set(paths)) < len(paths) or len(paths) == 1:
        target = _own_path(target, environment.rank, environment.world_size)
    parts = _Converter(gathers=False, keep=True)
    Ranks().together(f"writing {target.name}", lambda: _write(parts.convert(obj), target))


def shard_metadata(model: nn.Module) -> dict[str, Any]:
    """Return the places of this rank's slices, to be saved beside `model.state_dict()`. Plain values only."""
    environment = joined().environment
    return {
        "format": METADATA_FORMAT,
        "world_size": environment.world_size,
        "rank": environment.rank,
        "parameters": {
            name: {"shape": list(value.shape), "interval": [value.interval.start, value.interval.stop]}
            for name, value in model.state_dict().items()
            if isinstance(value, ShardedTensor)
        },
    }


def whole_optimizer_state(state_dict: Mapping[str, Any], *, keep: bool = True, cpu: bool = True) -> dict[str, Any]:
    """Return an optimizer's state dict with whole tensors, to be loaded on any number of ranks. A collective.

    Args:
        state_dict: what `optimizer.state_dict()` returned.
        keep: False returns the groups only; for ranks that only take part.
        cpu: move every tensor to the host as soon as it is whole.

    Raises:
        CheckpointError: ranks hold state of other parameters.
    """
    groups, states = state_dict["param_groups"], state_dict["state"]
    keys = [[key, sorted(map(str, state))] for key, state in states.items()]
    for rank, others in enumerate(all_gather_object(keys)):
        if others != keys:
            raise CheckpointError(f"the optimizer's state: rank {rank} has state of other parameters")
    whole: dict[Any, dict[str, Any]] = {}
    for key, state in states.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                value = value.full_tensor() if isinstance(value, ShardedTensor) else value.detach()
                value = value.cpu() if cpu and keep else value
            if keep:
                whole.setdefault(key, {})[name] = value
    return {"state": whole, "param_groups": groups}


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str | os.PathLike[str],
    ckpt_suffix: str = "*.pth",
    save_path: str | os.PathLike[str] = "",
    save_model: bool = True,
) -> tuple[dict[str, Any], str]:
    """Make one file with whole tensors out of every rank's file. Not a collective: one rank calls it.

    Args:
        ckpt_prefix: what was given to `save`: the directory, or the file whose name got the ranks' numbers; or the
            beginning of the files' names.
        ckpt_suffix: pattern of the files in the directory, or of what follows the prefix.
        save_path: where to write `{"model": ...}`; `consolidated.pth` in the working directory by default.
        save_model: whether to write it at all.

    Returns:
        The whole state dict, on the host, and the path.

    Raises:
        CheckpointError: no files, files of several saves, a missing rank, or elements that no file has.
    """
    files = _rank_files(local_path(ckpt_prefix), ckpt_suffix)
    parts = [_load_part(file) for file in files]
    _check_ranks(files, [metadata for _, metadata in parts])
    parts.sort(key=lambda part: part[1]["rank"])
    whole: dict[str, Any] = {}
    made: dict[tuple[int, ...], torch.Tensor] = {}
    for name, value in parts[0][0].items():
        if name not in parts[0][1]["parameters"]:
            whole[name] = value  # buffers are whole on every rank
            continue
        pieces = [(model[name], metadata["parameters"][name]) for model, metadata in parts]
        tied = tuple(piece.data_ptr() for piece, _ in pieces if piece.numel())
        if not tied or tied not in made:
            made[tied] = _joined_pieces(name, pieces)
        whole[name] = made[tied]
    target = local_path(save_path or CONSOLIDATED)
    if save_model:
        _write({"model": whole}, target)
    return whole, str(target)


# -- inside -----------------------------------------------------------------------------------------------------


class _Converter:
    """Turns what a script saves into what a file can hold; tensors that occur twice stay shared.

    Args:
        gathers: sharded tensors, and what looks like an optimizer's state dict, become whole; else this rank's slices.
        keep: False only takes part in the collectives, and returns None for every tensor.
    """

    def __init__(self, *, gathers: bool, keep: bool) -> None:
        self._gathers, self._keep = gathers, keep
        self._made: dict[int, torch.Tensor | None] = {}

    def convert(self, value: Any) -> Any:
        """Return `value` with plain tensors on the host. Ranks visit tensors in the same order."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._made:
                self._made[id(value)] = self._plain(value)
            return self._made[id(value)]
        if isinstance(value, Mapping):
            if self._gathers and _is_optimizer_state(value):
                value = whole_optimizer_state(value, keep=self._keep)
            items = ((key, self.convert(item)) for key, item in value.items())
            if not isinstance(value, OrderedDict):
                return dict(items)
            ordered = OrderedDict(items)
            torch_private.copy_module_versions(value, ordered)
            return ordered
        if type(value) in (list, tuple):
            return type(value)(self.convert(item) for item in value)
        return value

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if isinstance(tensor, ShardedTensor):
            tensor = tensor.full_tensor() if self._gathers else tensor.local.clone()
        if not self._keep:
            return None
        host = tensor.detach().cpu()
        # Of a view, torch.save would write all that it is a view of.
        return host.clone() if host.untyped_storage().nbytes() > host.nbytes else host


def _is_optimizer_state(value: Mapping[Any, Any]) -> bool:
    return {"state", "param_groups"} <= value.keys() and isinstance(value["param_groups"], list)


def _own_path(path: Path, rank: int, world_size: int) -> Path:
    name = f"rank-{rank}-of-{world_size}"
    if path.is_dir() or not path.suffix:
        return path / f"{name}.pth"
    return path.with_name(f"{path.stem}_{name}{path.suffix}") if world_size > 1 else path


def _write(value: Any, path: Path) -> None:
    """Write the file under another name first, so that a crash leaves what was there."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory", hint="name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            with temporary.open("wb") as file:
                torch.save(value, file)
                file.flush()
                os.fsync(file.fileno())
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(temporary)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    if unsafe:
        warnings.warn(f"{path} holds {', '.join(unsafe)}: torch.load(weights_only=True) refuses it", stacklevel=4)


def _rank_files(prefix: Path, suffix: str) -> list[Path]:
    if prefix.is_dir():
        found = [path for path in prefix.iterdir() if path.is_file() and fnmatch(path.name, suffix)]
        looked = f"{prefix}/{suffix}"
    else:
        found = list(prefix.parent.glob(f"{glob.escape(prefix.name)}{suffix}"))
        looked = f"{prefix}{suffix}"
        if prefix.suffix:
            found += prefix.parent.glob(f"{glob.escape(prefix.stem)}_rank-*-of-*{prefix.suffix}")
            found = found or [path for path in [prefix] if path.is_file()]
    numbered = [path for path in dict.fromkeys(found) if _OWN_NAME.search(path.name)]
    files = sorted(numbered or found)
    if not files:
        nearby = prefix if prefix.is_dir() else prefix.parent
        there = ", ".join(sorted(path.name for path in nearby.iterdir())[:8]) if nearby.is_dir() else "nothing"
        raise CheckpointError(f"no file matches {looked}", hint=f"{nearby} holds {there or 'nothing'}")
    return files


def _load_part(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    content = load_torch_file(file)
    parts = (content.get("model"), content.get("shard_metadata")) if isinstance(content, dict) else ()
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(
            f"{file} has no 'model' and 'shard_metadata'",
            hint="save({'model': model.state_dict(), 'shard_metadata': model.get_shard_metadata()}, ...)",
        )
    metadata = content["shard_metadata"]
    if metadata.get("format") != METADATA_FORMAT:
        kind = "torch_xla's" if "shard_info" in metadata else f"format {metadata.get('format')!r}"
        raise CheckpointError(f"{file}: the shard metadata is {kind}, expected {METADATA_FORMAT!r}")
    return content["model"], metadata


def _check_ranks(files: list[Path], metadata: list[dict[str, Any]]) -> None:
    sizes = {part["world_size"] for part in metadata}
    if len(sizes) > 1:
        raise CheckpointError(
            f"files of saves at {sorted(sizes)} ranks: {', '.join(file.name for file in files)}",
            hint="name one of them with ckpt_suffix, for example 'rank-*-of-2.pth'",
        )
    ranks = [part["rank"] for part in metadata]
    missing = sorted(set(range(sizes.pop())) - set(ranks))
    names = ", ".join(file.name for file in files)
    if len(set(ranks)) < len(ranks):
        raise CheckpointError(f"{names} are of ranks {ranks}: two of them are the same rank's")
    if missing:
        raise CheckpointError(f"no file of ranks {missing} among {names}", hint="copy every rank's file here")


def _joined_pieces(name: str, pieces: list[tuple[torch.Tensor, dict[str, Any]]]) -> torch.Tensor:
    shape = torch.Size(pieces[0][1]["shape"])
    whole = torch.empty(shape.numel(), dtype=pieces[0][0].dtype)
    end = 0
    for piece, place in sorted(pieces, key=lambda item: tuple(item[1]["interval"])):
        start, stop = place["interval"]
        if start > end or piece.numel() != stop - start or torch.Size(place["shape"]) != shape:
            raise CheckpointError(
                f"{name}: elements {end} to {start} are in no file, or the files are of different saves"
            )
        whole[start:stop] = piece
        end = max(end, stop)
    if end != shape.numel():
        raise CheckpointError(f"{name}: elements {end} to {shape.numel()} are in no file")
    return whole.view(shape)
