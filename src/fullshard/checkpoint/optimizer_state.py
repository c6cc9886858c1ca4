"""Collect what is saved of an optimizer: its parameter groups, and the state of each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fullshard.checkpoint.coded_state import coded_tensors, rows_of
from fullshard.checkpoint.format import GroupRecord
from fullshard.checkpoint.tensors import LocalTensor
from fullshard.checkpoint.values import encode_value
from fullshard.core.errors import CheckpointError
from fullshard.engine.step.plain_tensors import as_local
from fullshard.features.matrices import MatrixOptimizer


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
                f"group {number} of {type(optimizer).__name__} contains {len(strangers)} tensors that are not "
                f"parameters of the model; the first has shape {strangers[0]}",
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
