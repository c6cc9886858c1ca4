"""Collect the parts of an optimizer to save: its parameter groups, and the state of each parameter.

Moving averages of weights are stored in the same way as optimizer state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fullshard.checkpoint.coded_state import coded_tensors, rows_of
from fullshard.checkpoint.elements import stored_dtype
from fullshard.checkpoint.format import GroupRecord, Manifest, StateTensorRecord
from fullshard.checkpoint.tensors import LocalTensor
from fullshard.checkpoint.values import encode_value
from fullshard.core.errors import CheckpointError, plural
from fullshard.engine.step.plain_tensors import as_local
from fullshard.features.averages import EMA
from fullshard.features.matrices import MatrixOptimizer

AVERAGES = "averages"
"""Name of the manifest state that lists the keys of the stored averages."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One value in a parameter's state: a tensor, a `CodedTensor`, or a Python value (then `layout` is None)."""

    parameter: LocalTensor
    key: str
    value: Any
    layout: Literal["interval", "replicated"] | None
    is_owned: bool = False  # whether only this rank has the value

    @property
    def name(self) -> str:
        """Return the name of the value in the optimizer's file."""
        return f"{self.parameter.name}/{self.key}"

    @property
    def is_stored_here(self) -> bool:
        """Return whether this rank writes the value. The owner of element 0 writes a value that all ranks have."""
        if self.layout == "replicated":
            return self.is_owned or self.parameter.interval.start == 0
        return self.layout == "interval"


def unwrapped(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return the optimizer itself, which checkpoints contain, without the wrapper of `Accelerator.prepare`."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def group_parameters(
    optimizer: torch.optim.Optimizer, parameters: Sequence[LocalTensor]
) -> list[list[tuple[nn.Parameter, LocalTensor]]]:
    """Return (optimizer's parameter, model's `LocalTensor`) for each parameter of each group."""
    known = {id(local.tensor): local for local in parameters}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        strangers = [tuple(p.shape) for p in group["params"] if id(p) not in known]
        if strangers:
            raise CheckpointError(
                f"group {number} of {type(optimizer).__name__} contains {plural(len(strangers), 'tensor')} that are "
                f"not parameters of the model; the first has shape {strangers[0]}",
                hint="create the optimizer after sharding the model, or call fullshard.repoint(optimizer, model)",
            )
        groups.append([(p, known[id(p)]) for p in group["params"]])
    return groups


def group_records(
    optimizer: torch.optim.Optimizer, parameters: Sequence[LocalTensor], tensors: dict[str, torch.Tensor]
) -> list[GroupRecord]:
    """Return the records of the parameter groups. Hyperparameters that are tensors are added to `tensors`."""
    records = []
    for number, members in enumerate(group_parameters(optimizer, parameters)):
        options = {
            key: encode_value(value, where=f"optimizer/groups/{number}/{key}", tensors=tensors)
            for key, value in optimizer.param_groups[number].items()
            if key != "params"
        }
        records.append(GroupRecord(parameters=tuple(local.name for _, local in members), options=options))
    return records


def state_entries(optimizer: torch.optim.Optimizer, parameters: Sequence[LocalTensor]) -> Iterator[StateEntry]:
    """Yield the optimizer state that this rank reports: for elements that it saves and matrices that it owns."""
    for members in group_parameters(optimizer, parameters):
        for parameter, local in members:
            state = as_local(optimizer.state.get(parameter, {}))
            for key in [key for key in state if isinstance(optimizer, MatrixOptimizer) and optimizer.is_owned(key)]:
                if local.is_sharded or local.is_writer:
                    is_tensor = isinstance(state[key], torch.Tensor)
                    yield StateEntry(local, key, state[key], "replicated" if is_tensor else None, is_owned=True)
                del state[key]
            if not local.is_writer or local.interval.numel == 0:
                continue
            coded, parts = coded_tensors(state)
            rows = rows_of(optimizer, state) if local.is_sharded else {}
            parts |= {key.rpartition(".")[0] for key in rows}
            yield from (StateEntry(local, key, value, "interval") for key, value in coded.items())
            for key, value in {**state, **rows}.items():
                if key not in coded and key not in parts:
                    yield StateEntry(local, key, value, _layout(local, key, value))


def _layout(local: LocalTensor, key: str, value: Any) -> Literal["interval", "replicated"] | None:
    if not isinstance(value, torch.Tensor):
        return None
    is_counter = value.ndim == 0 and (local.is_sharded or key == "step")
    if is_counter:
        return "replicated"
    if tuple(value.shape) == tuple(local.held.shape):
        return "interval"
    if local.is_sharded:
        raise CheckpointError(
            f"optimizer state {key!r} of {local.name!r} has shape {tuple(value.shape)}, expected a scalar or the "
            f"shape of this rank's interval, {tuple(local.held.shape)}",
            hint="use an optimizer that keeps one value per element",
        )
    return "replicated"


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
            f"the average has {plural(len(held), 'parameter')}, but only {len(pairs)} of them belong to the model",
            hint="save each average with its own model",
        )
    yield from pairs


def average_records(
    average: EMA, parameters: Sequence[LocalTensor], manifest: Manifest, primary: Mapping[str, str], problems: list[str]
) -> Iterator[tuple[str, LocalTensor, StateTensorRecord, torch.Tensor]]:
    """Yield (stored name, parameter, record, this rank's part) of each stored average. Add to `problems` for others."""
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
