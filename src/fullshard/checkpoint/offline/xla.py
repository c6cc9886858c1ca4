"""Per-rank files of torch_xla's FSDP and of TorchAcc as a source.

Each file is `{"model": state dict, "shard_metadata": ...}` of one rank. A shard is 1-D; the shards of all ranks one
behind the other, cut to the original size, are the parameter. With `flatten_parameters` that is a flat parameter that
holds several one behind the other, which `flatten_info` takes apart. Buffers are whole in every file. Neither
torch_xla nor a device is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.format import TensorRecord
from fullshard.checkpoint.offline.optimizers import optimizer_record
from fullshard.checkpoint.offline.source import (
    Contents,
    Kind,
    MemorySource,
    Pieces,
    plain_name,
    tensor_record,
)
from fullshard.checkpoint.torch_files import check_tensor, load_torch_file
from fullshard.core.errors import CheckpointError

_OUTER = "model.model."
"""The prefix of TorchAcc's own wrappers in every name."""

Shard = tuple[str, tuple[int, ...], list[torch.Tensor]]
"""A sharded parameter: its name, its size, and what each rank holds."""


def rank_files(directory: Path) -> list[Path]:
    """Return the files that may be of one rank each; `is_rank_file` looks inside."""
    names = (path for path in directory.iterdir() if path.suffix in (".pth", ".pt", ".bin") and path.is_file())
    return sorted(path for path in names if "rank" in path.name)


def is_rank_file(path: Path) -> bool:
    """Return whether a file is one of torch_xla's or TorchAcc's FSDP."""
    loaded = load_torch_file(path)
    return isinstance(loaded, Mapping) and "shard_metadata" in loaded


def open_xla(path: Path, files: Sequence[Path], *, optimizer: bool = True) -> MemorySource:
    """Return a model, and the optimizer's state if it is there, in per-rank files.

    Raises:
        CheckpointError: a rank's file is missing or there twice, or they contradict each other.
    """
    loaded = {file: load_torch_file(file) for file in files}
    loaded = {file: value for file, value in loaded.items() if isinstance(value, Mapping) and "shard_metadata" in value}
    try:
        models = _by_rank({f: v for f, v in loaded.items() if "model" in v}, path, "model")
        optimizers = _by_rank({f: v for f, v in loaded.items() if optimizer and "optimizer" in v}, path, "optimizer")
        if not models:
            raise CheckpointError(f"{path} holds no model: none of its {len(loaded)} files has one")
        return _Files(path, models, optimizers).source()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path}: its shard_metadata is not as torch_xla writes it ({type(error).__name__}: {error})"
        ) from None


def _by_rank(loaded: Mapping[Path, Any], path: Path, what: str) -> list[Any]:
    """Return the files' contents in rank order, which they state themselves: file names vary, and collide."""
    found: dict[int, tuple[Path, Any]] = {}
    sizes = {int(value["shard_metadata"]["world_size"]) for value in loaded.values()}
    if len(sizes) > 1:
        raise CheckpointError(f"{path} holds {what} files of {sorted(sizes)} ranks: more than one checkpoint")
    for file, value in loaded.items():
        rank = int(value["shard_metadata"]["rank"])
        if rank in found:
            raise CheckpointError(f"{found[rank][0].name} and {file.name} are both of rank {rank}")
        found[rank] = (file, value)
    missing = sorted(set(range(sizes.pop() if sizes else 0)) - found.keys())
    if missing:
        raise CheckpointError(f"{path} lacks the {what} files of ranks {missing[:20]}: found {sorted(found)}")
    return [found[rank][1] for rank in sorted(found)]


