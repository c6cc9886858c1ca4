"""Read the per-rank files of torch_xla's FSDP and of TorchAcc as a source, without torch_xla or an XLA device.

Each file contains `{"model": state dict, "shard_metadata": ...}` of one rank. A shard is 1-D. A parameter is the
concatenation of the shards of all ranks, truncated to its original size. With `flatten_parameters`, it is a flat
parameter that concatenates several others, which `flatten_info` describes. Every file contains complete buffers.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.offline.source import Source, T, plain_name
from fullshard.checkpoint.offline.torch_state import Pieces, memory_source
from fullshard.checkpoint.torch_files import check_tensor, load_torch_file
from fullshard.core.errors import CheckpointError, plural

_OUTER = "model.model."
"""The prefix that TorchAcc's wrappers add to every name."""

Shard = tuple[str, tuple[int, ...], list[torch.Tensor]]
"""A sharded parameter: its name, its shape, and the shard of each rank."""


def rank_files(directory: Path) -> list[Path]:
    """Return files whose names suggest that each belongs to one rank. `is_rank_file` checks their contents."""
    names = (path for path in directory.iterdir() if path.suffix in (".pth", ".pt", ".bin") and path.is_file())
    return sorted(path for path in names if "rank" in path.name)


def is_rank_file(path: Path) -> bool:
    """Return whether a file was written by the FSDP of torch_xla or TorchAcc."""
    loaded = load_torch_file(path)
    return isinstance(loaded, Mapping) and "shard_metadata" in loaded


def open_xla(path: Path, files: Sequence[Path], *, optimizer: bool = True) -> Source:
    """Open per-rank files of a model and, if they exist, of the optimizer. `path` is used only in error messages."""
    loaded = [
        value for value in map(load_torch_file, files) if isinstance(value, Mapping) and "shard_metadata" in value
    ]
    try:
        models = _by_rank([value for value in loaded if "model" in value], path, "model")
        states = _by_rank([value for value in loaded if optimizer and "optimizer" in value], path, "optimizer")
        if not models:
            raise CheckpointError(f"{path} does not hold a model: none of its {len(loaded)} files contains one")
        return _assembled(path, models, [value["optimizer"] for value in states])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path}: its shard_metadata is not in torch_xla's format ({type(error).__name__}: {error})"
        ) from None


def _by_rank(loaded: Sequence[Any], path: Path, what: str) -> list[Any]:
    """Return the files' contents in the order of the ranks recorded in them, because file names can collide."""
    ranked = sorted((int(v["shard_metadata"]["rank"]), int(v["shard_metadata"]["world_size"])) for v in loaded)
    if ranked != [(rank, len(loaded)) for rank in range(len(loaded))]:
        held = ", ".join(f"{rank} of {size}" for rank, size in ranked[:20])
        raise CheckpointError(
            f"{path} holds the {what} files of ranks {held}; expected every rank of one checkpoint exactly once"
        )
    return sorted(loaded, key=lambda value: int(value["shard_metadata"]["rank"]))


def _assembled(path: Path, models: Sequence[Any], states: Sequence[Any]) -> Source:
    """Return a source of the complete parameters, assembled from all ranks' files, and of the optimizer's state."""
    metadata, ranks = models[0]["shard_metadata"], [value["model"] for value in models]
    if any(list(rank) != list(ranks[0]) for rank in ranks):
        raise CheckpointError(f"{path}: the ranks do not hold the same parameters")
    outer = _OUTER if all(plain_name(name).startswith(_OUTER) for name in ranks[0]) else ""
    known = {
        f"{unit}.{key}" if unit else key: (f"{unit}.{info['_orig_name']}" if unit else info["_orig_name"], info)
        for unit, keys in metadata["shard_info"].items()
        for key, info in keys.items()
    }
    if absent := sorted(known.keys() - ranks[0].keys()):
        raise CheckpointError(f"{path} lacks {absent[0]!r}, which is in its shard_metadata")

    def by_plain_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
        pairs = [(plain_name(name).removeprefix(outer), value) for name, value in named]
        if len(dict(pairs)) < len(pairs):
            raise CheckpointError(
                f"{path} holds {len(pairs)} parameters, but they map to only {len(dict(pairs))} distinct names, so "
                "some names collide"
            )
        return dict(pairs)

    def members(shard: Shard) -> dict[str, Pieces]:
        return by_plain_name(_members(path, metadata["flatten_info"], shard))

    found: list[tuple[str, torch.Tensor | Pieces]] = []
    shards: list[Shard] = []
    for key, value in ranks[0].items():
        parts = [check_tensor(rank[key], where=f"{path}: {key}") for rank in ranks]
        if key in known:
            name, info = known[key]
            shards.append((name, tuple(info["_orig_size"]), parts))
            found += _members(path, metadata["flatten_info"], shards[-1])
        else:
            dtype = metadata.get("buffer_info", {}).get(key, {}).get("_orig_dtype", value.dtype)
            found.append((key, parts[0].to(dtype)))
    weights = by_plain_name(found)
    nested = _optimizer_state(path, states, shards, members) if states else None
    return memory_source("torch_xla / TorchAcc per-rank files", path, weights, nested, where=str(path))


def _members(path: Path, flat: Mapping[str, Any], shard: Shard) -> Iterator[tuple[str, Pieces]]:
    """Yield (name, tensor) for each original parameter in a sharded one. Usually there is only one."""
    name, size, parts = shard
    unit, _, local = name.rpartition(".")
    names, shapes, numels = flat.get(name) or ([local], [size], [math.prod(size)])
    is_whole = sum(part.numel() for part in parts) >= math.prod(size) == sum(numels)
    if not is_whole or [math.prod(s) for s in shapes] != list(numels) or len({p.dtype for p in parts}) > 1:
        raise CheckpointError(
            f"{path}: {name} has {math.prod(size)} elements, but its shards have {[part.numel() for part in parts]} "
            f"and the parameters in it {list(numels)}"
        )
    for member, shape, end in zip(names, shapes, itertools.accumulate(numels), strict=True):
        yield f"{unit}.{member}" if unit else member, Pieces(tuple(shape), parts, end - math.prod(shape))


def _optimizer_state(
    path: Path, states: Sequence[Any], shards: Sequence[Shard], members: Callable[[Shard], dict[str, Pieces]]
) -> dict[str, Any]:
    """Return the optimizer's state dict by parameter name. The files number the model's sharded parameters in order."""
    (options, *more), count = states[0]["param_groups"], len(shards)
    if more or list(options["params"]) != list(range(count)):
        raise CheckpointError(
            f"{path}: the optimizer has {plural(1 + len(more), 'parameter group')}, the first "
            f"with {len(options['params'])} of the model's {count} parameters, so their names are unknown",
            hint="import without the optimizer (--no-optimizer)",
        )
    state: dict[str, dict[str, Any]] = {name: {} for shard in shards for name in members(shard)}
    options = {**options, "params": list(state)}
    for number, shard in enumerate(shards):
        for key, value in states[0]["state"].get(number, {}).items():
            leaves: Mapping[str, Any] = dict.fromkeys(members(shard), value)
            if isinstance(value, torch.Tensor) and value.ndim:
                where = f"{path}: optimizer state of {shard[0]}"
                parts = [check_tensor(rank["state"][number][key], where=where) for rank in states]
                if [part.numel() for part in parts] != [part.numel() for part in shard[2]]:
                    raise CheckpointError(f"{where} is not sharded like its parameter")
                leaves = members((*shard[:2], parts))
            for member, leaf in leaves.items():
                state[member][key] = leaf
    return {"state": state, "param_groups": [options]}
