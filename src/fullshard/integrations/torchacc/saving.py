"""Saving and consolidation as TorchAcc scripts write them, without losing any rank's part.

Every rank's file has torch_xla's metadata, so `fullshard ckpt import` reads it as well. Whole tensors pass through the
memory of one host; `fullshard.checkpoint` has no such bound.
"""

from __future__ import annotations

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
from fullshard.core.files import whole_file
from fullshard.core.paths import local_path
from fullshard.features import ShardedTensor
from fullshard.integrations.torchacc.eager import joined
from fullshard.launch.environment import run_on_main

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
        CheckpointError: on every rank: the file cannot be written, or ranks hold state of other parameters.
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
    """Return torch_xla's description of this rank's slices, to be saved beside `model.state_dict()`."""
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
    """Return an optimizer's state dict with whole tensors, on the host with `cpu`. A collective.

    Ranks that only take part do not `keep` them, and return the groups alone.
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
    prefix, target = local_path(ckpt_prefix), local_path(save_path or CONSOLIDATED)
    if prefix.is_dir():
        found = set(prefix.glob(ckpt_suffix))
    else:  # `save` puts the rank between name and suffix
        found = {p for name in (prefix.name, prefix.stem) for p in prefix.parent.glob(glob.escape(name) + ckpt_suffix)}
    files = sorted(path for path in found if _OWN_NAME.search(path.name)) or sorted(found)
    if not files:
        raise CheckpointError(f"no file matches {prefix}{ckpt_suffix}", hint="name what `save` was given")
    with open_xla(prefix, files, optimizer=False) as source:
        whole = {name: source.whole(name) for name in source.contents.parameters}
        if save_model:
            _write({"model": whole}, target)
    return whole, str(target)


def _plain(value: Any, made: dict[int, Any], *, gathers: bool, keep: bool) -> Any:
    """Return what a file can hold of a value: plain tensors on the host, which stay shared if they occur twice.

    With `gathers` sharded tensors become whole, and an optimizer's state dict is gathered as such; ranks
    visit tensors in the same order. Those that do not `keep` them only take part, and get None for every tensor.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in made:
            tensor = value
            if isinstance(value, ShardedTensor):
                tensor = value.full_tensor() if gathers else value.local
            # A copy of a view: torch.save would write all that it is a view of.
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
    """Write the file under another name first, so that a crash leaves what was there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary, temporary.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