class _Files:
    """The files of all ranks, taken apart."""

    def __init__(self, path: Path, models: Sequence[Any], optimizers: Sequence[Any]) -> None:
        self.path, self.optimizers = path, optimizers
        self.metadata = models[0]["shard_metadata"]
        self.ranks = [dict(value["model"]) for value in models]
        names = [list(rank) for rank in self.ranks]
        if any(other != names[0] for other in names):
            raise CheckpointError(f"{path}: the ranks do not hold the same parameters")
        self.order = names[0]
        self._outer = _OUTER if all(plain_name(name).startswith(_OUTER) for name in self.order) else ""

    def source(self) -> MemorySource:
        """Return the whole checkpoint under plain names."""
        parameters: dict[str, TensorRecord] = {}
        tensors: dict[tuple[Kind, str], Pieces] = {}
        shards = dict(self._shards())
        for key in self.order:
            if key in shards:
                for name, shape, offset in self._members(shards[key]):
                    self._add(parameters, name, shape, shards[key][2][0].dtype)
                    tensors["model", self._plain(name)] = Pieces(shards[key][2], offset)
            else:
                whole = check_tensor(self.ranks[0][key], where=f"{self.path}: {key}")
                dtype = self.metadata.get("buffer_info", {}).get(key, {}).get("_orig_dtype", whole.dtype)
                self._add(parameters, key, tuple(whole.shape), dtype)
                tensors["model", self._plain(key)] = Pieces([whole.to(dtype)])
        record = None
        if self.optimizers:
            record, found = self._optimizer(list(shards.values()), parameters)
            tensors |= found
        contents = Contents(parameters=parameters, optimizer=record)
        return MemorySource("torch_xla / TorchAcc per-rank files", self.path, contents, tensors)

    def _plain(self, name: str) -> str:
        """Return a parameter's name in the model as it was before it was wrapped."""
        return plain_name(name).removeprefix(self._outer)

    def _add(self, records: dict[str, TensorRecord], name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        plain = self._plain(name)
        if plain in records:
            raise CheckpointError(f"{self.path} holds {plain!r} twice")
        records[plain] = tensor_record(tuple(shape), dtype, where=plain)

    def _shards(self) -> Iterator[tuple[str, Shard]]:
        """Return the state dict key and shards of every sharded parameter, in the order of the model's parameters."""
        known = {
            f"{unit}.{key}" if unit else key: (unit, info)
            for unit, keys in self.metadata["shard_info"].items()
            for key, info in keys.items()
        }
        for key in self.order:
            if key in known:
                unit, info = known.pop(key)
                parts = [check_tensor(rank[key], where=f"{self.path}: {key}") for rank in self.ranks]
                name = f"{unit}.{info['_orig_name']}" if unit else str(info["_orig_name"])
                yield key, (name, tuple(info["_orig_size"]), parts)
        if known:
            raise CheckpointError(f"{self.path} lacks {sorted(known)[0]!r}, which its shard_metadata promises")

    def _members(self, shard: Shard) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Return the parameters in a sharded one, each with the place where it starts; usually that is the only one."""
        name, size, parts = shard
        numel = math.prod(size)
        if sum(part.numel() for part in parts) < numel or any(p.dtype != parts[0].dtype for p in parts):
            raise CheckpointError(
                f"{self.path}: {name} has {numel} elements, its shards {[part.numel() for part in parts]}"
            )
        unit, _, local = name.rpartition(".")
        flat = self.metadata["flatten_info"].get(name)
        if flat is None:
            yield name, size, 0
            return
        names, sizes, numels = flat
        if sum(numels) != numel or [math.prod(s) for s in sizes] != list(numels):
            raise CheckpointError(f"{self.path}: {local} of {unit or 'the root'} holds {numel} elements, not {numels}")
        offset = 0
        for member, shape, count in zip(names, sizes, numels, strict=True):
            yield f"{unit}.{member}" if unit else member, tuple(shape), offset
            offset += count

    def _optimizer(
        self, shards: Sequence[Shard], parameters: Mapping[str, TensorRecord]
    ) -> tuple[Any, dict[tuple[Kind, str], Pieces]]:
        """Return the state that torch kept under numbers: those of the sharded parameters in the model's order."""
        states = [value["optimizer"] for value in self.optimizers]
        groups = states[0]["param_groups"]
        if len(groups) != 1 or list(groups[0]["params"]) != list(range(len(shards))):
            raise CheckpointError(
                f"{self.path}: the optimizer has {len(groups)} parameter groups, the first of "
                f"{len(groups[0]['params'])} parameters, where the model has {len(shards)}; their names cannot be told",
                hint="import without the optimizer (--no-optimizer)",
            )
        state: dict[str, dict[str, Any]] = {}
        for number, shard in enumerate(shards):
            for key, value in states[0]["state"].get(number, {}).items():
                parts = [rank["state"][number][key] for rank in states]
                for name, shape, offset in self._members(shard):
                    state.setdefault(self._plain(name), {})[key] = self._state_leaf(value, parts, shard, shape, offset)

        def describe(leaf: Any, where: str) -> TensorRecord | None:
            return tensor_record(leaf[0], leaf[1], where=where) if isinstance(leaf, tuple) else None

        members = [self._plain(name) for shard in shards for name, _, _ in self._members(shard)]
        nested = {"state": state, "param_groups": [{**groups[0], "params": members}]}
        record, leaves = optimizer_record(nested, parameters, describe=describe, where=str(self.path))
        return record, {("optimizer", name): leaf[2] for name, leaf in leaves.items()}

    def _state_leaf(self, value: Any, parts: Sequence[Any], shard: Shard, shape: tuple[int, ...], offset: int) -> Any:
        """Return shape, dtype and elements of one parameter's state; a Python value as it is."""
        if not isinstance(value, torch.Tensor):
            return list(value) if isinstance(value, tuple) else value
        checked = [check_tensor(part, where=f"{self.path}: optimizer state of {shard[0]}") for part in parts]
        if value.ndim == 0:
            return (), value.dtype, Pieces(checked[:1])
        if [part.numel() for part in checked] != [part.numel() for part in shard[2]]:
            raise CheckpointError(f"{self.path}: optimizer state of {shard[0]} is not cut as the parameter is")
        return shape, value.dtype, Pieces(checked, offset)
