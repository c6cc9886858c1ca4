"""Convert optimizer state in the formats of torch programs to records of the native manifest.

The state is stored as `{"state": {PARAMETER: {KEY: value}}, "param_groups": [{..., "params": [PARAMETER, ...]}]}`, or
flattened as `state.PARAMETER.KEY` and `param_groups.PARAMETER.OPTION`. The class of the optimizer is not stored.
torch's AdamW, Adam and SGD can be recognized by their options; for other optimizers, the user must give the class.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from fullshard.checkpoint.format import GroupRecord, OptimizerRecord, StateTensorRecord, StateValueRecord, TensorRecord
from fullshard.checkpoint.offline.source import tensor_record
from fullshard.checkpoint.torch_files import check_tensor
from fullshard.checkpoint.values import encode_plain
from fullshard.core.errors import CheckpointError, plural

T = TypeVar("T")


def optimizer_record(
    nested: Mapping[str, Any], parameters: Mapping[str, TensorRecord], *, where: str
) -> tuple[OptimizerRecord, dict[str, Any]]:
    """Return the record of an optimizer's state dict, as described above, and its tensors by `PARAMETER/KEY`."""
    state, groups = nested.get("state"), nested.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        raise CheckpointError(f"{where} is not the state of an optimizer, because state or param_groups is missing")
    if any(not isinstance(name, str) for name in state):
        state, groups = _named(state, groups, where=where)
    strangers = sorted({*state, *(name for group in groups for name in group["params"])} - parameters.keys())
    if strangers:
        raise CheckpointError(
            f"{where} holds {plural(len(strangers), 'parameter')} unknown to the model; the first is {strangers[0]!r}",
            hint="import the model and the optimizer from the same save",
        )
    leaves: dict[str, Any] = {}
    records: dict[str, dict[str, StateTensorRecord | StateValueRecord]] = {name: {} for name in state}
    for name, key, value in ((name, key, value) for name, values in state.items() for key, value in values.items()):
        at = f"{name}/{key}"
        if not hasattr(value, "dtype"):
            records[name][key] = StateValueRecord(value=encode_plain(value, where=at))
            continue
        leaves[at] = check_tensor(value, where=at) if isinstance(value, torch.Tensor) else value
        found = tensor_record(value.shape, value.dtype, where=at)
        is_interval = found.shape == parameters[name].shape and not (found.shape == () and key == "step")
        records[name][key] = StateTensorRecord(
            shape=found.shape,
            dtype=found.dtype,
            pieces=(),
            layout="interval" if is_interval else "replicated",
            is_on_host=key == "step",
        )
    kept = tuple(
        GroupRecord(
            parameters=tuple(group["params"]),
            options={
                k: encode_plain(v, where=f"{where}: {k}")
                for k, v in group.items()
                if k not in ("params", "param_names")
            },
        )
        for group in groups
    )
    state_records = {name: values for name, values in records.items() if values}
    return OptimizerRecord(kind=_kind(kept), groups=kept, state=state_records), leaves


def unflatten(flat: Mapping[str, T], parameters: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Convert flattened optimizer state to the nested form. Parameters with the same options share a group."""
    state: dict[str, dict[str, T]] = {}
    options: dict[str, dict[str, T]] = {}
    for name, value in flat.items():
        kind, _, rest = name.partition(".")
        parameter, _, key = rest.rpartition(".")
        if kind == "state":
            state.setdefault(parameter, {})[key] = value
        elif kind == "param_groups":
            options.setdefault(parameter, {})[key] = value
    groups: list[dict[str, Any]] = []
    for parameter in sorted(options, key=list(parameters).index if options.keys() <= parameters.keys() else None):
        group = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == options[parameter]), None)
        if group is None:
            group = {**options[parameter], "params": []}
            groups.append(group)
        group["params"].append(parameter)
    return {"state": state, "param_groups": groups}


def _named(state: Mapping[Any, Any], groups: list[Any], *, where: str) -> tuple[dict[str, Any], list[Any]]:
    """Replace the parameter numbers in an optimizer's state dict with names, or raise `CheckpointError`."""
    # Only optimizers that were created from `named_parameters()` store the names.
    if not all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        raise CheckpointError(
            f"{where} identifies parameters by number, so their names are unknown",
            hint="import without the optimizer (--no-optimizer)",
        )
    names = {n: name for group in groups for n, name in zip(group["params"], group["param_names"], strict=True)}
    named = [{**group, "params": list(group["param_names"])} for group in groups]
    return {names[number]: values for number, values in state.items()}, named


def _kind(groups: tuple[GroupRecord, ...]) -> str:
    """Return the class name of the optimizer, or an empty string if it cannot be recognized."""
    options = groups[0].options if groups else {}
    if "decoupled_weight_decay" in options and "betas" in options and "momentum_decay" not in options:
        return "AdamW" if options["decoupled_weight_decay"] else "Adam"
    return "SGD" if {"momentum", "dampening", "nesterov"} <= options.keys() else ""
