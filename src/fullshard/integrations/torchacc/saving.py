"""Saving and consolidation with TorchAcc's interface, without losing the data of any rank.

The file that each rank writes contains torch_xla's metadata, so `fullshard ckpt import` also reads it. Unsharded
tensors must fit in the memory of one host, which `fullshard.checkpoint` does not require.
"""

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.api.collectives import all_gather_object
from fullshard.checkpoint.offline.xla import open_xla
from fullshard.checkpoint.ranks import Ranks
from fullshard.core.errors import CheckpointError
from fullshard.core.files import atomic_file
from fullshard.core.paths import local_path
from fullshard.features import ShardedTensor
from fullshard.integrations.torchacc.eager import joined
from fullshard.launch.environment import run_on_main

CONSOLIDATED = "consolidated.pth"
"""The default name of the consolidated file, in the working directory."""

_OWN_NAME = re.compile(r"rank-?(\d+)-of-(\d+)")


def save(obj: Any, path: str | os.PathLike[str], master_only: bool = True) -> None:
    """Write `obj` with `torch.save`, after moving its tensors to the host. All ranks must call this.

    Args:
        obj: Any object that `torch.save` accepts.
        path: The file. With `master_only=False` and the same path on all ranks, each rank writes a separate file:
            `DIRECTORY/rank-R-of-W.pth` if the path is a directory or has no suffix, or otherwise
            `NAME_rank-R-of-W.SUFFIX`.
        master_only: Whether rank 0 writes for all ranks, after gathering sharded parameters and optimizer state. If
            False, every rank writes its slices.

    Raises:
        CheckpointError: Raised on every rank if the file cannot be written or if the ranks' optimizer states are for
            different parameters.
    """
    environment = joined().environment
    target = local_path(path)
    if master_only:
        whole = _plain(obj, {}, gathers=True, keep=environment.is_main)
        run_on_main(environment, lambda: _write(whole, target))
        return
    paths = all_gather_object(os.fspath(path))
    if len(set(paths)) < len(paths) or len(paths) == 1:
        target = _own_path(target, environment.rank, environment.world_size)
    Ranks().together(f"writing {target.name}", lambda: _write(_plain(obj, {}, gathers=False, keep=True), target))


def shard_metadata(model: nn.Module) -> dict[str, Any]:
    """Return torch_xla's description of the slices that this rank holds, to be saved with its state dict."""
    environment = joined().environment
    sharded = {
        name: {"_orig_name": name, "_orig_size": tuple(value.shape)}
        for name, value in model.state_dict().items()
        if isinstance(value, ShardedTensor)
    }
    return {
        "shard_info": {"": sharded},
        "flatten_info": {},
        "buffer_info": {},
        "world_size": environment.world_size,
        "rank": environment.rank,
    }


def whole_optimizer_state(state_dict: Mapping[str, Any], *, keep: bool = True, cpu: bool = True) -> dict[str, Any]:
    """Return an optimizer's state dict with unsharded tensors, on the host if `cpu` is set. All ranks must call this.

    On ranks with `keep=False`, the result contains only the parameter groups.
    """
    groups, states = state_dict["param_groups"], state_dict["state"]
    keys = [[key, sorted(map(str, state))] for key, state in states.items()]
    for rank, others in enumerate(all_gather_object(keys)):
        if others != keys:
            raise CheckpointError(
                f"the optimizer's state differs between ranks: rank {rank} has state for different parameters"
            )
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
    """Combine the files of all ranks into one file with unsharded tensors. Call this on a single rank.

    Args:
        ckpt_prefix: The path that was passed to `save` (a directory, or a file name to which each rank added its
            number), or the beginning of the file names.
        ckpt_suffix: A pattern. In a directory, it selects files. Otherwise it matches the rest of the file names.
        save_path: The file to which `{"model": ...}` is written. The default is `consolidated.pth` in the working
            directory.
        save_model: Whether to write the file.

    Returns:
        The unsharded state dict, on the host, and the path of the file.

    Raises:
        CheckpointError: If there are no files, if they come from several saves, if the file of a rank is missing, or if
            some elements are in none of the files.
    """
    prefix, target = local_path(ckpt_prefix), local_path(save_path or CONSOLIDATED)
    if prefix.is_dir():
        found = set(prefix.glob(ckpt_suffix))
    else:  # `save` puts the rank between name and suffix
        found = {p for name in (prefix.name, prefix.stem) for p in prefix.parent.glob(glob.escape(name) + ckpt_suffix)}
    files = sorted(path for path in found if _OWN_NAME.search(path.name)) or sorted(found)
    if not files:
        raise CheckpointError(f"no file matches {prefix}{ckpt_suffix}", hint="pass the path that was passed to `save`")
    with open_xla(prefix, files, optimizer=False) as source:
        whole = {name: source.whole(name) for name in source.contents.parameters}
        if save_model:
            _write({"model": whole}, target)
    return whole, str(target)


def _plain(value: Any, made: dict[int, Any], *, gathers: bool, keep: bool) -> Any:
    """Convert a value so that it can be saved: its tensors become plain tensors on the host.

    A tensor that occurs twice is copied once. `made` holds the copies, keyed by the id of the original tensor.

    With `gathers`, sharded tensors and optimizer state are gathered from all ranks. All ranks must then call this with
    their tensors in the same order. Ranks with `keep=False` take part but get None for every tensor.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in made:
            tensor = value
            if isinstance(value, ShardedTensor):
                tensor = value.full_tensor() if gathers else value.local
            # Copy views, because torch.save would write their complete storage.
            made[id(value)] = tensor.detach().to("cpu", copy=True) if keep else None
        return made[id(value)]
    if isinstance(value, Mapping):
        if gathers and {"state", "param_groups"} <= value.keys() and isinstance(value["param_groups"], list):
            value = whole_optimizer_state(value, keep=keep)
        return {key: _plain(item, made, gathers=gathers, keep=keep) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, made, gathers=gathers, keep=keep) for item in value)
    return value


def _own_path(path: Path, rank: int, world_size: int) -> Path:
    name = f"rank-{rank}-of-{world_size}"
    if path.is_dir() or not path.suffix:
        return path / f"{name}.pth"
    return path.with_name(f"{path.stem}_{name}{path.suffix}") if world_size > 1 else path


def _write(value: Any, path: Path) -> None:
    """Write to a temporary file and then rename it, so that a crash does not destroy an existing file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
