"""Save and load moving averages of weights, which are stored in the same way as optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from fullshard.checkpoint.elements import stored_dtype
from fullshard.checkpoint.format import Manifest, StateTensorRecord
from fullshard.checkpoint.optimizer_state import StateEntry
from fullshard.checkpoint.tensors import LocalTensor
from fullshard.core.errors import CheckpointError
from fullshard.features.averages import EMA

AVERAGES = "averages"
"""Name of the manifest state that lists the keys of the stored averages."""


def averages_in(objects: Iterable[object]) -> list[EMA]:
    """Return the moving averages among the objects that are passed to a save or a load."""
    return [each for each in objects if isinstance(each, EMA)]


def average_entries(
    objects: Iterable[object], optimizer: torch.optim.Optimizer | None, parameters: Sequence[LocalTensor]
) -> Iterator[StateEntry]:
    """Yield the entries of optimizer state in which this rank stores its part of the averages."""
    averages = averages_in(objects)
    if averages and optimizer is None:
        raise CheckpointError(
            "a moving average of the weights is stored with the optimizer's state, but no optimizer was passed",
            hint="pass optimizer=, or save the average as the weights inside `with ema.swapped()`",
        )
    taken = {key for state in (optimizer.state.values() if optimizer is not None else ()) for key in state}
    for average in averages:
        if average.key in taken:
            raise CheckpointError(
                f"the key {average.key!r} is used by two averages, or by an average and the optimizer's state",
                hint="use a different key for each average: EMA(model, decay, key=...)",
            )
        taken.add(average.key)
        for local, held in average_tensors(average, parameters):
            if local.is_writer and local.interval.numel:
                yield StateEntry(local, average.key, held, "interval")


def average_tensors(average: EMA, parameters: Sequence[LocalTensor]) -> Iterator[tuple[LocalTensor, torch.Tensor]]:
    """Yield each averaged parameter with this rank's part of the average."""
    held = average.by_parameter
    pairs = [(local, held[id(local.tensor)]) for local in parameters if id(local.tensor) in held]
    if len(pairs) != len(held):
        raise CheckpointError(
            f"the average has {len(held)} parameters, but only {len(pairs)} of them belong to the model",
            hint="save each average with its own model",
        )
    yield from pairs


def average_records(
    average: EMA, parameters: Sequence[LocalTensor], manifest: Manifest, primary: Mapping[str, str], problems: list[str]
) -> Iterator[tuple[str, LocalTensor, StateTensorRecord, torch.Tensor]]:
    """Yield (stored name, parameter, record, this rank's part) for each parameter with a stored average.

    Append a message to `problems` for each average that is missing or has another dtype.
    """
    saved = manifest.optimizer.state if manifest.optimizer is not None else {}
    for local, held in average_tensors(average, parameters):
        name = primary.get(local.name, local.name)
        record = saved.get(name, {}).get(average.key)
        if not isinstance(record, StateTensorRecord):
            problems.append(f"{average.key!r} of {name!r} was not saved")
        elif record.dtype != stored_dtype(held, where=name):
            problems.append(f"{average.key!r} of {name!r} is {held.dtype}, but was saved as torch.{record.dtype}")
        else:
            yield f"{name}/{average.key}", local, record, held
