"""Read state dicts in torch's own file format as a source: Accelerate's full checkpoints and `.pt` files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.offline.optimizers import optimizer_record
from fullshard.checkpoint.offline.source import Contents, Kind, Source, plain_names, tensor_record
from fullshard.checkpoint.torch_files import check_tensor, load_torch_file
from fullshard.core.errors import CheckpointError
from fullshard.core.layout import Interval

_MODEL_KEYS = ("model", "state_dict", "module", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")


@dataclass(frozen=True, eq=False)
class Pieces:
    """A flattened tensor that is stored in consecutive 1-D tensors, and begins at position `offset` in them."""

    shape: tuple[int, ...]
    parts: Sequence[torch.Tensor]
    offset: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the tensor, which is the same for all parts."""
        return self.parts[0].dtype

    def read(self, interval: Interval) -> torch.Tensor:
        """Return an interval of the flattened tensor."""
        wanted = interval.shift(self.offset)
        found, end = [], 0
        for part in self.parts:
            common = wanted.intersect(Interval(end, end + part.numel())).shift(-end)
            if common.numel:
                found.append(part.detach().reshape(-1)[common.start : common.stop])
            end += part.numel()
        return found[0] if len(found) == 1 else torch.cat(found)


def open_torch_state(title: str, path: Path, *, optimizer: Path | bool = True, notes: Sequence[str] = ()) -> Source:
    """Open a `torch.save` file with a state dict. `optimizer` is its own file, or whether to open its state."""
    loaded = load_torch_file(path)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, expected a state dict")
    nested, others = None, []
    key = next((k for k in _MODEL_KEYS if isinstance(loaded.get(k), Mapping)), None)
    if key is not None:
        inner = next((k for k in _OPTIMIZER_KEYS if isinstance(loaded.get(k), Mapping)), None)
        nested = loaded.get(inner) if inner else None
        others = [str(k) for k in loaded if k not in (key, inner)]
        loaded = loaded[key]
    weights = {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    others += [str(name) for name, value in loaded.items() if not isinstance(value, torch.Tensor)]
    if isinstance(optimizer, Path):
        nested = load_torch_file(optimizer)
    elif not optimizer:
        nested = None
    if others:
        notes = [*notes, f"{', '.join(others[:20])}: not part of the model"]
    where = str(optimizer if isinstance(optimizer, Path) else path)
    return memory_source(title, path, plain_names(weights), nested, where=where, notes=notes)


def memory_source(
    title: str,
    path: Path,
    weights: Mapping[str, torch.Tensor | Pieces],
    nested: Any,
    *,
    where: str,
    notes: Sequence[str] = (),
) -> Source:
    """Return a source of tensors in memory or mapped from a file. `nested` is an optimizer's state dict or None."""
    if not weights:
        raise CheckpointError(f"{path} does not contain any model tensors")
    tensors: dict[tuple[Kind, str], Pieces] = {
        ("model", name): _pieces(value, where=f"{path}: {name}") for name, value in weights.items()
    }
    parameters = {name: tensor_record(held.shape, held.dtype, where=name) for (_, name), held in tensors.items()}
    record = None
    if nested is not None:
        record, leaves = optimizer_record(nested, parameters, where=where)
        tensors |= {("optimizer", name): _pieces(value, where=name) for name, value in leaves.items()}
    return Source(
        title,
        path,
        Contents(parameters, optimizer=record, notes=notes),
        lambda kind, name, interval: tensors[kind, name].read(interval),
        close=tensors.clear,  # a file stays mapped while one of its tensors exists
    )


def _pieces(value: torch.Tensor | Pieces, *, where: str) -> Pieces:
    if isinstance(value, Pieces):
        return value
    tensor = check_tensor(value, where=where)
    return Pieces(tuple(tensor.shape), [tensor])
